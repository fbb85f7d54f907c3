"""Calibrate learns from any held-out data that are not training data, always in the same way, and touches nothing."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from nullbayes.decisions import deciding, held_out
from nullbayes.errors import DataError, LikelihoodError, NotFittedError, SettingsError
from support.drawing import randint, randn
from support.models import CLASSIFICATION, REGRESSION, Task
from support.trained import draw, trained

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
X_NEW = draw(CLASSIFICATION, 30, 9)[0]


def fitted(task: Task = CLASSIFICATION, kind: Any = nb.ProjectedPosterior, n_samples: int = 4, **settings: Any) -> Any:
    posterior = kind(trained(task), task.likelihood, prior_precision=10.0, **settings)
    return posterior.fit(*draw(task), n_samples, generator=torch.Generator().manual_seed(0), progress=False)


@pytest.fixture(scope="module")
def posterior() -> Any:
    return fitted()


def held(n: int = 100, seed: int = 1, task: Task = CLASSIFICATION) -> tuple[Tensor, Tensor]:
    return draw(task, n, seed)


# --- what it learns ---------------------------------------------------------------------------------------------------


def test_one_half_is_learned_from_and_the_other_ranked(posterior: Any) -> None:
    found = posterior.calibrate(*held(101)).calibration
    assert (found.n_learned, len(found.scores), len(found.errors)) == (50, 51, 101)
    assert found.kind == "combined"
    distances = ("neighbour in the table", "neighbour 1", "neighbour 10", "neighbour 50")
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
    assert torch.equal(before, posterior.ood_score(X_NEW, "generalized_entropy"))
    posterior.calibrate(*held())
    assert torch.equal(posterior.ood_score(X_NEW), posterior.ood_score(X_NEW, "combined"))
    with pytest.raises(SettingsError, match='"combined" is of whole inputs: for positions name another'):
        posterior.ood_score(X_NEW, "combined", per="position")
    with pytest.raises(SettingsError, match=r'"combined" is that of the calibration.*leave pred_type out'):
        posterior.ood_score(X_NEW, pred_type="sampled")
    with pytest.raises(SettingsError, match="one prediction per input"):
        posterior.ood_score(X_NEW, per="position")


# --- data -------------------------------------------------------------------------------------------------------------


def test_inputs_alone_are_enough_for_p_values(posterior: Any) -> None:
    x, y = held()
    with_targets, table = posterior.calibrate(x, y).p_value(X_NEW), x.cpu().numpy()
    for alone in (x, table):
        assert torch.equal(posterior.calibrate(alone).p_value(X_NEW), with_targets)
        with pytest.raises(SettingsError, match=r"calibrated without targets .*call calibrate\(x, y\) with labels"):
            posterior.predict_set(X_NEW)


@pytest.mark.parametrize("size", [1, 7, 16, 100])
def test_the_size_of_batches_does_not_matter(posterior: Any, size: int) -> None:
    x, y = held()
    whole = posterior.calibrate(x, y)
    p, sets = whole.p_value(X_NEW), whole.predict_set(X_NEW)
    posterior.calibrate(DataLoader(TensorDataset(x, y), batch_size=size))
    assert torch.equal(posterior.p_value(X_NEW), p)
    assert torch.equal(posterior.predict_set(X_NEW), sets)


def test_the_same_data_give_the_same_calibration(posterior: Any) -> None:
    one, other = (fitted().calibrate(*held()) for _ in range(2))
    assert torch.equal(one.p_value(X_NEW), other.p_value(X_NEW))
    assert one.calibration.combine == other.calibration.combine


def test_the_order_of_the_data_matters_only_for_the_split(posterior: Any) -> None:
    """Without a split it does not matter at all; with one, p-values differ as those of other held-out data do."""
    x, y = held(400)
    other = torch.randperm(400, generator=torch.Generator().manual_seed(3), device="cpu").to(x.device)
    named = [posterior.calibrate(a, b, kind="max_variance").p_value(X_NEW) for a, b in ((x, y), (x[other], y[other]))]
    assert torch.equal(*named)
    learned = [posterior.calibrate(a, b).p_value(X_NEW) for a, b in ((x, y), (x[other], y[other]))]
    assert not torch.equal(*learned)
    assert float((learned[0] - learned[1]).abs().mean()) < 0.25
    shuffled = posterior.calibrate(DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True), kind="max_variance")
    assert torch.equal(shuffled.p_value(X_NEW), named[0])


def test_soft_targets_give_no_sets(posterior: Any) -> None:
    x, y = held()
    posterior.calibrate(x, nn.functional.one_hot(y, 3).double())
    assert posterior.calibration.errors is None
    assert posterior.p_value(X_NEW).shape == (30,)
    with pytest.raises(SettingsError, match="with labels"):
        posterior.predict_set(X_NEW)


def test_targets_that_do_not_fit_are_refused(posterior: Any) -> None:
    x, y = held()
    with pytest.raises(LikelihoodError, match="Class labels run from 0 to 12"):
        posterior.calibrate(x, y + 10 * (y == 2))
    with pytest.raises(DataError):
        posterior.calibrate(x, y[:-1])


@pytest.mark.parametrize("n", [1, 2, 39])
def test_too_few_examples_are_refused(posterior: Any, n: int) -> None:
    with pytest.raises(DataError, match=f"There are {n} held-out examples: calibrate needs at least 40"):
        posterior.calibrate(*held(n))


def test_forty_examples_decide_at_five_per_cent(posterior: Any) -> None:
    posterior.calibrate(*held(40))
    assert posterior.is_ood(X_NEW, 0.05).shape == (30,)
    with pytest.raises(SettingsError, match=r"alpha=0.01 needs at least 99 held-out scores .*calibrate left 20"):
        posterior.is_ood(X_NEW, 0.01)
    with pytest.raises(SettingsError, match="needs at least 99"):
        posterior.predict_set(X_NEW, 0.01)


# --- training data ----------------------------------------------------------------------------------------------------


def test_training_data_are_refused(posterior: Any) -> None:
    with pytest.raises(DataError, match="60 of the 60 held-out inputs are training data of ProjectedPosterior"):
        posterior.calibrate(*draw(CLASSIFICATION))
    x, y = held(140)
    with pytest.raises(DataError, match=r"2 of the 142 .*calibrate with data that it was not trained on"):
        posterior.calibrate(torch.cat([x, draw(CLASSIFICATION)[0][:2]]), torch.cat([y, (y[:2] + 1) % 3]))


def test_a_few_training_inputs_are_left_out_with_a_warning(posterior: Any) -> None:
    x, y = held(299)
    known = draw(CLASSIFICATION)
    mixed, labels = (torch.cat([a[:100], b[:2], a[100:]]) for a, b in zip((x, y), known, strict=True))
    with pytest.warns(
        nb.errors.NullBayesWarning, match="2 of the 301 held-out inputs are training data; they were left out"
    ):
        posterior.calibrate(mixed, labels, kind="max_variance")
    found = posterior.calibration
    posterior.calibrate(x, y, kind="max_variance")
    assert torch.allclose(found.scores, posterior.calibration.scores)
    assert torch.allclose(found.errors, posterior.calibration.errors)


def discrete(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three answers of yes, no or perhaps: 27 inputs in all."""
    x = randint(3, (n, 3), generator=torch.Generator().manual_seed(seed)).float()
    return x, (x.sum(1) > 3).long()


def test_inputs_that_repeat_by_chance_are_no_training_data() -> None:
    """Most inputs of a table with three categories were in the training data, and new ones are new all the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
    posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(*discrete(30, 0), 4, progress=False)
    with pytest.warns(nb.errors.NullBayesWarning, match="equal to training inputs. They are kept, because"):
        posterior.calibrate(*discrete(199, 1), kind="max_variance")
    assert len(posterior.calibration.scores) == 199
    x, _ = discrete(2000, 2)
    assert posterior.is_ood(x, 0.1).double().mean() < 0.2
    alone = torch.cat([posterior.p_value(row[None]) for row in x[:60]])
    assert torch.equal(alone, posterior.p_value(x[:60]))


def test_training_data_that_repeat_are_still_refused() -> None:
    x, y = discrete(12, 0)
    x = torch.cat([x, randn(48, 3, generator=torch.Generator().manual_seed(1))])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 2))
    y = (x.sum(1) > 3).long()
    x[:6] = x[0].clone()
    posterior = nb.LossProjectedPosterior(model, prior_precision=1.0).fit(x, y, 4, progress=False)
    assert posterior._familiar.repeated > 0.01
    with pytest.raises(DataError, match="60 of the 60 held-out inputs are training data"):
        posterior.calibrate(x, y)


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


def test_settings_that_come_back_need_none() -> None:
    for posterior in (fitted(), fitted(kind=nb.baselines.DiagonalLaplace)):
        before = posterior.calibrate(*held()).p_value(X_NEW)
        posterior.prior_precision = 30.0
        posterior.prior_precision = 10.0
        assert torch.equal(posterior.p_value(X_NEW), before)


def test_levels_and_parts_that_are_not_valid(posterior: Any) -> None:
    posterior.calibrate(*held())
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
    distances = ("neighbour in the table", "neighbour 1", "neighbour 10", "neighbour 50")
    assert found.statistics == (*distances, "log sum_variance")
    assert found.errors.shape == (100, 2)
