"""Residuals fall with the sweeps, and exact projectors find the same null space."""

from __future__ import annotations

import pytest

from nullbayes.experiments import convergence
from nullbayes.experiments.frame import Settings
from support.data_folders import write_images

SIZES = convergence.Sizes(
    problems=("small",), n=20, test=30, width=2, epochs=40, samples=4, block=5, sweeps=(1, 5, 40), ranks=(5, 100),
    tolerances=(0.1, 0.001),
)  # fmt: skip
pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, "fashion-mnist", 30)
    write_images(folder, "mnist", 30, seed=1)
    return convergence.run(Settings(data=folder), SIZES)


def test_every_projector_converges_to_the_exact_null_space(results: dict) -> None:
    found = results["problems"]["small"]
    points, n = found["points"], found["parameters"]
    assert set(points) == {
        "ExactDual", "ExactDual, truncated", "ExactPrimal", "Alternating", "Krylov", "Lanczos",
    }  # fmt: skip
    [dual], [primal] = points["ExactDual"], points["ExactPrimal"]
    assert dual["dimension"] == primal["dimension"]
    assert n - found["rows"] <= dual["dimension"] < n
    assert max(dual["residual"], primal["residual"]) < 1e-6
    for name in ("Alternating", "Krylov", "Lanczos", "ExactDual, truncated"):
        residuals = [each["residual"] for each in points[name]]
        dimensions = [each["dimension"] for each in points[name]]
        assert residuals == sorted(residuals, reverse=True)
        assert residuals[-1] < residuals[0] * (0.8 if name == "Alternating" else 0.2)
        assert dimensions[-1] <= dimensions[0]
    assert [each["sweeps"] for each in points["Alternating"]] == [1, 5, 40]
    assert points["Krylov"][-1]["residual"] < points["Alternating"][-1]["residual"]
    for places in points.values():
        for each in places:
            assert each["prior precision"] == dual["prior precision"]
            assert 0.0 <= each["accuracy"] <= 1.0
            assert 0.0 <= each["auroc"]["mnist"] <= 1.0
            assert each["seconds"] > 0.0


def test_page_draws_every_projector(results: dict) -> None:
    page = convergence.page(results)
    [section] = page.sections
    table, *figures = section.blocks
    points = results["problems"]["small"]["points"]
    assert len(table.rows) == sum(map(len, points.values()))
    assert len(figures) == 8  # residual, dimension, accuracy and AUROC against sweeps and seconds
    assert all([series.name for series in figure.series] == list(points) for figure in figures)
    assert all(y > 0 for figure in figures if figure.log_y for series in figure.series for y in series.y)
    assert "Conjugate gradients reach the residual of 40 alternating sweeps" in section.paragraphs[2]
    for each in points["Krylov"]:
        each["residual"] = 1.0
    points["Alternating"][-1]["accuracy"] = -1.0
    said = convergence.page(results).sections[0].paragraphs[2]
    assert "Conjugate gradients do not reach" in said
    assert "do not keep the network's accuracy" in said
