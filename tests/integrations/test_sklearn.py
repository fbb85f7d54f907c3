"""The estimators are those of scikit-learn: its own checks pass, and answers are those of the posterior inside."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nullbayes.errors import ModelError, NotFittedError, SettingsError

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install 'nullbayes[sklearn]'")
pytestmark = pytest.mark.cpu

from sklearn.base import clone  # noqa: E402 - after the package is known to be there
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils import estimator_checks  # noqa: E402

from nullbayes.integrations.sklearn import NullBayesClassifier, NullBayesRegressor  # noqa: E402

SMALL: dict[str, Any] = {"epochs": 15, "n_samples": 4, "random_state": 0}
EXPECTED_FAILURES: dict[str, str] = {}  # none: scikit-learn's checks hold as they are
RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 3))
LABELS = np.array(["a", "b", "c"])[X.argmax(1)]
TARGETS = 1000.0 + 50.0 * np.sin(X[:, 0]) + RNG.normal(size=240)


def linear(n_features: int, n_outputs: int) -> nn.Module:
    return nn.Linear(n_features, n_outputs)


@pytest.fixture(scope="module")
def classifier() -> NullBayesClassifier:
    return NullBayesClassifier(**SMALL).fit(X, LABELS)


@pytest.fixture(scope="module")
def regressor() -> NullBayesRegressor:
    return NullBayesRegressor(**SMALL).fit(X, TARGETS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # data of a few examples make posteriors that warn
@pytest.mark.parametrize("kind", [NullBayesClassifier, NullBayesRegressor])
def test_checks_of_scikit_learn_pass(kind: Any) -> None:
    found = estimator_checks.check_estimator(kind(**SMALL), expected_failed_checks=EXPECTED_FAILURES, on_skip=None)
    assert sum(check["status"] == "passed" for check in found) > 50


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [NullBayesClassifier, NullBayesRegressor])
@pytest.mark.parametrize(
    "check",
    [
        "check_estimators_unfitted",
        "check_fit_idempotent",
        "check_methods_subset_invariance",
        "check_dict_unchanged",
        "check_n_features_in_after_fitting",
    ],
)
def test_some_checks_of_scikit_learn_pass(kind: Any, check: str) -> None:
    getattr(estimator_checks, check)(kind.__name__, kind(**SMALL | {"epochs": 3}))


def test_answers_of_the_classifier_are_those_of_its_posterior(classifier: NullBayesClassifier) -> None:
    inside, x = classifier.posterior_, torch.tensor(X)
    assert classifier.score(X, LABELS) > 0.9
    assert np.array_equal(classifier.predict_proba(X), inside.predict(x).probs)
    assert np.array_equal(classifier.predict_std(X), inside.predict(x).std)
    assert np.array_equal(classifier.decision_function(X), classifier.module_(x).detach())
    assert np.array_equal(classifier.predict(X), classifier.classes_[classifier.decision_function(X).argmax(1)])
    assert np.array_equal(classifier.ood_score(X), inside.ood_score(x))
    assert np.array_equal(classifier.ood_score(X, "entropy"), inside.ood_score(x, "entropy"))
    assert np.array_equal(classifier.is_ood(X, 0.1), inside.is_ood(x, 0.1))
    assert np.array_equal(classifier.predict_set(X), inside.predict_set(x, 0.1))
    assert inside.report.n_data == 192  # a fifth is held out


def test_answers_of_the_regressor_are_in_the_units_of_the_targets(regressor: NullBayesRegressor) -> None:
    scaled = NullBayesRegressor(**SMALL).fit(X, (TARGETS - TARGETS.mean()) / TARGETS.std())
    mean, std = regressor.predict(X, return_std=True)
    own_mean, own_std = scaled.predict(X, return_std=True)
    assert np.allclose(mean, TARGETS.mean() + TARGETS.std() * own_mean)
    assert np.allclose(std, TARGETS.std() * own_std)
    assert np.array_equal(regressor.predict_std(X), std)
    lower, upper = regressor.predict_interval(X, 0.2)
    for bound, own in zip((lower, upper), scaled.predict_interval(X, 0.2), strict=True):
        assert np.allclose(bound, TARGETS.mean() + TARGETS.std() * own)
    inside = regressor.posterior_.predict_interval(torch.tensor(X), 0.2)  # its coverage: decisions/test_guarantees.py
    assert np.allclose((lower - TARGETS.mean()) / TARGETS.std(), inside[0][:, 0])
    assert np.array_equal(regressor.is_ood(X), regressor.posterior_.is_ood(torch.tensor(X)))


def test_a_fraction_of_zero_leaves_decisions_out_and_intervals_in() -> None:
    both = np.stack([TARGETS, -TARGETS], 1)
    regressor = NullBayesRegressor(**SMALL, calibration_fraction=0.0).fit(X, both)
    assert regressor.posterior_.report.n_data == len(X)
    lower, upper = regressor.predict_interval(X)
    assert lower.shape == both.shape
    assert np.allclose((lower + upper) / 2, regressor.predict(X))
    with pytest.raises(NotFittedError, match="takes 40 held-out examples: use a larger calibration_fraction"):
        regressor.is_ood(X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*held-out inputs are")
def test_a_table_with_two_rows_that_occur_twice_can_be_fitted() -> None:
    """A split puts the copies on different sides, which is no reason to refuse the table."""
    x, labels = X.copy(), LABELS.copy()
    x[[1, 3]], labels[[1, 3]] = x[[0, 2]], labels[[0, 2]]
    for seed in range(4):
        made = NullBayesClassifier(epochs=1, n_samples=4, random_state=seed).fit(x, labels)
        assert made.is_ood(x).shape == (240,)


def test_estimators_go_into_pipelines_searches_clones_and_pickles(classifier: NullBayesClassifier) -> None:
    pipeline = make_pipeline(StandardScaler(), NullBayesClassifier(**SMALL))
    search = GridSearchCV(pipeline, {"nullbayesclassifier__posterior": ["projected", "loss-projected"]}, cv=2)
    search.fit(X, LABELS)
    assert search.score(X, LABELS) > 0.5
    copy, read = clone(classifier), pickle.loads(pickle.dumps(classifier))
    assert not hasattr(copy, "posterior_")
    assert np.array_equal(copy.fit(X, LABELS).predict_proba(X), classifier.predict_proba(X))  # the same random_state
    assert np.array_equal(read.predict_proba(X), classifier.predict_proba(X))
    assert np.array_equal(read.is_ood(X), classifier.is_ood(X))


def test_a_fit_leaves_the_random_numbers_of_torch_alone() -> None:
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    NullBayesClassifier(**SMALL).fit(X, LABELS)
    assert torch.equal(torch.rand(2), wanted)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(SettingsError, match="posterior must be one of 'projected', 'loss-projected', not 'exact'"):
        NullBayesClassifier(posterior="exact").fit(X, LABELS)
    with pytest.raises(SettingsError, match=r"calibration_fraction must be at least 0 and less than 1, not 1\.5"):
        NullBayesClassifier(calibration_fraction=1.5).fit(X, LABELS)
    with pytest.raises(ModelError, match="training diverged: scale the features"):
        NullBayesRegressor(linear, lr=1e300, epochs=9).fit(X, TARGETS)
    with pytest.raises(ValueError, match="one class only"):
        NullBayesClassifier().fit(X, np.zeros(len(X)))
