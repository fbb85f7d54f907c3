"""Methods whose samples are whole networks: moments of iterates, batch statistics, members of an ensemble."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.baselines import SWAG, DeepEnsemble
from nullbayes.errors import ModelError, NotFittedError, SettingsError
from nullbayes.posteriors.arguments import normal
from support.drawing import randn
from support.models import BATCHNORM, CLASSIFICATION, MLP, call
from support.slow_answers import flat_parameters, with_parameters

X_NEW = MLP.inputs(4, torch.Generator().manual_seed(11))


def iterates(n: int, model: nn.Module) -> list[Tensor]:
    """Flat parameters around those of a model."""
    generator = torch.Generator().manual_seed(2)
    flat = flat_parameters(model)
    return [flat + 0.1 * randn(len(flat), generator=generator, dtype=torch.float64) for _ in range(n)]


def states(flats: list[Tensor], model: nn.Module) -> Iterator[dict[str, Tensor]]:
    return (with_parameters(model, flat).state_dict() for flat in flats)


def fit_swag(flats: list[Tensor], n_samples: int = 5, **settings: Any) -> SWAG:
    model = MLP.build()
    generator = torch.Generator().manual_seed(0)
    return SWAG(model).fit(
        [CLASSIFICATION.data()], n_samples, train=states(flats, model), generator=generator, progress=False, **settings
    )


@pytest.mark.parametrize(("n", "rank"), [(2, 5), (7, 3), (9, 20)])
def test_moments_are_those_of_the_iterates(n: int, rank: int) -> None:
    flats = iterates(n, MLP.build())
    posterior, stacked = fit_swag(flats, rank=rank), torch.stack(flats)
    moments = posterior.moments
    torch.testing.assert_close(moments.mean, stacked.mean(0))
    torch.testing.assert_close(moments.variance, stacked.var(0, unbiased=False))
    running = [flat - stacked[: i + 1].mean(0) for i, flat in enumerate(flats)]
    torch.testing.assert_close(torch.stack(moments.deviations), torch.stack(running[-rank:]))
    assert posterior.report.rank == min(n, rank)
    assert f"{n} iterates" in str(posterior.report)


def test_moments_belong_to_a_fit_and_not_to_a_file(tmp_path: Path) -> None:
    fit_swag(iterates(4, MLP.build())).save(tmp_path / "posterior")
    for posterior in (SWAG(MLP.build()), nb.load(tmp_path / "posterior", MLP.build())):
        with pytest.raises(NotFittedError, match="no file holds them"):
            _ = posterior.moments


def test_samples_have_the_covariance_of_swag() -> None:
    """A sample is linear in its noise, so the covariance is exact: half the diagonal, half the low rank."""
    flats = iterates(6, MLP.build())
    posterior, stacked = fit_swag(flats, rank=4), torch.stack(flats)
    deviations = torch.stack([flat - stacked[: i + 1].mean(0) for i, flat in enumerate(flats)][-4:])
    wanted = 0.5 * torch.diag(stacked.var(0, unbiased=False)) + deviations.T @ deviations / (2 * 3)
    sample = posterior.moments.sample
    images = torch.stack([sample(one) for one in torch.eye(51 + 4, dtype=torch.float64)]) - stacked.mean(0)
    torch.testing.assert_close(images.T @ images, wanted)
    drawn = normal(posterior._network, posterior._fitted.seed, 0, 5, 51 + 4).to(stacked)
    samples = posterior.directions + flat_parameters(MLP.build())
    torch.testing.assert_close(samples, torch.stack([sample(one) for one in drawn]))


def test_an_epoch_trains_a_copy_in_training_mode() -> None:
    model = MLP.build()
    before, seen = flat_parameters(model), []

    def train(copied: nn.Module) -> None:
        assert copied is not model
        assert copied.training
        seen.append(copied)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter += 1.0

    posterior = SWAG(model).fit([CLASSIFICATION.data()], 3, train=train, n_models=4, progress=False)
    assert len(seen) == 4
    assert all(copied is seen[0] for copied in seen)
    assert torch.equal(flat_parameters(model), before)
    torch.testing.assert_close(posterior.moments.mean, before + 2.5)
    torch.testing.assert_close(posterior.moments.variance, torch.full_like(before, 1.25))


def test_every_sample_has_batch_statistics_of_its_own() -> None:
    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM, 40)
    flats = iterates(5, model)
    posterior = SWAG(model).fit([(x, y)], 3, train=states(flats, model), progress=False)
    new = BATCHNORM.inputs(4, torch.Generator().manual_seed(3))
    samples = posterior.predict(new).samples
    for i in range(3):
        member = with_parameters(model, flat_parameters(model) + posterior.directions[i])
        for layer in (member[1], member[6]):
            layer.reset_running_stats()
            layer.momentum = 1.0
            layer.train()
        call(member, x)  # one batch holds them all
        torch.testing.assert_close(samples[i], member.eval()(new).detach())
        with posterior.sampled_parameters(i) as changed:
            torch.testing.assert_close(changed.eval()(new), samples[i])
    means = torch.stack([m for name, m in posterior._fitted.state.tensors.items() if name == "1.running_mean"])
    assert float(means.std(1).max()) > 1e-3


def test_a_last_batch_of_one_example_is_left_out_of_batch_statistics() -> None:
    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM, 129)
    posterior = SWAG(model).fit([(x, y)], 2, train=states(iterates(3, model), model), progress=False)
    assert int(posterior._fitted.state.tensors["1.num_batches_tracked"][0]) == 2


def test_swag_of_some_parameters_moves_only_those() -> None:
    model = MLP.build()

    def train(copied: nn.Module) -> None:
        with torch.no_grad():
            copied[2].bias += 1.0

    posterior = SWAG(model, parameters="2.*").fit([CLASSIFICATION.data()], 3, train=train, progress=False)
    assert set(posterior.sample()) == {"2.weight", "2.bias"}
    with pytest.raises(ModelError, match=r"'2\.\w+' moved in training"):
        SWAG(model, parameters="0.*").fit([CLASSIFICATION.data()], 3, train=train, progress=False)


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_iterates_are_refused(n: int) -> None:
    with pytest.raises(SettingsError, match="at least 2 iterates"):
        fit_swag(iterates(n, MLP.build()))
    with pytest.raises(SettingsError, match="at least 2"):
        fit_swag(iterates(4, MLP.build()), rank=n)


# --- ensembles --------------------------------------------------------------------------------------------------------


def test_members_predict_with_their_own_outputs() -> None:
    seeds: list[int] = []

    def train(seed: int) -> nn.Module:
        seeds.append(seed)
        return BATCHNORM.build(seed=seed).train()

    model, (x, y) = BATCHNORM.build(), CLASSIFICATION.data(BATCHNORM)
    posterior = DeepEnsemble(model).fit([(x, y)], 3, train=train, progress=False)
    assert len(set(seeds)) == 3
    new = BATCHNORM.inputs(4, torch.Generator().manual_seed(3))
    wanted = torch.stack([BATCHNORM.build(seed=seed)(new).detach() for seed in seeds])
    prediction = posterior.predict(new)
    torch.testing.assert_close(prediction.samples, wanted)
    torch.testing.assert_close(prediction.probs, wanted.softmax(-1).mean(0))
    torch.testing.assert_close(posterior.ood_score(new, "max_variance"), wanted.var(0).amax(1))


@pytest.mark.parametrize(
    ("train", "advice"),
    [
        (None, r"train=lambda seed"),
        (lambda seed: None, "trained nn.Module, not NoneType"),
        (lambda seed: nn.Linear(4, 3).double(), "another structure"),
        (lambda seed: nn.Sequential(MLP.build(), nn.Linear(3, 3)), "another structure"),
        (lambda seed: broken(), "diverged"),
    ],
)
def test_invalid_members_are_refused(train: Any, advice: str) -> None:
    posterior = DeepEnsemble(MLP.build())
    with pytest.raises((ModelError, SettingsError), match=advice):
        posterior.fit([CLASSIFICATION.data()], 2, train=train, progress=False)
    with pytest.raises(nb.errors.NotFittedError):
        posterior.predict(X_NEW)


def broken() -> nn.Module:
    model = copy.deepcopy(MLP.build())
    model[0].weight.data[0, 0] = float("nan")
    return model


@pytest.mark.parametrize("kind", [SWAG, DeepEnsemble])
def test_members_are_not_linearized(kind: type) -> None:
    model = MLP.build()
    train = states(iterates(3, model), model) if kind is SWAG else lambda seed: MLP.build(seed=seed)
    posterior = kind(model).fit([CLASSIFICATION.data()], 3, train=train, progress=False)
    with pytest.raises(SettingsError, match='pred_type must be "sampled"'):
        posterior.predict(X_NEW, pred_type="linearized")
    with pytest.raises(SettingsError, match="exact=False"):
        posterior.functional_variance(X_NEW, exact=True)
    with pytest.raises(SettingsError, match=r"between 2 and .*, not 1; sample\(1\) gives"):
        posterior.predict(X_NEW, n_samples=1)


@pytest.mark.parametrize("kind", [SWAG, DeepEnsemble])
def test_training_runs_at_the_precision_of_its_caller(kind: type) -> None:
    """Full precision is for rows and predictions; a training loop under autocast stays under it."""
    model, seen = MLP.build(), []

    def train(given: Any) -> nn.Module:
        seen.append(torch.is_autocast_enabled("cpu"))
        return MLP.build(seed=1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        kind(model).fit([CLASSIFICATION.data()], 2, train=train, progress=False)
    assert seen
    assert all(seen)
