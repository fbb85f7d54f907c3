"""Every method refuses what it cannot use, with a sentence that says what to change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nullbayes.errors import DataError, LikelihoodError, ModelError, NotFittedError, SettingsError
from support.method_table import METHODS, X_NEW, Method, each_baseline, each_method, each_sampler
from support.models import CLASSIFICATION, CUSTOM, MLP

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # the networks are not trained


def shuffled() -> Any:
    return DataLoader(TensorDataset(*CLASSIFICATION.data(n=9)), batch_size=3, shuffle=True)


@pytest.mark.parametrize(
    ("ask", "error", "advice"),
    [
        (lambda m: m.fit(loader=shuffled()), DataError, "shuffle=False"),
        (lambda m: m.fit(loader=[]), DataError, "empty"),
        (lambda m: m.fit(loader=[(X_NEW, torch.full((4,), 3))]), LikelihoodError, "labels must be 0 to 2"),
        (lambda m: m.fit(loader=[(X_NEW.clone().fill_(float("nan")), torch.zeros(4).long())]), DataError, "NaN"),
        (lambda m: m.fit(memory_limit="much"), SettingsError, "8GB"),
        (lambda m: m.fit(memory_limit=math.inf), SettingsError, "positive and finite, .* not inf"),
        (lambda m: m.fit(generator=3), SettingsError, r"torch.Generator\(\).manual_seed"),
        (lambda m: m.fit(n_samples=0), SettingsError, "n_samples must be at least"),
        (lambda m: m.fit(n_samples=4.5), SettingsError, "n_samples must be a whole number, not 4.5"),
        (lambda m: m.make(prior_precision=None), SettingsError, "a positive number.* not None"),
        (lambda m: m.make().ood_score(X_NEW), NotFittedError, r"call fit\(loader\) first"),
        (lambda m: m.make().predict(X_NEW), NotFittedError, r"call fit\(loader\) first"),
        (lambda m: m.make().save("nowhere"), NotFittedError, r"call fit\(loader\) first"),
        (lambda m: m.make(parameters="nothing.*"), ModelError, "matches none of"),
        (lambda m: m.fit().ood_score(X_NEW * float("inf")), DataError, "NaN"),
    ],
)  # fmt: skip
@each_method
def test_unusable_arguments_are_refused(method: Method, ask: Any, error: type[Exception], advice: str) -> None:
    with pytest.raises(error, match=advice):
        ask(method)


@pytest.mark.parametrize("method", [m for m in METHODS if not m.samples], ids=lambda method: method.name)
def test_methods_without_predictions_say_what_to_use_instead(method: Method) -> None:
    posterior = method.fit()
    for ask in (posterior, posterior.predict, posterior.check_fit, posterior.sample):
        with pytest.raises(SettingsError, match=r"makes no predictions.*nb\.ProjectedPosterior"):
            ask(X_NEW)


@each_baseline
def test_only_methods_that_found_a_curvature_have_one(method: Method) -> None:
    with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
        _ = method.make().curvature
    posterior = method.fit()
    if method.exact or method.scores == ("local_ensemble",):
        assert posterior.curvature.n_columns == posterior.report.n_parameters
    else:
        with pytest.raises(SettingsError, match=f"{method.name} has no curvature"):
            _ = posterior.curvature


@each_sampler
def test_predictions_that_make_no_sense_are_refused(method: Method) -> None:
    posterior = method.fit()
    with pytest.raises(SettingsError, match="pred_type must be"):
        posterior.predict(X_NEW, pred_type="guess")
    with pytest.raises(SettingsError, match="n_samples must be"):
        posterior.predict(X_NEW, n_samples=99)


@each_method
def test_a_model_that_changed_is_refused(method: Method) -> None:
    model = MLP.build()
    posterior = method.fit(model=model)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(ModelError, match="has changed"):
        posterior.ood_score(X_NEW)
    with pytest.raises(ModelError, match="has changed"):
        posterior.fit([CLASSIFICATION.data()], 4, progress=False, **method.extra(MLP.build()))


@each_baseline
def test_a_custom_loss_is_accepted_or_refused(method: Method) -> None:
    if method.custom:
        method.fit(CUSTOM)
        return
    with pytest.raises(LikelihoodError, match=r"Hessian|of your own|needs one class per input|is a score of logits"):
        method.fit(CUSTOM)


@each_method
def test_a_failed_fit_leaves_nothing_behind(method: Method) -> None:
    posterior = method.fit()
    with pytest.raises(LikelihoodError):
        posterior.fit([(X_NEW, torch.full((4,), 3))], 4, progress=False, **method.extra(MLP.build()))
    with pytest.raises(NotFittedError):
        posterior.ood_score(X_NEW)
