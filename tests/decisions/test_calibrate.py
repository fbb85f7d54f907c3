"""Calibrate learns from half of the held-out data, holds for the settings it was made with, and touches nothing."""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from nullbayes.decisions import deciding, held_out
from nullbayes.errors import DataError, NotFittedError, NullBayesWarning, SettingsError
from support.calibrations import X_NEW, fitted, held
from support.drawing import randn
from support.models import CLASSIFICATION, REGRESSION
from support.trained import draw, trained

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


@pytest.fixture(scope="module")
def posterior() -> Any:
    return fitted()


# --- what it learns ---------------------------------------------------------------------------------------------------


def test_one_half_is_learned_from_and_the_other_ranked(posterior: Any) -> None:
    found = posterior.calibrate(*held(101)).calibration
    assert (found.n_learned, len(found.scores), len(found.errors)) == (50, 51, 101)
    assert found.kind == "combined"
    distances = ("neighbour in the table", "neighbour 1", "neighbour 10", "neighbour 50", "residual")
    assert found.statistics == ("generalized_entropy", "energy", *distances, "log sum_variance")
    assert sum(found.weights.values()) == pytest.approx(1.0)
    assert "ranked" in str(found)
    assert "51 held-out examples" in str(found)


def test_at_most_a_thousand_are_learned_from(posterior: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "_MOST_LEARNED", 30)
    found = posterior.calibrate(*held(101)).calibration
    assert (found.n_learned, len(found.scores)) == (30, 71)


def test_strangers_are_made_of_examples_that_are_not_ranked(posterior: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Any] = []
    made = deciding.made_strangers
    monkeypatch.setattr(deciding, "made_strangers", lambda p, pool, mask: pools.append(pool) or made(p, pool, mask))
    x, y = held(90)
    found = posterior.calibrate(DataLoader(TensorDataset(x, y), batch_size=16)).calibration
    used = torch.cat(pools[0])
    assert len(used) == 45
    scores = posterior.ood_score(used, "combined")
    assert not any(float((found.scores - score).abs().min()) < 1e-9 for score in scores.cpu())
    ranked = [i for i, row in enumerate(x) if not bool((used == row).all(1).any())]
    assert torch.allclose(posterior.ood_score(x[ranked], "combined").cpu().sort().values, found.scores)


@pytest.mark.parametrize("positions", [(), (5,)])
@pytest.mark.parametrize("mixed", [0.0, 0.1])  # then one negative number spoils all positions
def test_strangers_that_a_network_cannot_take_cause_no_warning(positions: tuple[int, ...], mixed: float) -> None:
    """Of positive numbers some strangers are negative, and nobody can leave these out."""

    class Logarithms(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            logs = x.log()
            return super().forward(logs + mixed * logs.flatten(1).mean(1).view(-1, *(1,) * (x.ndim - 1)))

    x = randn(160, *positions, 4, generator=torch.Generator().manual_seed(3)).exp()
    model = Logarithms(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3, 4))
    posterior = nb.baselines.DiagonalLaplace(model).fit(x[:60], x[:60, ..., :3].argmax(-1), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = posterior.calibrate(x[60:], x[60:, ..., :3].argmax(-1)).calibration
    assert "negative" in found.strangers


def test_the_weights_follow_from_the_learned_half_alone(posterior: Any) -> None:
    """Else a ranked example would have had a say in its own score."""
    x, y = held(80)
    first = posterior.calibrate(x, y).calibration
    keys = torch.rand(80, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    ranked = keys.argsort()[40:]
    other = x.clone()
    other[ranked] = held(40, seed=7)[0]
    second = posterior.calibrate(other, y).calibration
    assert second.combine == first.combine
    assert not torch.equal(second.scores, first.scores)


@pytest.mark.parametrize("kind", ["max_variance", "mutual_information", "energy", "generalized_entropy"])
def test_a_score_by_name_is_ranked_by_all_examples(posterior: Any, kind: str) -> None:
    x, y = held(60)
    found = posterior.calibrate(x, y, kind=kind).calibration
    assert (found.kind, found.n_learned, found.combine, found.weights) == (kind, 0, None, {})
    assert torch.equal(found.scores, posterior.ood_score(x, kind).double().cpu().sort().values)
    assert torch.equal(posterior.ood_score(X_NEW), posterior.ood_score(X_NEW, kind))
    with pytest.raises(NotFittedError, match=rf'calibrated for "{kind}": calibrate\(held_out, kind="combined"\)'):
        posterior.ood_score(X_NEW, "combined")


def test_the_combined_score_is_the_default_after_calibrate(posterior: Any) -> None:
    before = fitted().ood_score(X_NEW)
    assert torch.equal(before, posterior.ood_score(X_NEW, "entropy"))
    posterior.calibrate(*held())
    assert torch.equal(posterior.ood_score(X_NEW), posterior.ood_score(X_NEW, "combined"))
    with pytest.raises(SettingsError, match='"combined" is of whole inputs: for positions name another'):
        posterior.ood_score(X_NEW, "combined", per="position")
    with pytest.raises(SettingsError, match=r'"combined" is that of the calibration.*leave pred_type out'):
        posterior.ood_score(X_NEW, pred_type="sampled")
    with pytest.raises(SettingsError, match="one prediction per input"):
        posterior.ood_score(X_NEW, per="position")


# --- what it does not touch -------------------------------------------------------------------------------------------


def test_the_model_and_the_random_states_stay_as_they_are() -> None:
    model = copy.deepcopy(trained(CLASSIFICATION)).train()
    posterior = nb.ProjectedPosterior(model, prior_precision=10.0).fit(*draw(CLASSIFICATION), 4, progress=False)
    before = copy.deepcopy(model.state_dict()), set(vars(model)), [p.requires_grad for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    x, y = held()
    kept = x.clone()
    posterior.calibrate(DataLoader(TensorDataset(x, y), batch_size=10))
    posterior.p_value(x), posterior.is_ood(x), posterior.predict_set(x)
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert (set(vars(model)), [p.requires_grad for p in model.parameters()]) == before[1:]
    assert all(p.grad is None for p in model.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # noqa: NPY002
    assert torch.equal(x, kept)


def test_a_calibration_that_fails_leaves_the_earlier_one(posterior: Any) -> None:
    x, y = held()
    bad = x.clone()
    bad[-1] = torch.nan
    found, flagged = posterior.calibrate(x, y).calibration, posterior.is_ood(X_NEW)
    for data in ((bad, y), (x[:5], y[:5]), draw(CLASSIFICATION)):
        with pytest.raises(DataError):
            posterior.calibrate(*data)
        assert posterior.calibration is found
        assert torch.equal(posterior.is_ood(X_NEW), flagged)


class Exploding(nn.Module):
    """A linear network that is infinite far away from what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs().sum(1, keepdim=True) > 1000.0, torch.inf, self.layer(x))


def test_scores_that_are_not_finite_are_refused() -> None:
    x, y = held()
    posterior = nb.baselines.MAP(Exploding().double()).fit(x[:9], y[:9], progress=False)
    far = torch.full_like(x[:1], 1e3)
    for kind in ("energy", "combined"):
        with pytest.raises(DataError, match=f"The score '{kind}' of 1 of the 92 held-out examples is not finite"):
            posterior.calibrate(torch.cat([x[9:], far]), kind=kind)
    posterior.calibrate(x[9:], kind="combined")
    assert posterior.p_value(torch.cat([x[9:], far]))[-1] == 1 / 47
    assert posterior.is_ood(far).item()


# --- when it does not apply -------------------------------------------------------------------------------------------


def test_before_a_fit_and_before_a_calibration() -> None:
    posterior = nb.ProjectedPosterior(trained(CLASSIFICATION))
    asks = (posterior.p_value, posterior.is_ood, posterior.predict_set)
    for ask in (*asks, lambda x: posterior.calibrate(x)):
        with pytest.raises(NotFittedError, match=r"call fit\(loader\) first"):
            ask(X_NEW)
    assert posterior.calibration is None
    posterior.fit(*draw(CLASSIFICATION), 4, progress=False)
    for ask in asks:
        with pytest.raises(NotFittedError, match=r"call posterior.calibrate\(held_out_loader\) first"):
            ask(X_NEW)


def test_a_new_fit_forgets_the_calibration() -> None:
    posterior = fitted().calibrate(*held())
    posterior.fit(*draw(CLASSIFICATION), 4, progress=False)
    assert posterior.calibration is None
    for kind in (nb.baselines.DiagonalLaplace, nb.baselines.MAP):
        other = kind(trained(CLASSIFICATION)).fit(*draw(CLASSIFICATION), 4, progress=False).calibrate(*held())
        assert other.fit(*draw(CLASSIFICATION), 4, progress=False).calibration is None


CHANGES: dict[str, tuple[Any, str]] = {
    "prior_precision": (lambda p: setattr(p, "prior_precision", 20.0), "prior precision was 10 .*, and is 20 now"),
    "temperature": (lambda p: setattr(p, "temperature", 2.0), "temperature was 1 .*, and is 2 now"),
    "extend": (lambda p: p.extend(2, progress=False), "number of samples was 4 .*, and is 6 now"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_other_settings_need_another_calibration(name: str) -> None:
    posterior = fitted().calibrate(*held())
    change, sentence = CHANGES[name]
    change(posterior)
    for ask in (posterior.p_value, posterior.is_ood, posterior.predict_set, posterior.ood_score):
        with pytest.raises(NotFittedError, match=f"The {sentence}: calibrate it again"):
            ask(X_NEW)
    assert posterior.ood_score(X_NEW, "energy").shape == (30,)
    assert posterior.calibrate(*held()).p_value(X_NEW).shape == (30,)


def test_another_noise_of_a_regression_needs_another_calibration() -> None:
    posterior = fitted(REGRESSION).calibrate(*held(task=REGRESSION))
    assert posterior.calibration.sigma_noise == (0.5,)
    posterior._likelihood = dataclasses.replace(posterior.likelihood, sigma_noise=0.6)
    with pytest.raises(NotFittedError, match=r"The noise of the regression is another .*: calibrate it again"):
        posterior.predict_interval(X_NEW)


@pytest.mark.parametrize("name", CHANGES)
def test_saving_a_calibration_that_does_not_apply_any_more_warns(name: str, tmp_path: Path) -> None:
    posterior = fitted().calibrate(*held())
    posterior.save(tmp_path / "file")
    change, sentence = CHANGES[name]
    change(posterior)
    with pytest.warns(NullBayesWarning, match=f"The {sentence}: calibrate it again. Until then decisions are refused"):
        posterior.save(tmp_path / "file")


@pytest.mark.parametrize("how", ["tune", "optimize_prior_precision", "fit", "file"])
def test_calibrating_with_the_data_that_tuned_warns(how: str, tmp_path: Path) -> None:
    data, sentence = held(200), "of the 200 held-out inputs have chosen the precision or the temperature before"
    posterior = fitted()
    if how == "fit":
        posterior.fit(*draw(CLASSIFICATION), 4, held_out=[data], progress=False)
    else:
        _ = posterior.optimize_prior_precision([data], "grid") if how.startswith("opt") else posterior.tune([data])
    if how == "file":
        posterior.save(tmp_path / "file")
        posterior = nb.load(tmp_path / "file", posterior._network.model)
    with pytest.warns(NullBayesWarning, match=f"200 {sentence}.*tune with one part, and calibrate with the other"):
        posterior.calibrate(*data)
    x, y = held(200, seed=2)
    x[:5] = data[0][:5]  # a few are no reason
    posterior.calibrate(x, y)
    x[:50] = data[0][:50]
    with pytest.warns(NullBayesWarning, match=f"50 {sentence}"):
        posterior.calibrate(x, y)
    fitted().calibrate(*data)


def test_settings_that_come_back_need_none() -> None:
    for posterior in (fitted(), fitted(kind=nb.baselines.DiagonalLaplace)):
        before = posterior.calibrate(*held()).p_value(X_NEW)
        posterior.prior_precision = 30.0
        posterior.prior_precision = 10.0
        assert torch.equal(posterior.p_value(X_NEW), before)


def test_levels_and_parts_that_are_not_valid(posterior: Any) -> None:
    x, y = held()
    posterior.calibrate(x, y)
    for labels in (y, y.tolist(), y.cpu().numpy()):
        with pytest.raises(SettingsError, match=r"without labels: .*, not a (Tensor|list|ndarray) of 100"):
            posterior.is_ood(x, labels)
    for alpha in (0.0, 1.0, 5, "0.05", None):
        for ask in (posterior.is_ood, posterior.predict_set):
            with pytest.raises(SettingsError, match="alpha must be a number between 0 and 1"):
                ask(X_NEW, alpha)
    for ask in (posterior.p_value, posterior.is_ood):
        with pytest.raises(SettingsError, match="There is no score of single positions"):
            ask(X_NEW, per="position")
        with pytest.raises(SettingsError, match="per must be one of input, position, not 'row'"):
            ask(X_NEW, per="row")
    with pytest.raises(SettingsError, match="kind must be one of"):
        posterior.calibrate(*held(), kind="doubt")


def test_decisions_are_p_values_up_to_the_level(posterior: Any) -> None:
    posterior.calibrate(*held(199), kind="max_variance")
    p = posterior.p_value(X_NEW)
    assert p.dtype == torch.float64
    for alpha in (0.005, 0.05, 0.1, float(p.median())):
        assert torch.equal(posterior.is_ood(X_NEW, alpha), p <= alpha + 1e-12)


# --- precisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_networks_of_other_precisions(dtype: torch.dtype) -> None:
    model = copy.deepcopy(trained(CLASSIFICATION)).to(dtype)
    wanted = torch.float32
    x, y = draw(CLASSIFICATION)
    posterior = nb.ProjectedPosterior(model, prior_precision=10.0).fit(x.to(wanted), y, 4, progress=False)
    new, labels = held(300)
    posterior.calibrate(new.to(wanted), labels)
    found = posterior.p_value(X_NEW.to(wanted))
    assert found.dtype == torch.float64
    assert torch.isfinite(found).all()
    assert torch.equal(posterior.is_ood(X_NEW.to(wanted)), found <= 0.05)
    assert posterior.predict_set(X_NEW.to(wanted)).dtype == torch.bool
    posterior.calibrate(new.to(wanted), labels, kind="energy")  # which does not depend on the samples
    exact = fitted().calibrate(new, labels, kind="energy").p_value(X_NEW)
    assert float((posterior.p_value(X_NEW.to(wanted)) - exact).abs().max()) < 0.02


def test_autocast_does_not_change_a_decision(posterior: Any) -> None:
    plain = posterior.calibrate(*held()).p_value(X_NEW)
    with torch.autocast(X_NEW.device.type, dtype=torch.bfloat16):
        again = posterior.calibrate(*held()).p_value(X_NEW)
    assert torch.equal(plain, again)


def test_regressions_are_calibrated_by_distances_and_variance() -> None:
    found = fitted(REGRESSION).calibrate(*held(task=REGRESSION)).calibration
    distances = ("neighbour in the table", "neighbour 1", "neighbour 10", "neighbour 50", "residual")
    assert found.statistics == (*distances, "log sum_variance")
    assert found.errors.shape == (100, 2)
