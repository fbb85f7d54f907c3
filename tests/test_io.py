"""A saved posterior comes back bit by bit, or is refused with the reason; reading one never runs anything."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import nullbayes as nb
from drawing import randint, randn
from models import BATCHNORM, CLASSIFICATION, CUSTOM, MLP, MODELS, REGRESSION, TASKS, Task, cauchy
from nullbayes import io
from nullbayes.errors import FileError, NotFittedError, NullBayesError, SettingsError

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

X_NEW = MLP.inputs(4, torch.Generator().manual_seed(11))
EXACT = nb.projectors.ExactDual()

each_kind = pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def fit(kind: type = nb.ProjectedPosterior, task: Task = CLASSIFICATION, n_samples: int = 4, **settings: Any) -> Any:
    options = {"projector": EXACT, "progress": False, "generator": torch.Generator().manual_seed(0), **settings}
    return kind(MLP.build(task.outputs), task.likelihood).fit([task.data()], n_samples, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A posterior file of the small network."""
    path = tmp_path / "posterior.safetensors"
    fit().save(path)
    return path


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """The same file with its tensors or its header changed."""
    tensors, header = io.read(path)
    change(tensors, header)
    io.save(path, tensors, header)
    return path


# --- there and back ---------------------------------------------------------------------------------------------------


@each_task
@each_kind
def test_a_posterior_comes_back_bit_by_bit(kind: type, task: Task, tmp_path: Path) -> None:
    posterior = fit(kind, task)
    posterior.save(tmp_path / "file")
    loss = {"likelihood": cauchy} if task is CUSTOM else {}
    loaded = nb.load(tmp_path / "file", MLP.build(task.outputs), **loss)
    assert type(loaded) is kind
    assert torch.equal(loaded.directions, posterior.directions)
    assert loaded.prior_precision == posterior.prior_precision
    assert loaded.likelihood == posterior.likelihood
    assert loaded.report == posterior.report
    assert torch.equal(loaded.predict(X_NEW).samples, posterior.predict(X_NEW).samples)
    assert torch.equal(loaded.ood_score(X_NEW), posterior.ood_score(X_NEW))
    assert loaded.check_fit([task.data()]) == posterior.check_fit([task.data()])
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()


@each_kind
def test_fitted_noise_is_kept(kind: type, tmp_path: Path) -> None:
    x, y = REGRESSION.data()
    posterior = kind(MLP.build(2), "regression").fit([(x, 7 * y)], 4, projector=EXACT, progress=False)
    posterior.save(tmp_path / "file")
    assert posterior.likelihood.sigma_noise > 1
    assert nb.load(tmp_path / "file", MLP.build(2)).likelihood.sigma_noise == posterior.likelihood.sigma_noise


@pytest.mark.parametrize("precision", [3.25, "optimal", "paper"])
def test_the_precision_in_use_is_kept(precision: float | str, saved: Path) -> None:
    posterior = fit()
    posterior.prior_precision = precision
    posterior.save(saved)
    loaded = nb.load(saved, MLP.build())
    assert loaded.prior_precision == posterior.prior_precision
    for rule in ("optimal", "paper", 2.0):
        posterior.prior_precision = loaded.prior_precision = rule
        assert loaded.prior_precision == posterior.prior_precision


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_every_network_knows_its_file(case: Any, tmp_path: Path) -> None:
    model, (x, y) = case.build(), CLASSIFICATION.data(case, n=3)
    posterior = nb.ProjectedPosterior(model).fit([(x, y)], 3, projector="auto", progress=False)
    posterior.save(tmp_path / "file")
    assert torch.equal(nb.load(tmp_path / "file", case.build()).predict(x).samples, posterior.predict(x).samples)


def test_chosen_parameters_are_kept(tmp_path: Path) -> None:
    posterior = nb.ProjectedPosterior(MLP.build(), parameters="2.*")
    posterior.fit([CLASSIFICATION.data(n=3)], 4, projector=EXACT, progress=False).save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build())
    assert list(loaded.sample()) == ["2.weight", "2.bias"]
    assert torch.equal(loaded.predict(X_NEW).samples, posterior.predict(X_NEW).samples)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_model_is_neither_used_nor_changed(training: bool, tmp_path: Path) -> None:
    x, y = CLASSIFICATION.data(BATCHNORM)
    posterior = nb.ProjectedPosterior(BATCHNORM.build()).fit([(x, y)], 4, projector=EXACT, progress=False)
    posterior.save(tmp_path / "file")
    model = BATCHNORM.build().train(training)
    loaded = nb.load(tmp_path / "file", model)
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    assert all(module.training is training for module in model.modules())


def test_the_way_to_take_batches_apart_is_given_again(tmp_path: Path) -> None:
    x, y = CLASSIFICATION.data()
    data, apart = [{"a": x, "b": y}], lambda batch: (batch["a"], batch["b"])
    posterior = nb.ProjectedPosterior(MLP.build(), batch_fn=apart).fit(data, 4, projector=EXACT, progress=False)
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build(), batch_fn=apart)
    assert loaded.check_fit(data) == posterior.check_fit(data)
    torch.testing.assert_close(loaded.predict(data).samples, posterior.predict(x).samples)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nb.ProjectedPosterior, {}), (nb.ProjectedPosterior, {"hessian": True}), (nb.LossProjectedPosterior, {})],
    ids=["projected", "scaled", "loss-projected"],
)
def test_a_loaded_posterior_goes_on_where_it_was(kind: type, options: dict[str, bool], tmp_path: Path) -> None:
    data, generators = [CLASSIFICATION.data()], [torch.Generator().manual_seed(0) for _ in range(2)]
    whole, part = (
        kind(MLP.build(), **options).fit(data, n, projector=EXACT, generator=generator, progress=False)
        for n, generator in zip((7, 4), generators, strict=True)
    )
    part.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build())
    for ask in (lambda: loaded.extend(3), lambda: loaded.functional_variance(X_NEW, exact=True)):
        with pytest.raises(NotFittedError, match=r"a file does not hold.*prepare\(loader\)"):
            ask()
    assert loaded.prepare(data, projector=EXACT) is loaded
    loaded.extend(3, progress=False)
    torch.testing.assert_close(loaded.directions, whole.directions)
    torch.testing.assert_close(
        loaded.functional_variance(X_NEW, exact=True), whole.functional_variance(X_NEW, exact=True)
    )
    assert loaded.report.n_samples == 7
    assert loaded.report.kernel_dimension == whole.report.kernel_dimension


def test_a_loaded_posterior_with_a_base_does_not_go_on_with_another(tmp_path: Path) -> None:
    base = 5 * randn(4, 51, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    posterior = fit(base=lambda n, generator: base[:n])
    posterior.save(tmp_path / "file")
    loaded = nb.load(tmp_path / "file", MLP.build())
    assert torch.equal(loaded.directions, posterior.directions)
    loaded.prior_precision = "optimal"
    assert loaded.prior_precision == posterior.prior_precision == 1.0
    loaded.prepare([CLASSIFICATION.data()], projector=EXACT)
    with pytest.raises(SettingsError, match="base distribution, which a file does not hold"):
        loaded.extend(2, progress=False)
    with pytest.raises(SettingsError, match="exact=False"):
        loaded.functional_variance(X_NEW, exact=True)
    assert loaded.n_samples == 4


def test_a_loss_of_ones_own_must_be_given_again(tmp_path: Path) -> None:
    fit(task=CUSTOM).save(tmp_path / "file")
    with pytest.raises(FileError, match=r"a file cannot hold: pass load\(..., likelihood=loss\)"):
        nb.load(tmp_path / "file", MLP.build(2))


# --- another model ----------------------------------------------------------------------------------------------------


def changed(name: str) -> nn.Module:
    model = MLP.build()
    model.state_dict()[name][0] += 1e-12
    return model


OTHER_MODELS = {
    "other parameters": (lambda: MLP.build(seed=1), "same structure with other parameters.*state_dict"),
    "a bit of one parameter": (lambda: changed("2.bias"), "same structure with other parameters.*state_dict"),
    "other precision": (lambda: MLP.build().float(), "same structure with other parameters"),
    "more layers": (
        lambda: nn.Sequential(*MLP.build(), nn.Linear(3, 3).double()),
        "other parameters|another structure",
    ),
    "fewer layers": (lambda: MLP.build()[:1], "another structure.*'2.weight'"),
    "other names": (lambda: nn.Sequential(nn.Identity(), *MLP.build()), "another structure.*'0.weight'"),
    "other shapes": (lambda: MLP.build(4), r"another structure.*2.weight \(3, 6\)"),
}


@pytest.mark.parametrize(("make", "fragment"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_another_model_is_refused(make: Callable[[], nn.Module], fragment: str, saved: Path) -> None:
    with pytest.raises(FileError, match=fragment):
        nb.load(saved, make())


@pytest.mark.parametrize("name", ["0.weight", "1.running_var", "8.bias"])
def test_whatever_the_outputs_depend_on_must_be_the_same(name: str, tmp_path: Path) -> None:
    """Parameters that do not vary and running statistics too."""
    posterior = nb.ProjectedPosterior(BATCHNORM.build(), parameters="8.*")
    posterior.fit([CLASSIFICATION.data(BATCHNORM, n=3)], 3, projector=EXACT, progress=False).save(tmp_path / "file")
    model = BATCHNORM.build()
    model.state_dict()[name][0] += 1e-12
    with pytest.raises(FileError, match="other parameters"):
        nb.load(tmp_path / "file", model)


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 50, 0.5, 0.9, -1])
def test_a_truncated_file_is_refused(keep: float, saved: Path) -> None:
    whole = saved.read_bytes()
    length = int(keep * len(whole)) if isinstance(keep, float) else keep % len(whole)
    saved.write_bytes(whole[:length])
    with pytest.raises(FileError, match="not a posterior file, or it is truncated"):
        nb.load(saved, MLP.build())


def test_a_longer_file_is_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"\0" * 8)
    with pytest.raises(FileError, match="truncated or altered"):
        nb.load(saved, MLP.build())


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_are_refused(seed: int, saved: Path) -> None:
    noise = randint(256, (2000,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    start = b"" if seed % 2 else (16).to_bytes(8, "little")  # half of them with a plausible length of the header
    saved.write_bytes(start + bytes(noise.tolist()))
    with pytest.raises(FileError, match="not a posterior file"):
        nb.load(saved, MLP.build())


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_a_pickle_is_refused_and_never_run(write: Callable[[Any, Any], None], tmp_path: Path) -> None:
    path, witness = tmp_path / "posterior.safetensors", tmp_path / "it ran"
    with path.open("wb") as file:
        write({"directions": Trap(witness)}, file)
    with pytest.raises(FileError, match="not a posterior file"):
        nb.load(path, MLP.build())
    assert not witness.exists()
    pickle.loads(pickle.dumps(Trap(witness)))
    assert witness.exists()  # it would have


@pytest.mark.parametrize("path", ["nowhere.safetensors", "."])
def test_a_missing_file_is_named(path: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no posterior file"):
        nb.load(tmp_path / path, MLP.build())


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"directions": torch.zeros(4, 51)}, tmp_path / "weights.safetensors")
    with pytest.raises(FileError, match="not a posterior file"):
        nb.load(tmp_path / "weights.safetensors", MLP.build())


@pytest.mark.parametrize("version", [io.FORMAT_VERSION + 1, 99, "1", None])
def test_a_newer_format_asks_for_an_upgrade(version: Any, saved: Path) -> None:
    rewritten(saved, lambda tensors, header: header.update(format_version=version))
    with pytest.raises(FileError, match=f"format version {version}.*upgrade nullbayes"):
        nb.load(saved, MLP.build())


def keys_of_a_file() -> list[str]:
    return [
        "kind", "parameters", "fingerprint", "prior_precision", "kernel_dimension", "likelihood", "based", "report",
        "hessian", *(f"report.{key}" for key in ("residual", "traces", "rank", "train_std", "seconds", "projector")),
    ]  # fmt: skip


@pytest.mark.parametrize("key", keys_of_a_file())
def test_a_header_that_lacks_something_is_refused(key: str, saved: Path) -> None:
    def remove(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        outer, _, inner = key.partition(".")
        del (header[outer] if inner else header)[inner or outer]

    rewritten(saved, remove)
    with pytest.raises(NullBayesError, match=r"file of this version|no report"):
        nb.load(saved, MLP.build())


ALTERATIONS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "kind": (lambda tensors, header: header.update(kind="os.system"), "altered"),
    "precision, a word": (lambda tensors, header: header.update(prior_precision="much"), "altered"),
    "precision, negative": (lambda tensors, header: header.update(prior_precision=-1.0), "prior_precision"),
    "likelihood": (lambda tensors, header: header["likelihood"].update(name="poisson"), "poisson"),
    "parameters": (lambda tensors, header: header.update(parameters=[["0.weight"]]), "altered"),
    "report": (lambda tensors, header: header.update(report=[1, 2]), "altered"),
    "residuals": (lambda tensors, header: header["report"]["residual"].pop(), "does not fit its samples"),
    "no directions": (lambda tensors, header: tensors.pop("directions"), "altered"),
    "NaN": (lambda tensors, header: tensors["directions"][2].fill_(torch.nan), "not finite"),
    "infinity": (lambda tensors, header: tensors["directions"][0, 3:4].fill_(torch.inf), "not finite"),
    "narrow": (lambda tensors, header: tensors.update(directions=torch.zeros(4, 50)), r"shape \(4, 50\)"),
    "flat": (lambda tensors, header: tensors.update(directions=torch.zeros(51)), r"shape \(51,\)"),
}


@pytest.mark.parametrize(("change", "fragment"), ALTERATIONS.values(), ids=ALTERATIONS)
def test_an_altered_file_is_refused(change: Any, fragment: str, saved: Path) -> None:
    if fragment == "altered":  # other files may have nothing in them but the tensor that is taken out
        fragment = "not a posterior file of this version, or it was altered"
    rewritten(saved, lambda tensors, header: (change(tensors, header), tensors.setdefault("rest", torch.zeros(1))))
    with pytest.raises(NullBayesError, match=fragment):
        nb.load(saved, MLP.build())


def test_a_file_is_tensors_and_json(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        assert list(file.keys()) == ["directions"]
        header = json.loads(file.metadata()["nullbayes"])
    assert header["format_version"] == 1
    assert header["kind"] == "ProjectedPosterior"


# --- a disk that does not play along ----------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def test_saving_replaces_what_was_there(saved: Path) -> None:
    posterior = fit(n_samples=6)
    posterior.save(str(saved))
    assert nb.load(saved, MLP.build()).n_samples == 6
    assert list(contents(saved.parent)) == [saved.name]


@pytest.mark.parametrize("where", ["missing/file", "posterior.safetensors/file"])
def test_a_folder_that_is_not_there_is_named(where: str, saved: Path) -> None:
    before = contents(saved.parent)
    with pytest.raises(FileError, match="could not be written"):
        fit().save(saved.parent / where)
    assert contents(saved.parent) == before


def test_a_folder_in_the_place_of_the_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "posterior").mkdir()
    (tmp_path / "posterior" / "inside").write_text("mine")
    with pytest.raises(FileError, match="could not be written"):
        fit().save(tmp_path / "posterior")
    assert contents(tmp_path) == {"posterior": None}
    assert (tmp_path / "posterior" / "inside").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that not even root can write to")
def test_a_folder_that_nobody_can_write_to_is_named() -> None:
    with pytest.raises(FileError, match=r"could not be written to /proc/self/posterior"):
        fit().save("/proc/self/posterior")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_folder_is_named(saved: Path) -> None:
    before = contents(saved.parent)
    saved.parent.chmod(0o500)
    try:
        with pytest.raises(FileError, match="could not be written"):
            fit().save(saved)
    finally:
        saved.parent.chmod(0o700)
    assert contents(saved.parent) == before


def test_a_full_disk_leaves_the_earlier_file(saved: Path) -> None:
    """Files may not grow beyond 2 kB for a moment: writing breaks off in the middle."""
    resource = pytest.importorskip("resource")
    posterior, before = fit(n_samples=100), contents(saved.parent)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(FileError, match="could not be written"):
            posterior.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(saved.parent) == before
    assert nb.load(saved, MLP.build()).n_samples == 4


def test_a_saved_file_can_be_read_by_those_who_may_read_new_files(saved: Path) -> None:
    plain = saved.parent / "plain"
    plain.touch()
    assert saved.stat().st_mode == plain.stat().st_mode
