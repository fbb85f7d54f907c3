"""Whatever a file holds, `nb.load` returns a posterior that predicts or raises a FileError, and nothing else."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nullbayes as nb
from nullbayes import io
from nullbayes.errors import FileError, InputError, NullBayesWarning
from support.models import MLP
from support.posterior_files import rewritten
from support.posterior_fits import X_NEW, fit_mlp

many = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def predicts_or_is_refused(path: Path) -> bool:
    try:
        posterior = nb.load(path, MLP.build())
    except FileError:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", NullBayesWarning
            )  # of a variance that a tiny prior precision makes infinite
            assert posterior.predict(X_NEW).mean.shape == (4, 3)
    except InputError:  # a file may be made to say that the network had other inputs
        return False
    assert str(posterior.report)
    return True


# --- bytes ------------------------------------------------------------------------------------------------------------


def length(n: int) -> bytes:
    return n.to_bytes(8, "little")


json_like = st.text('{}[]":,0123456789-.eE \\abcdtrufalsn_', max_size=200).map(str.encode)
raw = st.one_of(
    st.binary(max_size=300),
    st.builds(lambda n, rest: length(n) + rest, st.integers(0, 2**64 - 1), st.binary(max_size=100)),
    st.builds(lambda text, rest: length(len(text)) + text + rest, json_like, st.binary(max_size=50)),
)


@many
@given(contents=raw)
def test_random_bytes_load_or_raise_a_file_error(contents: bytes, saved: Path) -> None:
    saved.write_bytes(contents)
    assert not predicts_or_is_refused(saved)


@many
@given(bits=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=8, unique=True))
def test_flipped_bits_load_or_raise_a_file_error(bits: list[float], good: bytes, saved: Path) -> None:
    altered = bytearray(good)
    for bit in {int(8 * len(good) * part) for part in bits}:
        altered[bit // 8] ^= 1 << bit % 8
    saved.write_bytes(altered)
    assert not predicts_or_is_refused(saved)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Another good file of the same model, as long and longer in places."""
    path = tmp_path_factory.mktemp("other") / "posterior"
    fit_mlp(generator=torch.Generator().manual_seed(1)).save(path)
    return path.read_bytes()


@settings(many, max_examples=40)
@given(first=st.floats(0, 1), second=st.floats(0, 1), third=st.floats(0, 1))
def test_cut_and_spliced_files_load_or_raise_a_file_error(
    first: float, second: float, third: float, good: bytes, other: bytes, saved: Path
) -> None:
    a, b, c = int(first * len(good)), int(second * len(other)), int(third * len(good))
    pieces = [good[:a] + other[b:], good[:a] + good[c:], good[:a] + other[a:b] + good[b:], good[a:] + good[:a]]
    for contents in pieces:
        saved.write_bytes(contents)
        assert predicts_or_is_refused(saved) is (contents in (good, other))


# --- headers with a checksum that is right ----------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-3, 100), st.integers(), st.floats(), st.sampled_from([2**63, 2**64, 10**400, -0.0, 5e-324, 1e308])
)
words = st.sampled_from([
    "", "custom", "binary", "regression", "ProjectedPosterior", "LossProjectedPosterior", "0.weight", "2.bias",
    "os.system", "__class__", "\ud800", "\0", "e" * 5000,
])  # fmt: skip
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(words | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(header: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a header, those within lists as well."""
    items = header.items() if isinstance(header, dict) else enumerate(header) if isinstance(header, list) else ()
    return [found for key, value in items for found in ((*here, key), *places(value, (*here, key)))]


def replaced(value: Any) -> Callable[[Any, Any], None]:
    return lambda around, key: around.__setitem__(key, copy.deepcopy(value))


def removed(around: Any, key: Any) -> None:
    del around[key]


def doubled(around: Any, key: Any) -> None:
    value = around[key]
    around[key] = value * 2 if isinstance(value, (list, str)) else [value, value]


actions = st.one_of(values.map(replaced), st.sampled_from([removed, doubled]))


@settings(many, max_examples=250)
@given(steps=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), actions), min_size=1, max_size=3))
def test_headers_of_any_json_load_or_raise_a_file_error(
    steps: list[tuple[float, Any]], good: bytes, saved: Path
) -> None:
    def change(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        for part, act in steps:
            way = places(header)
            if way:
                *outer, key = way[int(part * len(way))]
                around: Any = header
                for step in outer:
                    around = around[step]
                act(around, key)

    saved.write_bytes(good)
    rewritten(saved, change)
    predicts_or_is_refused(saved)


@pytest.mark.parametrize("key", ["prior_precision", "likelihood", "report", "parameters", "kind"])
@settings(many, max_examples=25)
@given(value=values)
def test_a_field_of_any_json_loads_or_raises_a_file_error(key: str, value: Any, good: bytes, saved: Path) -> None:
    saved.write_bytes(good)
    rewritten(saved, lambda tensors, header: header.update({key: value}))
    predicts_or_is_refused(saved)


def test_a_header_may_be_any_text(good: bytes, saved: Path) -> None:
    from safetensors.torch import save_file

    tensors, _ = io.read(saved)
    for text in ["", "{", "}", "[" * 10_000, "[" * 900 + "]" * 900, "9" * 5000, "null", '{"format_version": 5}', "\0é"]:
        version = json.dumps({"format_version": text})
        for metadata in ({"nullbayes": text}, io._metadata(text, tensors), io._metadata(version, tensors)):
            save_file(tensors, saved, metadata=metadata)
            assert not predicts_or_is_refused(saved)


# --- tensors with a checksum that is right ----------------------------------------------------------------------------

dtypes = st.sampled_from([
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
])  # fmt: skip


@many
@given(
    shape=st.one_of(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([[2, 51], [4, 51], [51, 4], [4, 51, 1]])),
    dtype=dtypes,
    value=st.sampled_from([0.0, 1.0, -1e300, torch.nan, torch.inf]),
    name=st.sampled_from(["directions", "Directions", ""]),
)
def test_tensors_of_any_kind_load_or_raise_a_file_error(
    shape: list[int], dtype: torch.dtype, value: float, name: str, good: bytes, saved: Path
) -> None:
    def change(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        tensors.pop("directions")
        finite = value if dtype.is_floating_point else 1
        tensors[name] = torch.full(shape, finite, dtype=torch.float64, device="cpu").to(dtype)

    saved.write_bytes(good)
    rewritten(saved, change)
    whole = (name, shape, dtype) == ("directions", [4, 51], torch.float64)
    assert predicts_or_is_refused(saved) is (whole and abs(value) < torch.inf)
