"""Calibrate takes held-out data in any form and order, if they are enough, and refuses training data."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from nullbayes.errors import DataError, LikelihoodError, SettingsError
from support.calibrations import X_NEW, fitted, held
from support.drawing import randint, randn
from support.models import CLASSIFICATION, REGRESSION
from support.trained import draw

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")


@pytest.fixture(scope="module")
def posterior() -> Any:
    return fitted()


# --- data -------------------------------------------------------------------------------------------------------------


def test_inputs_alone_are_enough_for_p_values(posterior: Any) -> None:
    x, y = held()
    with_targets, table = posterior.calibrate(x, y).p_value(X_NEW), x.cpu().numpy()
    for alone in (x, table):
        assert torch.equal(posterior.calibrate(alone).p_value(X_NEW), with_targets)
        with pytest.raises(SettingsError, match=r"calibrated without targets .*call calibrate\(x, y\) with labels"):
            posterior.predict_set(X_NEW)


@pytest.mark.slow
def test_loaders_of_inputs_alone_are_enough_for_p_values(posterior: Any) -> None:
    x, _ = held()
    wanted = posterior.calibrate(x).p_value(X_NEW)
    loaders = (
        DataLoader(x, batch_size=16),  # type: ignore[arg-type]
        DataLoader(TensorDataset(x), batch_size=16),
        TensorDataset(x),
        x.split(16),
        iter(x.split(16)),
        [(part,) for part in x.split(16)],
    )
    for loader in loaders:
        data = list(loader) if isinstance(loader, tuple) else loader
        assert torch.equal(posterior.calibrate(data).p_value(X_NEW), wanted)
        assert posterior.calibration.errors is None
    with pytest.raises(DataError, match=r"must be a pair .*weights of examples change nothing"):
        posterior.calibrate([(x, x, x)])
    with pytest.raises(DataError, match="The loader is empty"):
        posterior.calibrate([])


def test_batch_fn_may_say_that_there_are_no_targets() -> None:
    x, _ = held()
    plain, own = fitted(), fitted(batch_fn=lambda batch: (batch["image"], batch.get("label")))
    wanted = plain.calibrate(x).p_value(X_NEW)
    assert torch.equal(own.calibrate([{"image": part} for part in x.split(16)]).p_value(X_NEW), wanted)
    own.calibrate([{"image": x, "label": held()[1]}])
    assert own.calibration.errors is not None
    with pytest.raises(KeyError, match="image"):
        own.calibrate([{"picture": x}])


def test_several_inputs_of_a_loader_are_no_pair_with_targets() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3).double()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a.tanh() + b)

    x, y = draw(CLASSIFICATION)
    new, _ = held()
    posterior = nb.ProjectedPosterior(Sum(), prior_precision=1.0).fit((x[:3], 2 * x[:3]), y[:3], 4, progress=False)
    wanted = posterior.calibrate([((new, 2 * new), held()[1])]).p_value((new, new))
    pairs = DataLoader(TensorDataset(new, 2 * new), batch_size=16)
    assert torch.equal(posterior.calibrate(pairs).p_value((new, new)), wanted)
    assert posterior.calibration.errors is None


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
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)  # the loader draws its order there
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=generator)
    assert torch.equal(posterior.calibrate(loader, kind="max_variance").p_value(X_NEW), named[0])


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
    with pytest.raises(DataError, match=r"6 of the 146 .*calibrate with data that it was not trained on"):
        posterior.calibrate(torch.cat([x, draw(CLASSIFICATION)[0][:6]]), torch.cat([y, (y[:6] + 1) % 3]))


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


def test_a_row_that_occurs_once_on_each_side_does_not_stop_a_small_calibration(posterior: Any) -> None:
    x, y = held(39)
    known = draw(CLASSIFICATION)
    with pytest.warns(
        nb.errors.NullBayesWarning, match="1 of the 40 held-out inputs are training data; they were left"
    ):
        posterior.calibrate(torch.cat([x, known[0][:1]]), torch.cat([y, known[1][:1]]))
    assert posterior.is_ood(X_NEW).shape == (len(X_NEW),)
    with pytest.raises(DataError, match="There are 39 held-out examples"):
        posterior.calibrate(x, y)


@pytest.mark.parametrize("then", [torch.float32, torch.float64])
def test_training_data_in_another_precision_are_found_where_the_network_rounds_its_inputs(then: torch.dtype) -> None:
    class Rounding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    now = torch.float64 if then == torch.float32 else torch.float32
    x = randn(60, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    y = (x[:, 0] > 0).long()
    model = Rounding(4, 2, dtype=torch.float32)
    posterior = nb.baselines.MAP(model).fit(x.to(then), y)
    with pytest.raises(DataError, match="60 of the 60 held-out inputs are training data"):
        posterior.calibrate(x.to(now), y)
    with pytest.raises(DataError, match="60 of the 60 held-out inputs are training data"):
        posterior.calibrate(x.to(now).numpy(), y)
    with pytest.warns(nb.errors.NullBayesWarning, match="60 of the 60 inputs are training data"):
        nb.evaluate([posterior], (x.to(now), y))


def test_times_that_single_precision_does_not_tell_apart_are_different_inputs(tmp_path: Path) -> None:
    """Of Unix time in minutes, two in a row are the same number in single precision."""

    class Hours(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x - 1.7e9) / 3600)

    x = 1.7e9 + 60 * torch.arange(240, dtype=torch.float64)[:, None]
    noise = randn(240, 1, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    model = Hours(1, 1, dtype=torch.float64)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    y = model(x).detach() + 0.3 * noise
    posterior = nb.baselines.DiagonalLaplace(model, "regression").fit(x[::2], y[::2], 4)
    posterior.save(tmp_path / "times.safetensors")
    for each in (posterior, nb.load(tmp_path / "times.safetensors", model)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert each.calibrate(x[1::2], y[1::2]).calibration is not None
        with pytest.raises(DataError, match="120 of the 120 held-out inputs are training data"):
            each.calibrate(x[::2], y[::2])


def test_targets_in_other_units_cause_a_warning() -> None:
    x, y = held(task=REGRESSION)
    posterior = fitted(REGRESSION)
    with pytest.warns(nb.errors.NullBayesWarning, match="standard deviations away .*targets scaled as in training"):
        posterior.calibrate(x, 1000 * y + 50)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Half of the held-out")
        posterior.calibrate(x, y)


@pytest.mark.parametrize("table", [True, False], ids=["table", "images"])
@pytest.mark.parametrize(("factor", "shift"), [(255.0, 0.0), (0.02, 0.0), (1.0, 300.0)])
def test_inputs_that_were_prepared_in_another_way_cause_a_warning(table: bool, factor: float, shift: float) -> None:
    """Strangers are then compared with inputs that are strange themselves."""
    generator = torch.Generator().manual_seed(3)
    x = randn(160, 16, generator=generator, dtype=torch.float64) * (torch.arange(16) + 1.0) / 8.0
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    x = x if table else x.view(-1, 1, 4, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    posterior = nb.baselines.MAP(model).fit(x[:80], y[:80])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Held-out inputs are")
        posterior.calibrate(x[80:], y[80:])
    with pytest.warns(nb.errors.NullBayesWarning, match="Held-out inputs are .* Were they scaled and normalized"):
        posterior.calibrate(factor * x[80:] + shift, y[80:])


def test_rare_categories_are_no_other_scale() -> None:
    """Most columns of one-hot categories are constant among a few rows."""
    generator = torch.Generator().manual_seed(4)
    numbers = randn(460, 2, generator=generator, dtype=torch.float64)
    categories = nn.functional.one_hot(randint(100, (460,), generator=generator), 100)
    x, y = torch.cat([numbers, categories], 1), (numbers[:, 0] > 0).long()
    posterior = nb.baselines.MAP(nn.Linear(102, 2).double()).fit(x[:400], y[:400])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Held-out inputs are")
        posterior.calibrate(x[400:], y[400:])
    with pytest.warns(nb.errors.NullBayesWarning, match="Held-out inputs are .* Were they scaled and normalized"):
        posterior.calibrate(x[400:] / 255.0, y[400:])


def test_few_amounts_without_the_largest_of_many_are_no_other_scale() -> None:
    """The standard deviation of amounts is that of the largest, which a few of them lack."""
    amounts = (2.0 * randn(2100, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).exp()
    amounts[::300] = 1e5
    x, held_out = amounts[:2000], amounts[2001:2061]
    posterior = nb.baselines.MAP(nn.Linear(1, 2).double()).fit(x, (x[:, 0] > 1).long())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Held-out inputs are")
        posterior.calibrate(held_out)
    with pytest.warns(nb.errors.NullBayesWarning, match="Held-out inputs are .* Were they scaled and normalized"):
        posterior.calibrate(held_out / 1e6)


def test_a_wild_number_in_one_column_is_no_other_scale() -> None:
    x, y = held()
    posterior = fitted()
    x = x.clone()
    x[::2, 0] *= 1e3
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Held-out inputs are")
        posterior.calibrate(x, y)


@pytest.mark.parametrize("held", [True, False], ids=["held", "streamed"])
def test_training_data_in_the_order_of_their_classes_are_no_other_scale(held: bool, monkeypatch: Any) -> None:
    """The first of them are all of one class, which is fainter than the others."""
    if not held:
        monkeypatch.setattr("nullbayes.jacobian.data._HELD_SHARE", 0.0)
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(3).repeat(60)
    size = torch.tensor([0.01, 1.0, 1.0], dtype=torch.float64)[y]
    x = randn(180, 1, 16, generator=generator, dtype=torch.float64) * size[:, None, None]
    x[y == 2] += 1.0
    order = y[:120].sort().indices
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=7)
    posterior = nb.baselines.MAP(model).fit(loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Held-out inputs are")
        posterior.calibrate(x[120:], y[120:])
    with pytest.warns(nb.errors.NullBayesWarning, match="Held-out inputs are .* Were they scaled and normalized"):
        posterior.calibrate(x[120:] * 255.0, y[120:])


def test_images_of_which_most_are_faint_are_no_other_scale() -> None:
    """Four of the training images are remembered, here faint ones, and bright ones are among the others."""
    generator = torch.Generator().manual_seed(6)
    x = randn(200, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0, 0, 0] > 0).long()
    x[torch.arange(200) % 5 != 1] /= 100.0
    posterior = nb.baselines.MAP(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).double()).fit(x[:120], y[:120])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Held-out inputs are")
        posterior.calibrate(x[120:], y[120:])
    with pytest.warns(nb.errors.NullBayesWarning, match="Held-out inputs are .* Were they scaled and normalized"):
        posterior.calibrate(x[120:] * 255.0, y[120:])


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [2, 10])
def test_held_out_inputs_that_are_copies_cause_a_warning(posterior: Any, times: int) -> None:
    x, y = (part.repeat_interleave(times, 0) for part in held(400 // times))
    with pytest.warns(
        nb.errors.NullBayesWarning, match=f"{400 - 400 // times} of the 400 held-out inputs are copies of others"
    ):
        posterior.calibrate(x, y, kind="max_variance")


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior.calibrate(*discrete(199, 1), kind="max_variance")
    told = [str(w.message) for w in caught if isinstance(w.message, nb.errors.NullBayesWarning)]
    assert any("equal to training inputs. They are kept, because" in text for text in told)
    assert not any("copies" in text for text in told)
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
