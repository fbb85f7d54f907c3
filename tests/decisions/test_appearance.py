"""Inputs whose numbers look like nothing among the training data are flagged, whatever the network makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.decisions.appearance import looks, unlike, usual_looks
from nullbayes.decisions.weights import learn_weights
from support.drawing import rand, randn, seeded


def pictures(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = rand(n, 1, 8, 8, generator=seeded(seed)) * (0.3 + 0.7 * rand(n, 1, 1, 1, generator=seeded(seed + 1)))
    return x, (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()


class Blind(nn.Module):
    """A network whose features are of one direction: to it, a black picture is as familiar as any."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 12)), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x - x.mean((1, 2, 3), keepdim=True))))


@pytest.fixture(scope="module")
def posterior() -> Any:
    torch.manual_seed(0)
    return nb.LossProjectedPosterior(Blind()).fit(*pictures(150, 0), n_samples=8, progress=False)


def test_absurd_pictures_are_flagged_and_new_ones_are_not(posterior: Any) -> None:
    posterior.calibrate(*pictures(300, 2))
    x = pictures(200, 4)[0]
    assert posterior.calibration.weights["looks"] == 0.0
    assert posterior.is_ood(x).double().mean() < 0.12
    for strange in (0 * x, 0 * x + 0.5, x + 4.0, 255 * x, x.mean((2, 3), keepdim=True).expand_as(x) + 1e-3 * x):
        assert posterior.is_ood(strange).double().mean() == 1.0


def test_inputs_of_another_type_are_refused_with_what_to_do(posterior: Any) -> None:
    with pytest.raises(nb.errors.DataError, match="whole numbers in place of floating-point ones: convert them"):
        posterior._familiar.unlike((255 * pictures(4, 0)[0]).long())


def test_a_file_keeps_what_training_inputs_look_like(posterior: Any, tmp_path: Any) -> None:
    posterior.calibrate(*pictures(300, 2)).save(tmp_path / "a.safetensors")
    loaded, x = nb.load(tmp_path / "a.safetensors", posterior._network.module), pictures(20, 4)[0]
    torch.testing.assert_close(loaded._familiar.looks, posterior._familiar.looks)
    torch.testing.assert_close(loaded.ood_score(x), posterior.ood_score(x))


def test_three_numbers_of_each_tensor() -> None:
    x = randn(5, 3, 6, 4, generator=seeded(0))
    found = looks({"b": x, "a": torch.arange(5), "c": 2 * x[:, 0]})
    assert found is not None
    assert found.shape == (5, 6)
    steps = (x[..., 1:] - x[..., :-1]).abs().mean((1, 2, 3))
    wanted = torch.stack([x.mean((1, 2, 3)), x.flatten(1).std(1, correction=0).log(), steps.log()], 1)
    torch.testing.assert_close(found[:, :3], wanted.double(), atol=1e-6, rtol=1e-5)
    assert looks(torch.arange(12).view(4, 3)) is None
    pixels = torch.arange(5 * 64, dtype=torch.uint8).view(5, 1, 8, 8)
    torch.testing.assert_close(looks(pixels), looks(pixels.float()))


def test_series_in_one_column_have_steps_in_time() -> None:
    x = randn(4, 9, 1, generator=seeded(1))
    found = looks(x)
    assert found is not None
    torch.testing.assert_close(found[:, 2], x.diff(dim=1).abs().mean((1, 2)).log().double(), atol=1e-6, rtol=1e-5)
    assert bool(torch.isfinite(looks(torch.zeros(3, 1, 1))).all())  # type: ignore[arg-type]


def test_rounding_errors_of_normalized_inputs_are_nothing() -> None:
    def normalized(n: int, seed: int) -> Tensor:
        x = randn(n, 3, 50, generator=seeded(seed))
        return (x - x.mean((1, 2), keepdim=True)) / x.std((1, 2), keepdim=True)

    known, new = (looks(normalized(100, seed)) for seed in (0, 1))
    assert known is not None
    assert new is not None
    assert float(unlike(usual_looks(known), new).max()) < 6.0
    other = looks(normalized(9, 2) + 1e-4)
    assert other is not None
    assert float(unlike(usual_looks(known), other).max()) < 6.0


def test_masks_of_zeros_and_ones_look_like_nothing() -> None:
    def inputs(n: int, shortest: int, longest: int) -> dict[str, Tensor]:
        lengths = torch.arange(n) % (longest + 1 - shortest) + shortest
        return {"mask": (torch.arange(20) < lengths[:, None]).float(), "x": randn(n, 20, 3, generator=seeded(n))}

    known, whole = looks(inputs(100, 4, 12)), looks(inputs(30, 20, 20))
    assert known is not None
    assert whole is not None
    usual = usual_looks(known)
    assert bool(torch.isfinite(usual).all())
    assert float(unlike(usual, whole).max()) < 6.0
    whole[:, 3:] += 1.0  # the numbers of the other tensor still count
    assert float(unlike(usual, whole).min()) > 6.0


def test_other_numbers_in_place_of_zeros_and_ones_are_strange() -> None:
    edges = (rand(100, 6, 6, generator=seeded(0)) < 0.3).float()
    known, same, other = looks(edges[:60]), looks(edges[60:]), looks(3.0 * edges[60:])
    assert known is not None
    assert same is not None
    assert other is not None
    assert float(unlike(usual_looks(known), same).max()) <= 1.0
    assert float(unlike(usual_looks(known), other).min()) > 100.0


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 123.456])
def test_constants_look_like_themselves_in_batches_of_any_size(value: float) -> None:
    x = torch.full((64, 3, 50, 50), value)
    known, alone, other = looks(x), looks(x[:1]), looks(x[:1] + 1.0)
    assert known is not None
    assert alone is not None
    assert other is not None
    for rounding in (0.0, 1e-7):  # as another device may leave of the mean and of the spread
        alone[:, 0] += rounding * value
        alone[:, 1] = alone[:, 1].maximum(torch.tensor(max(rounding * value, 1e-30)).log())
        assert float(unlike(usual_looks(known), alone).max()) <= 1.0
    assert float(unlike(usual_looks(known), other).min()) > 100.0


def test_faint_signals_are_no_masks() -> None:
    x = 2e-3 * randn(60, 1, 400, generator=seeded(0))
    x -= x.mean(2, keepdim=True)
    known, black = looks(x), looks(0 * x)
    assert known is not None
    assert black is not None
    assert float(unlike(usual_looks(known), black).min()) > 100.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_that_are_added_to_logits_have_finite_looks(dtype: torch.dtype) -> None:
    lengths = torch.arange(60) % 5 + 2
    mask = torch.zeros(60, 8, dtype=dtype).masked_fill(torch.arange(8) >= lengths[:, None], torch.finfo(dtype).min)
    known = looks(mask)
    assert known is not None
    assert bool(torch.isfinite(known).all())
    assert float(unlike(usual_looks(known), known).max()) < 6.0


def test_rows_of_a_table_and_tokens_are_not_looked_at() -> None:
    x, model = randn(60, 9, generator=seeded(0)), nn.Linear(9, 2)
    posterior = nb.LossProjectedPosterior(model).fit(x, (x[:, 0] > 0).long(), n_samples=4, progress=False)
    assert posterior._familiar is not None
    assert posterior._familiar.looks is None


def test_what_has_no_weight_counts_beyond_its_bound_alone() -> None:
    familiar, strange = (randn(200, 2, generator=seeded(s), dtype=torch.float64) for s in (0, 1))
    found = learn_weights(familiar, {"kind": strange + 3.0}, unweighed=[1])
    assert found.weights == (1.0, 0.0)
    new = torch.tensor([[0.0, 2.5], [0.0, 50.0]], dtype=torch.float64)
    inside, beyond = found(new).tolist()
    assert inside == pytest.approx(float(found(0 * new)[0]))
    assert beyond > float(found(familiar).max())
