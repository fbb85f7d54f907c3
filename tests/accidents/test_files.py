"""A damaged file is refused with one sentence: whatever was altered, cut off or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import nullbayes as nb
from nullbayes import io
from nullbayes.errors import FileError, LikelihoodError, ModelError
from support.drawing import randint
from support.models import MLP
from support.posterior_files import Change, rewritten
from support.posterior_fits import X_NEW

DAMAGED = "not a posterior file, or it is truncated or altered"
OTHER_VERSION = "not a posterior file of this version, or it was altered"


def test_a_file_is_tensors_and_json(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        remembered = ["features", "outputs", "probe.[]", "sums", "table.0", "tables"]
        assert sorted(file.keys()) == ["directions", *(f"familiar.{name}" for name in remembered)]
        text, digest = file.metadata()["nullbayes"].split("\n")
    header = json.loads(text)
    assert header["format_version"] == io.FORMAT_VERSION == 8
    assert header["kind"] == "ProjectedPosterior"
    assert len(digest) == 64


# --- bytes ------------------------------------------------------------------------------------------------------------


def assert_refused(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    with pytest.raises(FileError):
        io.read(path)


def flipped(contents: bytes, bit: int) -> bytes:
    byte = contents[bit // 8] ^ (1 << bit % 8)
    return contents[: bit // 8] + bytes([byte]) + contents[bit // 8 + 1 :]


def test_an_altered_bit_anywhere_is_noticed(saved: Path) -> None:
    good = saved.read_bytes()
    for bit in range(0, 8 * len(good), 43):
        assert_refused(saved, flipped(good, bit))


@pytest.mark.slow
def test_every_altered_bit_is_noticed(saved: Path) -> None:
    good = saved.read_bytes()
    for bit in range(8 * len(good)):
        assert_refused(saved, flipped(good, bit))


def test_a_file_cut_off_anywhere_is_refused(saved: Path) -> None:
    good = saved.read_bytes()
    for length in range(0, len(good), 5):
        assert_refused(saved, good[:length])


@pytest.mark.parametrize("tail", [b"\0", b" ", b"\0" * 8])
def test_a_longer_file_is_refused(tail: bytes, saved: Path) -> None:
    assert_refused(saved, saved.read_bytes() + tail)


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_are_refused(seed: int, saved: Path) -> None:
    noise = randint(256, (2000,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    start = b"" if seed % 2 else (16).to_bytes(8, "little")  # half of them with a plausible length of the header
    saved.write_bytes(start + bytes(noise.tolist()))
    with pytest.raises(FileError, match=DAMAGED):
        nb.load(saved, MLP.build())


def test_a_changed_value_is_reported_as_a_wrong_checksum(saved: Path) -> None:
    good = saved.read_bytes()
    saved.write_bytes(flipped(good, 8 * (len(good) - 3)))
    with pytest.raises(FileError, match=f"{DAMAGED}.*checksum does not match.*take another copy"):
        nb.load(saved, MLP.build())


def test_metadata_that_were_added_are_refused(saved: Path) -> None:
    tensors, _ = io.read(saved)
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, saved, metadata=metadata)
    io.read(saved)
    save_file(tensors, saved, metadata={**metadata, "more": "of it"})
    with pytest.raises(FileError, match="checksum does not match"):
        io.read(saved)


def test_a_file_of_an_earlier_format_is_refused_by_its_version(saved: Path) -> None:
    save_file({}, saved, metadata={"nullbayes": '{"format_version": 5, "sha256": "0"}'})
    with pytest.raises(FileError, match="has format version 5; this nullbayes reads 8: fit and save again"):
        io.read(saved)


def test_a_loaded_posterior_works_after_its_file_is_deleted(saved: Path) -> None:
    posterior = nb.load(saved, MLP.build())
    before = posterior.predict(X_NEW).samples
    with saved.open("r+b") as file:
        file.seek(-posterior.directions.numel() * 8, 2)
        file.write(b"\0" * posterior.directions.numel() * 8)
    assert torch.equal(posterior.predict(X_NEW).samples, before)


# --- not such a file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["nowhere.safetensors", ".", "posterior.safetensors/file", "nul\0"])
def test_a_missing_file_is_named(path: str, saved: Path) -> None:
    with pytest.raises(FileError, match="no posterior file"):
        nb.load(saved.parent / path, MLP.build())


@pytest.mark.parametrize("metadata", [None, {}, {"nullbayes": ""}, {"nullbayes": "[]"}, {"nullbayes": "{}"}])
def test_a_file_of_another_kind_is_refused(metadata: Any, tmp_path: Path) -> None:
    save_file({"directions": torch.zeros(4, 51, device="cpu")}, tmp_path / "weights.safetensors", metadata=metadata)
    with pytest.raises(FileError, match=DAMAGED):
        nb.load(tmp_path / "weights.safetensors", MLP.build())


@pytest.mark.parametrize("version", [io.FORMAT_VERSION + 1, 99, "1", None, True, 2.0, [], 10**4000])
def test_a_newer_format_asks_for_an_upgrade(version: Any, saved: Path) -> None:
    rewritten(saved, lambda tensors, header: header.update(format_version=version))
    with pytest.raises(FileError, match=r"has format version .*; this nullbayes reads 8: upgrade nullbayes"):
        nb.load(saved, MLP.build())


@pytest.mark.parametrize("version", [4, 1, 0, -1])
def test_an_older_format_asks_for_a_new_fit(version: int, saved: Path) -> None:
    rewritten(saved, lambda tensors, header: header.update(format_version=version))
    with pytest.raises(FileError, match=f"has format version {version}; .*fit and save again"):
        nb.load(saved, MLP.build())


# --- a checksum that is right, and a header that is not ---------------------------------------------------------------

FIELDS = (
    "kind", "parameters", "fingerprint", "prior_precision", "precision_rule", "likelihood",
    "report", "output_fn", "inputs", "familiar", "calibration",
    "hessian", "likelihood.name", "likelihood.class_dim", "likelihood.ignore_index", "likelihood.temperature",
    "likelihood.some_ignored", "likelihood.more_ignored",
    *(f"report.{key}" for key in (
        "projector", "reason", "route", "n_data", "n_rows", "n_counted", "tolerance", "sweeps", "residual", "converged",
        "sweeps_per_sample", "settings", "traces", "rank", "output_std", "seed", "based", "train_std", "train_loss_std",
        "peak_memory", "seconds", "notes", "data", "promise", "worst_ratio",
    )),
)  # fmt: skip
MAY_BE_NONE = (
    "likelihood.class_dim",
    "familiar",
    "calibration",
    *(f"report.{key}" for key in ("rank", "peak_memory", "promise", "train_loss_std", "worst_ratio")),
)


def place(header: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    outer, _, inner = field.partition(".")
    return (header[outer], inner) if inner else (header, outer)


def test_the_list_of_fields_is_complete(saved: Path) -> None:
    header = io.read(saved)[1]
    inner = (f"{outer}.{key}" for outer in ("likelihood", "report") for key in header[outer])
    assert {*FIELDS, "format_version"} == {*header, *inner}


@pytest.mark.parametrize("field", FIELDS)
def test_a_header_that_lacks_something_is_refused(field: str, saved: Path) -> None:
    def remove(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        values, key = place(header, field)
        del values[key]

    rewritten(saved, remove)
    with pytest.raises(FileError, match=f"{OTHER_VERSION}: {field} .*(missing|None)"):
        nb.load(saved, MLP.build())


NEVER = {
    "nothing": None, "a word": "poisson", "negative": -1, "NaN": torch.nan, "infinite": torch.inf, "huge": 10**400,
    "a list": [], "a list of lists": [[]], "a mapping": {}, "deep": json.loads("[" * 500 + "]" * 500),
    "a long list": ["x"] * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("value", NEVER.values(), ids=NEVER)
def test_an_invalid_field_is_refused_by_name(value: Any, saved: Path) -> None:
    report = (f"report.{key}" for key in ("data", "projector", "reason", "route", "settings"))
    texts = ("fingerprint", "inputs", *report)
    good = saved.read_bytes()
    for field in FIELDS:
        if (value is None and field in MAY_BE_NONE) or (value == "poisson" and field in texts):
            continue
        if (value == {} and field == "report.seconds") or (value == -1 and field.startswith("likelihood.")):
            continue  # these can be
        if (value == [] and field == "report.notes") or (value == "poisson" and field == "familiar"):
            continue  # decisions/test_familiar.py: the model has no such layer
        if value == "poisson" and field == "likelihood.name":
            continue  # test_io.py: it may be a likelihood of the user's own
        if value == {} and field == "calibration":
            continue  # decisions/test_methods.py: it lacks all that it needs
        saved.write_bytes(good)
        rewritten(
            saved, lambda tensors, header, field=field: place(header, field)[0].update({field.split(".")[-1]: value})
        )
        with pytest.raises(FileError, match=f"{OTHER_VERSION}: {field}"):
            nb.load(saved, MLP.build())


@pytest.mark.parametrize("where", ["", "report", "likelihood"])
def test_an_unknown_field_is_refused(where: str, saved: Path) -> None:
    rewritten(saved, lambda tensors, header: (header[where] if where else header).update(extra=1))
    with pytest.raises(FileError, match=rf"{OTHER_VERSION}: .*extra of its header is 'one field too many'"):
        nb.load(saved, MLP.build())


ALTERATIONS: dict[str, tuple[Change, str]] = {
    "a class by its path": (
        lambda tensors, header: header.update(kind="nullbayes.posteriors.ProjectedPosterior"), "kind of its header",
    ),
    "another class": (lambda tensors, header: header.update(kind="SamplePosterior"), "kind of its header"),
    "precision of zero": (lambda tensors, header: header.update(prior_precision=0), "prior_precision of its header"),
    "likelihood": (lambda tensors, header: header["likelihood"].update(name="poisson"), "poisson"),
    "parameters": (lambda tensors, header: header.update(parameters=[["0.weight"]]), OTHER_VERSION),
    "names twice": (lambda tensors, header: header["parameters"].append(header["parameters"][0]), "another structure"),
    "other shapes": (lambda tensors, header: header["parameters"][0].__setitem__(1, [4, 6]), "another structure"),
    "residuals": (lambda tensors, header: header["report"]["residual"].pop(), "does not fit its samples"),
    "sweeps": (lambda tensors, header: header["report"]["sweeps_per_sample"].pop(), "does not fit its samples"),
    "a rank beyond the parameters": (lambda tensors, header: header["report"].update(rank=52), "report.rank"),
    "no directions": (lambda tensors, header: tensors.pop("directions"), r"shape \(0,\)"),
    "NaN": (lambda tensors, header: tensors["directions"][2].fill_(torch.nan), "not finite"),
    "infinity": (lambda tensors, header: tensors["directions"][0, 3:4].fill_(torch.inf), "not finite"),
    "narrow": (lambda tensors, header: tensors.update(directions=tensors["directions"][:, :50].clone()), r"\(4, 50\)"),
    "flat": (lambda tensors, header: tensors.update(directions=tensors["directions"][0].clone()), r"shape \(51,\)"),
    "one": (lambda tensors, header: tensors.update(directions=tensors["directions"][:1].clone()), r"shape \(1, 51\)"),
    "single": (lambda tensors, header: tensors.update(directions=tensors["directions"].float()), "torch.float32"),
    "whole": (lambda tensors, header: tensors.update(directions=tensors["directions"].long()), "torch.int64"),
    "complex": (lambda tensors, header: tensors.update(directions=tensors["directions"].cfloat()), "torch.complex64"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "fragment"), ALTERATIONS.values(), ids=ALTERATIONS)
def test_an_altered_file_is_refused(change: Change, fragment: str, saved: Path) -> None:
    def with_a_rest(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        change(tensors, header)
        tensors["rest"] = torch.zeros(1, device="cpu")  # a file may hold nothing but the tensor that is taken out

    rewritten(saved, with_a_rest)
    with pytest.raises(FileError, match=fragment):
        nb.load(saved, MLP.build())


# --- what is not the file's fault -------------------------------------------------------------------------------------


def test_a_wrong_argument_of_load_is_not_reported_as_a_bad_file(saved: Path) -> None:
    with pytest.raises(ModelError, match=r"nn\.Module"):
        nb.load(saved, "model")  # type: ignore[arg-type]
    with pytest.raises(LikelihoodError, match="poisson"):
        nb.load(saved, MLP.build(), likelihood="poisson")


def test_parameters_of_two_precisions_do_not_match_the_file(saved: Path) -> None:
    """The file names the parameters of a model that has them in two precisions, which no fit accepts."""
    model = MLP.build()
    model[2].float()
    with pytest.raises(FileError, match=r"does not fit this model: .*several precisions"):
        nb.load(saved, model)


def test_a_model_without_the_saved_parameters_is_refused(saved: Path) -> None:
    with pytest.raises(FileError, match="another structure"):
        nb.load(saved, nn.Identity())
