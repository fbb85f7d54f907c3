"""Settings and questions that make no sense have an error of their own class, which says what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from nullbayes.errors import (
    DataError,
    InputError,
    LikelihoodError,
    ModelError,
    NotFittedError,
    NullBayesError,
    SettingsError,
)
from nullbayes.predictive.scores import SCORES, WITHOUT_PROBABILITIES
from support.models import BATCHNORM, CLASSIFICATION, MLP, Task, call
from support.posterior_fits import DATA, X, Y, attempt, each_kind

pytestmark = pytest.mark.filterwarnings("ignore:.*are training data")  # which test no one's quality here

# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_samples", [1, 0, -3])
def test_a_fit_needs_two_samples(n_samples: int) -> None:
    with pytest.raises(SettingsError, match=f"at least 2 to speak of a variance, not {n_samples}"):
        nb.ProjectedPosterior(MLP.build()).fit(DATA, n_samples)


SETTINGS_REFUSED = {
    "projector": ({"projector": "exact"}, r'"auto" or a projector such as nb.projectors.Krylov\(\), not \'exact\''),
    "no size": ({"memory_limit": "plenty"}, "memory_limit='plenty' is not a size.*\"8GB\""),
    "odd size": ({"memory_limit": "1.2.3GB"}, "is not a size"),
    "negative size": ({"memory_limit": "-8GB"}, "is not a size"),
    "zero": ({"memory_limit": 0}, "memory_limit must be positive and finite.* not 0"),
    "zero GB": ({"memory_limit": "0GB"}, "memory_limit must be positive"),
    "far too little": ({"memory_limit": 100}, "take fewer samples or raise memory_limit"),
    "tolerance of one": ({"tolerance": 1.0}, "tolerance needs 0 <= rtol < 1"),
    "negative tolerance": ({"tolerance": -0.1}, "tolerance needs 0 <= rtol < 1"),
    "base of another size": ({"base": torch.zeros(4, 3)}, r"shape \(4, 3\); needed is \(4, 51\)"),
    "base of too few": ({"base": torch.zeros(3, 51)}, r"shape \(3, 51\); needed is \(4, 51\)"),
}


@pytest.mark.parametrize(("settings", "fragment"), SETTINGS_REFUSED.values(), ids=SETTINGS_REFUSED)
def test_wrong_settings_of_a_fit_are_refused(settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(SettingsError, match=fragment):
        attempt(**settings)


def test_a_base_without_a_parameter_is_refused() -> None:
    with pytest.raises(ModelError, match=r"lack '0\.bias'"):
        attempt(base={"0.weight": torch.zeros(4, 6, 4)})


def test_a_failed_fit_leaves_no_half_fitted_posterior() -> None:
    posterior = attempt()
    with pytest.raises(SettingsError):
        posterior.fit(DATA, 4, projector="exact")
    with pytest.raises(NotFittedError, match=r"fit\(loader\)"):
        posterior.predict(X)


@pytest.mark.parametrize(
    "value", [0, 0.0, -1.0, torch.nan, torch.inf, pytest.param(10**400, id="huge"), "best", None, [1.0]]
)
def test_wrong_prior_precisions_are_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match='a positive number, "auto", "optimal" or "paper"'):
        nb.ProjectedPosterior(MLP.build(), prior_precision=value)
    posterior = attempt()
    before = posterior.prior_precision
    with pytest.raises(SettingsError, match='a positive number, "auto", "optimal" or "paper"'):
        posterior.prior_precision = value
    assert posterior.prior_precision == before


@pytest.mark.parametrize("make", [np.float32, np.float64, np.int64, torch.tensor, int], ids=lambda m: m.__name__)
def test_numbers_may_be_of_any_numeric_type(make: Callable[[int], Any]) -> None:
    for kind in (nb.ProjectedPosterior, nb.baselines.DiagonalLaplace):
        posterior = kind(MLP.build(), prior_precision=make(3))
        assert posterior.fit(DATA, np.int64(4), progress=False).prior_precision == 3.0
        assert posterior.predict(X, n_samples=np.int64(2)).samples.shape[0] == 2


CALLS_REFUSED = {
    "pred_type": (lambda p: p.predict(X, pred_type="glm"), SettingsError, "linearized, sampled, not 'glm'"),
    "kind": (lambda p: p.ood_score(X, "variance"), SettingsError, "max_variance, sum_variance.*not 'variance'"),
    "method": (lambda p: p.optimize_prior_precision(DATA, "guess"), SettingsError, "marglik, closed_form, not 'guess'"),
    "too many samples": (lambda p: p.predict(X, n_samples=5), SettingsError, r"between 2 and 4, not 5; extend\(\)"),
    "no samples": (lambda p: p.predict(X, n_samples=0), SettingsError, "n_samples must be"),
    "one sample": (lambda p: p.predict(X, n_samples=1), SettingsError, r"between 2 and .*, not 1; sample\(1\) gives"),
    "too many drawn": (lambda p: p.sample(5), SettingsError, "between 1 and 4"),
    "half a sample": (lambda p: p.predict(X, n_samples=2.5), SettingsError, "a whole number, not 2.5"),
    "half a sample drawn": (lambda p: p.sample(2.5), SettingsError, "a whole number, not 2.5"),
    "half a sample put in": (lambda p: p.sampled_parameters(0.5).__enter__(), SettingsError, "a whole number, not 0.5"),
    "extend by half": (lambda p: p.extend(0.5), SettingsError, "a whole number, not 0.5"),
    "extend by none": (lambda p: p.extend(0), SettingsError, "at least 1, not 0"),
    "no such sample": (lambda p: p.sampled_parameters(4).__enter__(), SettingsError, "no sample 4: there are 4"),
    "NaN inputs": (lambda p: p.predict(X * torch.nan), DataError, "NaN or Inf"),
    "NaN in a loader": (lambda p: p.predict([X, X / 0]), DataError, "NaN or Inf"),
    "no inputs": (lambda p: p.predict(3.0), DataError, "a tensor, an array, a tuple, a mapping or a loader.*not float"),
    "empty loader": (lambda p: p.predict([]), DataError, "yields no batch"),
    "no examples": (lambda p: p.predict(X[:0]), DataError, "nothing to predict"),
    "empty loader, exact": (lambda p: p.functional_variance([], exact=True), DataError, "yields no batch"),
    "shuffled inputs": (
        lambda p: p.predict(DataLoader(TensorDataset(X, Y), shuffle=True)), DataError, "shuffle=False",
    ),
    "nothing to check": (lambda p: p.check_fit([(X, Y * 0 - 100)]), DataError, "nothing to compare predictions with"),
    "nothing to tune by": (
        lambda p: p.optimize_prior_precision([(X, Y * 0 - 100)], "nll"), DataError, "nothing to compare",
    ),
    "other labels": (lambda p: p.check_fit([(X, Y + 5)]), LikelihoodError, "labels must be 0 to 2"),
    "other inputs": (lambda p: p.prepare([(X[:, :2], Y)]), InputError, r"n, 2.*in training it had .*n, 4"),
    "other data": (lambda p: p.release().prepare([(X[:3], Y[:3])]), DataError, "15 rows.*9"),
}  # fmt: skip


@pytest.mark.parametrize(("ask", "error", "fragment"), CALLS_REFUSED.values(), ids=CALLS_REFUSED)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_wrong_arguments_of_queries_are_refused(
    ask: Callable[[Any], Any], error: type[NullBayesError], fragment: str
) -> None:
    with pytest.raises(error, match=fragment):
        ask(attempt())


def test_the_projector_that_a_memory_error_advises_is_accepted() -> None:
    """The message about memory points to Lanczos: it must then be taken."""
    refused = []
    for little in range(4 * 51 * 8, 2**20, 4 * 51 * 8):  # room for samples, then for more
        try:
            attempt(memory_limit=little)
        except SettingsError as error:
            refused.append((little, str(error)))
        else:
            break
    little, message = refused[-1]
    assert "projector=nb.projectors.Lanczos(rank=...)" in message
    posterior = attempt(memory_limit=little, projector=nb.projectors.Lanczos(rank=15))
    assert max(posterior.report.residual) < 1e-2


@pytest.mark.parametrize("kind", [kind for kind in SCORES if kind not in WITHOUT_PROBABILITIES])
def test_scores_of_probabilities_need_probabilities(kind: str) -> None:
    posterior = attempt(MLP.build(1), [(X, torch.zeros(5, dtype=torch.float64))], "regression")
    with pytest.raises(LikelihoodError, match="'max_variance'"):
        posterior.ood_score(X, kind)


# --- order ------------------------------------------------------------------------------------------------------------

BEFORE_FIT = {
    "predict": lambda p: p.predict(X),
    "call": lambda p: p(X),
    "ood_score": lambda p: p.ood_score(X),
    "functional_variance": lambda p: p.functional_variance(X),
    "exact variance": lambda p: p.functional_variance(X, exact=True),
    "report": lambda p: p.report,
    "directions": lambda p: p.directions,
    "n_samples": lambda p: p.n_samples,
    "sample": lambda p: p.sample(),
    "sampled_parameters": lambda p: p.sampled_parameters(0).__enter__(),
    "extend": lambda p: p.extend(3),
    "prepare": lambda p: p.prepare(DATA),
    "check_fit": lambda p: p.check_fit(DATA),
    "prior_precision": lambda p: p.prior_precision,
    "closed form": lambda p: p.optimize_prior_precision(method="closed_form"),
    "nll": lambda p: p.optimize_prior_precision(DATA, "nll"),
    "marglik": lambda p: p.optimize_prior_precision(DATA, "marglik"),
    "save": lambda p: p.save("never written"),
}


@pytest.mark.parametrize("ask", BEFORE_FIT.values(), ids=BEFORE_FIT)
@each_kind
def test_methods_before_fit_are_refused(kind: type, ask: Callable[[Any], Any]) -> None:
    with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
        ask(kind(MLP.build()))


def test_running_statistics_changed_after_fit_are_noticed() -> None:
    task: Task = CLASSIFICATION
    model, (x, y) = BATCHNORM.build(), task.data(BATCHNORM, n=4)
    posterior = nb.ProjectedPosterior(model).fit([(x, y)], 4, progress=False)
    call(model.train(), x)
    with pytest.raises(ModelError, match=r"running_mean.*has changed"):
        posterior.predict(x)
