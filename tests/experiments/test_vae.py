"""Sampled decoders of an autoencoder: pixels are judged at edges and in flat regions, beside noise as it is."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy import ndimage

from nullbayes.experiments import vae
from nullbayes.experiments.frame import Settings

SIZES = vae.Sizes(n=60, epochs=20, hidden=8, samples=5, judged=20, shown=2)
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def results() -> dict:
    return vae.run(Settings(seeds=2), SIZES)


def test_numbers_and_pictures(results: dict) -> None:
    runs = results["data"]["digits"]
    assert [len(run["pictures"]) for run in runs.values()] == [2, 0]  # of the first seed alone
    for run in runs.values():
        for where in ("latent", "test"):
            ours, closed, control = (run[where][name] for name in (vae.POSTERIOR, vae.CLOSED, vae.CONTROL))
            assert ours["flat"] > 0.0
            assert ours["ratio"] == pytest.approx(ours["edge"] / ours["flat"])
            assert closed["std"] > ours["std"]  # the default precision is the larger one
            assert control["std"] == pytest.approx(ours["std"], rel=0.5)  # scaled in the logits
        assert run["test"][vae.POSTERIOR]["loss"] == pytest.approx(run["network loss"], rel=0.01)
        assert run["test"][vae.CLOSED]["loss"] > run["test"][vae.POSTERIOR]["loss"]
    picture = runs["0"]["pictures"][0]
    assert np.array(picture["mean"]).shape == np.array(picture["std"]).shape == (8, 8)
    assert np.max(picture["std"]) == 255


def test_page_says_whose_work_the_edges_are(results: dict) -> None:
    page = vae.page(results)
    gallery, table = page.sections[0].blocks
    assert [picture.label.split(",")[0] for picture in gallery.pictures] == ["mean", "std"] * 2
    assert len(table.rows) == 6
    for factor, said in ((1.0, "with it the ratio is 1.00"), (3.0, "adds to what"), (0.3, "makes the ratio smaller")):
        changed = copy.deepcopy(results)
        for run in changed["data"]["digits"].values():
            run["latent"][vae.POSTERIOR]["ratio"] = factor * run["latent"][vae.CONTROL]["ratio"]
        assert said in vae.page(changed).sections[0].paragraphs[1]


def test_uncertain_edges_have_a_large_ratio() -> None:
    image = torch.zeros(8, 8)
    image[:, 4:] = 1.0
    std = torch.full((8, 8), 0.01)
    std[:, 3:5] = 0.07  # on both sides of the step, where Sobel's filters see it
    samples = torch.stack([image + std, image - std]).reshape(2, 1, 64)
    found = vae.judge(samples, 8, image.reshape(1, 64))
    assert found["flat"] == pytest.approx(2**0.5 * 0.01, rel=1e-4)
    assert found["edge"] == 0.0  # a quarter of the pixels share the largest slope: none is above the 90th percentile
    image[:, 4] = 0.8  # the left side of the step is steeper at some pixels than at others
    image[0, 4] = image[1, 4] = 1.0
    found = vae.judge(torch.stack([image + std, image - std]).reshape(2, 1, 64), 8, None)
    assert found["ratio"] == pytest.approx(7.0, rel=1e-3)


def test_sobel_is_that_of_scipy() -> None:
    images = torch.rand(3, 1, 6, 6)
    expected = [
        np.hypot(ndimage.sobel(i, 0, mode="nearest"), ndimage.sobel(i, 1, mode="nearest")) for i in images[:, 0]
    ]
    assert torch.allclose(vae.sobel(images)[:, 0], torch.tensor(np.array(expected)), atol=1e-5)


def test_changes_along_noise_are_those_of_automatic_differentiation() -> None:
    decoder = vae.VAE(9, 4).decoder
    z, noise = torch.randn(3, vae.LATENT), torch.randn(2, sum(p.numel() for p in decoder.parameters()))
    found = vae.straight(decoder, noise, z)
    parameters = dict(decoder.named_parameters())
    for i in range(2):
        parts = noise[i].split([p.numel() for p in parameters.values()])
        tangents = {name: part.reshape(p.shape) for part, (name, p) in zip(parts, parameters.items(), strict=True)}
        _, expected = torch.func.jvp(lambda p: torch.func.functional_call(decoder, p, (z,)), (parameters,), (tangents,))
        assert torch.allclose(found[i].float(), expected, atol=1e-4)


def test_autoencoder_has_the_size_of_the_papers() -> None:
    assert 95_000 < sum(p.numel() for p in vae.VAE(784, vae.FULL.hidden).parameters()) < 105_000
