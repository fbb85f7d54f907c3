"""The experiment on CelebA runs from files as they are distributed to a page, at a toy size."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import nullbayes as nb
from nullbayes.experiments import celeba, celeba_page, find, photographs
from nullbayes.experiments.frame import Missing, Settings, Store
from nullbayes.experiments.van import VAN
from nullbayes.page import Page, Table, Value
from support.image_folders import make_celeba, make_food, whole_run

pytest.importorskip("PIL", reason="images are read with Pillow")
pytestmark = pytest.mark.cpu

TINY = celeba.Sizes(
    pixels=16, shorter=16, train=None, rows=12, held_out=None, test=None, epochs=2, batch_size=8, members=2, samples=4,
    sweeps=3, budget=12, rank=None, sketch=None, iterates=3, steps=1,
    network={"depths": (1, 1), "widths": (4, 6), "ratios": (2, 2)},
)  # fmt: skip
FEW = dataclasses.replace(TINY, only=("Max logit", "Projected", "Local ensemble", "SWAG"))
FACES = [
    *[(0, ("Smiling", "Young")), (0, ("Male",))] * 8, (0, ("Bald",)), (0, ("Eyeglasses", "Young")),
    *[(1, ("Smiling",)), (1, ("Male", "Young"))] * 21, (1, ("Mustache",)),
    *[(2, ("Young",)), (2, ("Smiling",))] * 3,
    (2, ("Bald", "Male")), (2, ("Bald",)), (2, ("Bald", "Mustache")), (2, ("Eyeglasses",)),
    (2, ("Mustache", "Male")), (2, ("Mustache",)), (2, ("Mustache", "Male", "Young")), (2, ("Eyeglasses", "Bald")),
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_celeba(folder, FACES)
    make_food(folder, ["apple_pie/11", "apple_pie/12", "waffles/3"])
    return folder


@pytest.fixture(scope="module")
def folder(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(celeba, FEW, data, tmp_path_factory.mktemp("run"))


def test_the_network_of_the_paper_has_as_many_parameters_as_the_paper_says() -> None:
    model = VAN(outputs=40 - len(celeba.HELD_OUT))
    assert sum(weight.numel() for weight in model.parameters()) == 3_858_309


@pytest.mark.slow
def test_images_with_a_held_out_attribute_are_strangers_and_nothing_else(settings: Settings) -> None:
    faces = celeba.read_faces(settings, TINY)

    def numbers(images: Any) -> list[int]:
        return [int(path.stem) - 1 for path in images.files]

    for part, split in ((faces.training, 0), (faces.validation, 1), (faces.test, 2)):
        familiar = [i for i, (s, has) in enumerate(FACES) if s == split and not set(has) & set(celeba.HELD_OUT)]
        assert numbers(part) == familiar
        assert part.targets.tolist() == [
            [float(a in FACES[i][1]) for a in ("Smiling", "Male", "Young")] for i in familiar
        ]
    for name in celeba.HELD_OUT:
        only = [i for i, (s, has) in enumerate(FACES) if s == 2 and set(has) & set(celeba.HELD_OUT) == {name}]
        assert numbers(faces.strangers[f"{name} only"]) == only
    assert len(faces.strangers["Food-101"]) == 3


def test_methods_are_judged_against_every_kind_of_strangers(results: dict[str, Any]) -> None:
    assert FEW.only is not None
    check(results, FEW.only)
    for name in ("Local ensemble", "SWAG"):
        assert 0 < results["methods"][name][0]["rank"] <= TINY.budget


@pytest.mark.slow
def test_all_methods_of_the_papers_table_run_with_two_seeds(data: Path) -> None:
    results = celeba.run(Settings(data=data, seeds=2), TINY)
    check(results, tuple(celeba_page.PAPER))
    assert {name: len(seeds) for name, seeds in results["methods"].items() if len(seeds) != 2} == {"Deep ensemble": 1}
    for name in ("LLA", "SCOD"):
        assert 0 < results["methods"][name][0]["rank"] <= TINY.budget
    table = celeba_page.page(results).sections[0].blocks[0]
    assert isinstance(table, Table)
    spreads = {row[0]: row[2].spread for row in table.rows if isinstance(row[2], Value)}
    assert {name for name, spread in spreads.items() if spread is None} == {"Deep ensemble"}


def check(results: dict[str, Any], names: tuple[str, ...]) -> None:
    assert tuple(results["methods"]) == names
    for name, seeds in results["methods"].items():
        for each in seeds:
            assert set(each["auroc"]) == set(celeba_page.KINDS)
            assert all(0 <= auroc <= 1 for auroc in each["auroc"].values())
            assert (each["nll"] is None) == (name in ("Local ensemble", "SLU"))
    json.dumps(results, allow_nan=False)


def test_the_projected_posterior_predicts_as_its_network_does(results: dict[str, Any]) -> None:
    network, ours = (results["methods"][name][0] for name in ("Max logit", "Projected"))
    assert ours["accuracy"] == pytest.approx(network["accuracy"], abs=0.1)
    assert ours["calibrated"].keys() == network["auroc"].keys()


def test_max_logit_ranks_by_the_largest_logit_of_an_image(settings: Settings, results: dict[str, Any]) -> None:
    faces = celeba.read_faces(settings, TINY)
    model = celeba._trained(settings, TINY, faces)

    def largest(images: Any) -> list[float]:
        return [float(model(x[None]).detach().max()) for x, _ in images]

    known, food = largest(faces.test), largest(faces.strangers["Food-101"])
    wins = [(other < own) + 0.5 * (other == own) for own in known for other in food]
    assert results["methods"]["Max logit"][0]["auroc"]["Food-101"] == pytest.approx(sum(wins) / len(wins))


def test_a_second_run_repeats_nothing_and_finds_the_same(settings: Settings, results: dict[str, Any]) -> None:
    assert settings.store is not None
    said: list[str] = []
    again = dataclasses.replace(settings, store=Store(settings.store.folder, said.append))
    assert celeba.run(again, FEW) == results
    assert all("done before" in line for line in said)


def test_the_page_has_the_papers_figures_beside_ours(results: dict[str, Any]) -> None:
    made = find("celeba").page(json.loads(json.dumps(results)))
    assert isinstance(made, Page)
    table = made.sections[0].blocks[0]
    assert isinstance(table, Table)
    row = next(row for row in table.rows if row[0] == "Local ensemble")
    found = results["methods"]["Local ensemble"][0]["auroc"]["Bald only"]
    assert row[list(celeba_page.KINDS).index("Bald only") + 2] == Value(found, None, 0.79)
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_the_page_of_a_run_has_a_row_for_every_method_and_what_the_library_warned_of(
    folder: Path, results: dict[str, Any]
) -> None:
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert FEW.only is not None
    assert all(f">{name}<" in html for name in (*FEW.only, "Projected, calibrated", *celeba_page.KINDS))
    assert any("did not reach the tolerance" in note for note in results["methods"]["Projected"][0]["notes"])
    assert "did not reach the tolerance" in html


def test_a_method_that_failed_is_left_out_of_all_tables_and_named(results: dict[str, Any]) -> None:
    failed = {"failed": "CUDA out of memory.", "again": True}
    methods = {**results["methods"], "SWAG": [failed], "Projected": [failed, *results["methods"]["Projected"]]}
    sections = {section.title: section for section in find("celeba").page({**results, "methods": methods}).sections}
    names = {row[0] for section in sections.values() for t in section.blocks if isinstance(t, Table) for row in t.rows}
    assert "SWAG" not in names
    assert {"Projected", "Local ensemble"} <= names
    assert sections["What it took"].paragraphs == [f"Left out: {m}. CUDA out of memory." for m in ("Projected", "SWAG")]


def test_a_method_that_cannot_be_fitted_does_not_end_the_run() -> None:
    def warn() -> dict[str, Any]:
        warnings.warn("Careful.", nb.errors.UnderfitWarning, stacklevel=1)
        return {"seed": "any"}

    def fail() -> dict[str, Any]:
        raise nb.errors.SettingsError("Too much.")

    def works(own: Settings) -> dict[str, Any]:
        return {"good": warn, "bad": fail, "first": lambda: {"seed": own.seed}}

    assert photographs.each_method(Settings(seeds=2), works, once="first") == {
        "good": [{"seed": "any", "notes": ["Careful."]}] * 2,
        "bad": [{"failed": "Too much.", "again": False}] * 2,
        "first": [{"seed": 0, "notes": []}],
    }


@pytest.mark.parametrize("name", ["Local ensemble", "LLA", "SCOD"])
def test_a_baseline_stays_within_the_memory_of_the_budget(
    name: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    faces = celeba.read_faces(settings, TINY)
    bench = photographs.Bench(settings, TINY, celeba._trained(settings, TINY, faces), faces)
    monkeypatch.setattr(celeba.Sizes, "limit", lambda sizes, n: n)  # bytes, where its vectors take many times as much
    with pytest.raises(nb.errors.SettingsError, match="more than the memory limit"):
        celeba.methods(bench)[name][0]()


def test_the_estimate_grows_with_the_sizes_and_says_what_it_rests_on(settings: Settings) -> None:
    small, large = (celeba.estimate(settings, dataclasses.replace(TINY, epochs=n)) for n in (2, 2000))
    assert 0 < 10 * small.seconds < large.seconds
    assert small.memory > 0
    assert "nb.plan" in small.note


def test_without_the_data_the_experiment_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="needs the folder celeba: say where the data are: --data FOLDER"):
        celeba.run(Settings(data=tmp_path), celeba.FULL)
