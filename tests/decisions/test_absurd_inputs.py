"""Inputs that no one would call familiar are flagged, also where the network saturates and is certain of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.decisions.weights import Weights, learn_weights
from nullbayes.errors import DataError
from nullbayes.jacobian.batches import table_rows
from support.drawing import rand, randn, seeded

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.NullBayesWarning")


def table(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Columns in units of their own, and two classes."""
    x = randn(n, 6, generator=seeded(seed)) * torch.tensor([1.0, 10.0, 100.0, 0.1, 1.0, 5.0]) + 3.0
    return x, (x[:, 0] + x[:, 1] / 10 > 6).long()


def fitted(build: Callable[[], nn.Module], x: Tensor, y: Tensor) -> Any:
    """Train a network on some data, and fit a posterior to it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().to(x.device)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(200):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return nb.ProjectedPosterior(model.eval()).fit(x, y, 10, generator=seeded(0), progress=False)


@pytest.fixture(scope="module")
def posterior() -> Any:
    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

    return fitted(build, *table(400, 0)).calibrate(*table(300, 1))


@pytest.mark.parametrize(
    "absurd", [lambda x: x + 1e6, lambda x: 1000 * x, lambda x: x + 6 * x.std(0), torch.zeros_like]
)
def test_absurd_rows_of_a_table_are_flagged(posterior: Any, absurd: Any) -> None:
    x = absurd(table(50, 2)[0])
    assert posterior.is_ood(x).double().mean() > 0.9
    assert posterior.is_ood(table(200, 2)[0]).double().mean() < 0.15


def test_rows_that_are_nearer_to_the_middle_than_any_familiar_one_are_flagged() -> None:
    """Columns that depend on one another, and rows whose missing numbers were all replaced by means."""
    mixing = randn(3, 12, generator=seeded(5))

    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x = torch.tanh(randn(n, 3, generator=seeded(seed)) @ mixing) + 0.1 * randn(n, 12, generator=seeded(seed + 50))
        return x, (x[:, 0] * x[:, 1] > 0).long()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 2))

    trained = draw(300, 0)
    posterior = fitted(build, *trained)
    posterior.calibrate(*draw(400, 1))
    known, new = draw(200, 2)[0], draw(200, 3)[0]
    assert not posterior.is_ood(trained[0]).any()  # whose distance to themselves is zero
    assert posterior.is_ood(trained[0] + 0.01 * new.roll(1, 0)[:1]).double().mean() < 0.05
    middle = known.mean(0) + 0.05 * (new - known.mean(0))
    assert nb.metrics.auroc(posterior.ood_score(known), posterior.ood_score(middle)) > 0.9
    assert posterior.is_ood(known).double().mean() < 0.12
    assert any(name.startswith("low ") for name, weight in posterior.calibration.weights.items() if weight > 0.01)


def test_the_distance_in_a_table_is_that_to_the_nearest_row_in_standard_deviations(posterior: Any) -> None:
    assert "neighbour in the table" in posterior.calibration.statistics
    known, new = table(400, 0)[0].double(), table(20, 2)[0].double()
    spread = known.std(0, unbiased=False)
    wanted = [min(float((((a - b) / spread) ** 2).mean().sqrt()) for b in known) for a in new]
    found = posterior._familiar.row_distances(new.float())
    torch.testing.assert_close(
        found.exp().cpu(), torch.tensor(wanted, dtype=torch.float64, device="cpu"), rtol=1e-4, atol=0
    )
    with pytest.raises(DataError, match="no rows of the table"):
        posterior._familiar.row_distances(torch.zeros(3, 5))


def test_a_file_keeps_the_weights_of_both_sides(posterior: Any, tmp_path: Any) -> None:
    assert len(posterior.calibration.combine.low) == len(posterior.calibration.statistics)
    posterior.save(tmp_path / "p.safetensors")
    loaded = nb.load(tmp_path / "p.safetensors", posterior._network.model)
    assert loaded.calibration.combine == posterior.calibration.combine
    x = table(20, 4)[0]
    assert torch.equal(loaded.ood_score(x), posterior.ood_score(x))


def test_a_file_keeps_the_rows(posterior: Any, tmp_path: Any) -> None:
    posterior.save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", posterior._network.model)
    assert torch.equal(loaded._familiar.rows, posterior._familiar.rows)
    assert len(loaded._familiar.table) == 1
    new = table(20, 2)[0]
    assert torch.equal(loaded.p_value(new), posterior.p_value(new))


class _Mixed(nn.Module):
    """A network for rows of numbers and one category."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(4, 3), nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, numbers: Tensor, kind: Tensor) -> Tensor:
        return self.body(torch.cat([numbers, self.embedding(kind)], 1))


def test_rows_with_categories_are_remembered_whatever_the_order_of_their_names(tmp_path: Any) -> None:
    def rows(n: int, seed: int) -> dict[str, Tensor]:
        x = table(n, seed)[0] / torch.tensor([1.0, 10.0, 100.0, 0.1, 1.0, 5.0])
        return {"numbers": x, "kind": (x[:, 2] > 3).long() + 2 * (x[:, 3] > 30).long()}

    torch.manual_seed(0)
    model, known, held_out = _Mixed().eval(), rows(300, 0), rows(200, 1)
    labels = [(x["numbers"][:, 0] > 3).long() for x in (known, held_out)]
    posterior = nb.ProjectedPosterior(model).fit(known, labels[0], 5, generator=seeded(0), progress=False)
    other = {name: held_out[name] for name in ("kind", "numbers")}
    for data in (held_out, other):
        found = posterior.calibrate(data, labels[1])
        assert found.is_ood(known).double().mean() < 0.05
        assert torch.equal(found._familiar.row_distances(data), found._familiar.row_distances(held_out))
    posterior.save(tmp_path / "posterior")
    loaded = nb.load(tmp_path / "posterior", model).calibrate(other, labels[1])
    assert torch.equal(loaded.p_value(held_out), posterior.p_value(held_out))


def test_only_rows_of_a_table_are_remembered_as_rows() -> None:
    numbers, categories = rand(4, 3, generator=seeded(0)), torch.ones(4, 2, dtype=torch.long)
    assert table_rows(numbers) is not None
    assert table_rows({"a": numbers, "b": numbers[:, :1], "c": categories}).shape == (4, 4)
    for other in (categories, numbers[:, None, :], (numbers, numbers[..., None]), torch.zeros(4, 2000)):
        assert table_rows(other) is None


def test_a_statistic_beyond_all_that_is_familiar_counts_whatever_its_weight() -> None:
    familiar = randn(200, 2, generator=seeded(3), dtype=torch.float64)
    strange = {"kind": familiar + torch.tensor([3.0, 0.0])}
    found = learn_weights(familiar, strange)
    assert found.weights[1] < 0.05
    middle, largest = familiar[:, 1].median(), familiar[:, 1].max()
    inside, beyond = (torch.stack([torch.zeros(()), value])[None].to(familiar) for value in (largest, 50 * largest))
    assert found(inside) - found(0 * inside) < 0.2
    assert found(beyond) - found(inside) > 5
    bound = (2 * (largest - found.mean[1]) - (middle - found.mean[1])) / found.scale[1]
    assert found.bound[1] == pytest.approx(float(bound))
    assert isinstance(found, Weights)


def test_a_very_low_statistic_does_not_make_up_for_one_beyond_all_that_is_familiar() -> None:
    """The network is certain of inputs of another scale: the energy falls by thousands, distances are logarithms."""
    found = Weights((0.5, 0.5), mean=(0.0, 0.0), scale=(1.0, 1.0), bound=(4.0, 4.0))
    usual, absurd = torch.tensor([[[1.0, 2.0]], [[-1e5, 20.0]]], dtype=torch.float64)
    assert found(absurd) > found(usual)
    barely = torch.tensor([[-1e5, 6.0]], dtype=torch.float64)
    assert float(found(barely)) == pytest.approx(0.5 * 6.0 + 2.0, abs=1e-4)
    useless = Weights((1.0, 0.0), mean=(0.0, 0.0), scale=(1.0, 1.0), bound=(4.0, 4.0))
    average = useless(torch.zeros(1, 2, dtype=torch.float64))
    assert float(useless(barely)) == pytest.approx(float(average) + 2.0)


def test_certainty_does_not_make_up_for_a_statistic_of_a_row_beyond_its_bound() -> None:
    """Other statistics count at least as for average rows, whose sum is above zero where low statistics count."""
    found = Weights((0.9, 0.0), mean=(0.0, 0.0), scale=(1.0, 1.0), bound=(4.0, 4.0), low=(0.1, 0.0), usual=(2.0, 2.0))
    average, certain = found(torch.tensor([[0.0, 0.0], [-1.5, 4.1]], dtype=torch.float64))
    assert float(certain) == pytest.approx(float(average) + 0.1)


def test_images_of_another_scale_are_flagged_though_the_network_is_certain_of_them() -> None:
    def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
        x = rand(n, 3, 8, 8, generator=seeded(seed))  # strangers that are made of noise are like it
        return x, (x[:, 0].mean((1, 2)) > 0.5).long() + (x[:, 1].mean((1, 2)) > 0.5).long()

    def build() -> nn.Module:
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), *pool, nn.Linear(6, 3))

    posterior = fitted(build, *draw(120, 40)).calibrate(*draw(100, 41))
    assert posterior.is_ood(draw(200, 42)[0]).double().mean() < 0.2
    for factor in (16.0, 255.0, 1e4):
        assert posterior.is_ood(factor * draw(30, 42)[0]).double().mean() > 0.9


def squares(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images with a bright square, and where it is."""
    generator = seeded(seed)
    x, y = 0.3 * randn(n, 1, 8, 8, generator=generator), torch.zeros(n, 8, 8, dtype=torch.long)
    for i, (a, b) in enumerate(torch.randint(0, 5, (n, 2), generator=generator, device="cpu").tolist()):
        x[i, 0, a : a + 4, b : b + 4] += 1
        y[i, a : a + 4, b : b + 4] = 1
    return x, y


@pytest.mark.slow
def test_positions_are_judged_by_the_score_that_tells_strangers() -> None:
    """Entropies of this network are blind to bright patches, of which it is certain, and the variance is not."""
    x, y = squares(100, 0)
    with torch.random.fork_rng(), torch.device("cpu"):  # the same network on every device
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(),
            nn.Conv2d(6, 2, 1),
        )  # fmt: skip
    model = model.to(x.device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    posterior = nb.ProjectedPosterior(model.eval()).fit(x, y, 10, generator=seeded(0), progress=False)
    new, flagged = squares(100, 2)[0], {}
    patched = new.clone()
    patched[:, :, 3:5, 3:5] = 8.0
    for kind in (None, "entropy"):
        posterior.calibrate(*squares(300, 1), kind=kind)
        flagged[kind] = posterior.is_ood(patched, per="position")[:, 3:5, 3:5].double().mean()
        assert posterior.is_ood(new, per="position").double().mean() < 0.12
        assert posterior.calibration.position_kind == (kind or "max_variance")
    assert flagged[None] > 0.6
    assert flagged["entropy"] < 0.5 * flagged[None]


def test_training_data_where_held_out_data_are_wanted_give_a_warning(posterior: Any) -> None:
    x, y = table(400, 0)
    with pytest.warns(nb.errors.NullBayesWarning, match="400 of the 400 inputs are training data: 'p' looks better"):
        nb.evaluate({"p": posterior}, (x, y), {"far": x + 1e3})
    model = posterior._network.model
    other = nb.ProjectedPosterior(model).fit(x, y, 4, generator=seeded(0), progress=False)
    with pytest.warns(nb.errors.NullBayesWarning, match="training data: precision and temperature"):
        other.tune(x, y)


def test_an_alpha_that_looks_like_a_level_gives_a_warning(posterior: Any) -> None:
    with pytest.warns(nb.errors.NullBayesWarning, match=r"alpha=0.95 is the probability of an error. .*pass 0.05"):
        posterior.predict_set(table(3, 2)[0], 0.95)


def test_the_first_input_that_is_not_finite_is_named(posterior: Any) -> None:
    x = table(9, 2)[0]
    x[7, 2] = torch.nan
    with pytest.raises(DataError, match="NaN or Inf, the first at example 7, counted from 0"):
        posterior.is_ood(x)


class Shops(nn.Module):
    """A regression with slopes, and one offset per shop."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.shop = nn.Linear(3, 1), nn.Embedding(20, 1)

    def forward(self, x: Tensor, shop: Tensor) -> Tensor:
        return self.slopes(x) + self.shop(shop)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shops_without_training_data_are_flagged_where_all_others_have_no_variance(dtype: torch.dtype) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Shops().to(dtype)
    x, shop = randn(900, 3, generator=seeded(0)).to(dtype), torch.arange(900) % 10
    y = model(x, shop).detach() + 0.3 * randn(900, 1, generator=seeded(1)).to(dtype)
    posterior = nb.ProjectedPosterior(model, "regression", prior_precision=100.0)
    posterior.fit((x[:300], shop[:300]), y[:300], 10, progress=False)
    posterior.calibrate((x[300:600], shop[300:600]), y[300:600])
    assert posterior.is_ood((x[600:], shop[600:] + 10)).all()
    assert posterior.is_ood((x[600:], shop[600:])).double().mean() < 0.12
