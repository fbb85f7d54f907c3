"""Shifts change nothing at strength 0, more at every further strength, and the same at every call."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from nullbayes.experiments.shifts import BLUR, FOG, blurred, corruptions, fogged, rotated

CHANGES = {"fog": fogged, "Gaussian blur": blurred, "rotation": lambda x, s: rotated(x, 15.0 * s)}


def images(side: int = 32) -> Tensor:
    return torch.rand(6, 3, side, side, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_none_at_first_and_the_same_at_every_call(name: str) -> None:
    x = images(28)
    assert torch.equal(CHANGES[name](x, 0.0), x)
    once, again = CHANGES[name](x, 3.0), CHANGES[name](x, 3.0)
    assert torch.equal(once, again)
    assert torch.equal(x, images(28))


@pytest.mark.parametrize("name", ["fog", "Gaussian blur"])
def test_distance_grows_with_the_strength_and_brightness_stays_in_range(name: str) -> None:
    x = images()
    changed = [CHANGES[name](x, float(strength)) for strength in range(6)]
    distances = [float((each - x).norm()) for each in changed]
    assert distances == sorted(distances)
    assert all(low < high for low, high in pairwise(distances))
    assert all(float(each.min()) >= 0 and float(each.max()) <= 1 + 1e-6 for each in changed)


def test_quarter_turns_move_pixels_and_nothing_else() -> None:
    x = images()
    for quarters in (1, 2, 3):
        turned = torch.rot90(x, quarters, (2, 3))
        torch.testing.assert_close(rotated(x, 90.0 * quarters), turned, rtol=0.0, atol=1e-4)


def test_rotation_turns_about_the_center() -> None:
    x = torch.zeros(1, 1, 29, 29, device="cpu")
    x[0, 0, 14, 24] = 1.0  # to the right of the center
    row, column = divmod(int(rotated(x, 45.0)[0, 0].argmax()), 29)
    assert (row, column) == (14 - 7, 14 + 7)  # counterclockwise: up


@pytest.mark.parametrize("strength", range(1, 6))
def test_blur_is_that_of_scipy(strength: int) -> None:
    scipy = pytest.importorskip("scipy.ndimage")
    x = images().double()
    expected = scipy.gaussian_filter(x.numpy(), (0, 0, BLUR[strength], BLUR[strength]), mode="mirror", truncate=4.99)
    np.testing.assert_allclose(blurred(x, strength).numpy(), expected, atol=2e-4)


def test_fog_is_a_haze_that_hides_contrast() -> None:
    x = images()
    spreads = [float(fogged(x, float(strength)).std((2, 3)).mean()) for strength in range(len(FOG))]
    assert spreads == sorted(spreads, reverse=True)
    clouds = fogged(torch.full((2, 3, 32, 32), 0.5, device="cpu"), 5.0)
    assert torch.equal(clouds[:, 0], clouds[:, 1])  # gray
    assert not torch.equal(clouds[0], clouds[1])
    steps = clouds[:, 0, :, 1:] - clouds[:, 0, :, :-1]
    assert float(steps.abs().max()) < 0.5 * float(clouds.max() - clouds.min())  # smooth


def test_normalized_images_are_changed_as_plain_ones_are() -> None:
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    center, spread = (torch.tensor(values, device="cpu")[:, None, None] for values in (mean, std))
    x = images()
    for shift in corruptions(mean, std, 2):
        assert shift.strengths == (0.0, 1.0, 2.0)
        normalized = (x - center) / spread
        assert torch.equal(shift.apply(normalized, 0.0), normalized)
        plain = shift.apply(normalized, 2.0) * spread + center
        torch.testing.assert_close(plain, CHANGES[shift.name](x, 2.0), rtol=0.0, atol=1e-5)
