"""Data that change while they are in use are caught when they are next read, and the batch is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import DataError
from nullbayes.hashing import checksums
from nullbayes.jacobian.data import Examples
from support.drawing import randn
from support.models import CLASSIFICATION, MLP, batches

DEVICE = torch.get_default_device()
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    values = 100 * randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dtype == torch.uint8:
        return (values.abs() % 200).to(dtype)
    return values > 0 if dtype == torch.bool else values.to(dtype)


def data(n: int = 9) -> list[tuple[Tensor, Tensor]]:
    return batches(*CLASSIFICATION.data(n=n), (4, 3, n - 7))


# --- checksums --------------------------------------------------------------------------------------------------------


def swapped(x: Tensor) -> Tensor:
    return x.flip(1)


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, dims=1)


def one_bit(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(torch.uint8)[:, 3] ^= 1
    return x


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "entries in another order": swapped,
    "entries moved by one": rolled,
    "the other sign": torch.neg,  # the uppermost bit of every entry
    "one bit": one_bit,
    "twice as large": lambda x: 2 * x,  # the upper bits of every entry
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_checksum_changes_with_every_entry(change: str, dtype: torch.dtype) -> None:
    if dtype == torch.bool and change in ("the other sign", "twice as large", "one bit"):
        return  # there are none
    for width in (*range(16, 32, 2), 31):  # even: signs that change must not cancel
        x = drawn(50, width, dtype=dtype)
        changed = CHANGES[change](x).to(dtype)
        differ = (x != changed).any(1).cpu()
        assert differ.any()
        assert torch.equal(checksums([x], 50) != checksums([changed], 50), differ)


def test_a_checksum_depends_on_the_example_alone() -> None:
    x = drawn(40, 3, 5)
    whole = checksums([x], 40)
    layouts = {
        "some rows": (x[7:20], slice(7, 20)),
        "a slice of wider rows": (torch.cat([x, x], dim=2)[:, :, :5], slice(None)),
        "transposed": (x.transpose(1, 2).contiguous().transpose(1, 2), slice(None)),
        "an odd offset": (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), slice(None)),
    }
    for name, (same, rows) in layouts.items():
        assert torch.equal(checksums([same], len(same)), whole[rows]), name
    small = drawn(41, 8, dtype=torch.float16).flatten()[3:-5].view(40, 8)  # words that begin between two of 64 bits
    assert torch.equal(checksums([small], 40), checksums([small.clone()], 40))


def test_checksums_of_long_examples_see_a_change_at_either_end() -> None:
    x = drawn(2, 150_001, dtype=torch.float32)
    before = checksums([x], 2)
    for where in (0, 32_767, 32_768, 131_072, 150_000):
        changed = x.clone()
        changed[1, where] += 1
        assert (checksums([changed], 2) != before).tolist() == [False, True]


def test_a_checksum_depends_on_the_order_of_the_tensors() -> None:
    a, b = drawn(5, 4), drawn(5, 4, seed=1)
    assert (checksums([a, b], 5) != checksums([b, a], 5)).all()
    assert (checksums([a, torch.tensor(1.0)], 5) != checksums([a, torch.tensor(2.0)], 5)).all()


def test_a_checksum_covers_the_imaginary_part() -> None:
    z = torch.complex(drawn(5, 4), drawn(5, 4, seed=1))
    assert (checksums([z], 5) != checksums([z.conj()], 5)).all()
    assert torch.equal(checksums([z.conj()], 5), checksums([z.conj().resolve_conj()], 5))


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_a_batch_that_was_written_into_is_named_when_it_is_read(what: str) -> None:
    loader = data()
    examples = Examples(loader, None, DEVICE)
    x, y = loader[1]
    if what == "inputs":
        x[2, 1] += 1e-9
    else:
        y[2] = (y[2] + 1) % 3
    examples.read(0, 6)  # what is read is as it was
    with pytest.raises(DataError, match=r"Batch 1 has changed since the data were first read.*x\.clone\(\)"):
        examples.read(5, 8)


def test_data_whose_entries_are_restored_can_be_read_again() -> None:
    loader = data()
    examples, before = Examples(loader, None, DEVICE), loader[2][0].clone()
    loader[2][0].zero_()
    with pytest.raises(DataError, match="Batch 2 has changed"):
        examples.read(8, 9)
    loader[2][0].copy_(before)
    assert torch.equal(examples.read(7, 9)[0], before)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="data are copied to another device only")
def test_data_that_were_copied_to_a_device_cannot_change() -> None:
    loader = [(x.cpu(), y.cpu()) for x, y in data()]
    examples, before = Examples(loader, None, DEVICE), loader[1][0].clone()
    loader[1][0].zero_()
    assert torch.equal(examples.read(4, 7)[0].cpu(), before)


def test_batches_that_are_read_are_copies() -> None:
    loader = data()
    examples = Examples(loader, None, DEVICE)
    for start, stop in ((0, 4), (1, 3), (2, 9)):
        x, y = examples.read(start, stop)
        x.zero_()
        y.zero_()
        assert examples.read(start, stop)[0].abs().min() > 0


def test_a_network_may_work_on_its_input_in_place() -> None:
    loader = data()
    before = copy.deepcopy(loader)
    model = nn.Sequential(nn.ReLU(inplace=True), MLP.build())
    rows = nb.OutputJacobian(model, loader)
    again = nb.OutputJacobian(nn.Sequential(nn.ReLU(), model[1]), before)
    assert torch.equal(rows.dense(), again.dense())
    assert all(torch.equal(x, old) for (x, _), (old, _) in zip(loader, before, strict=True))


@pytest.mark.parametrize("storage", ["recompute", "matrix_free"])
def test_a_change_is_caught_in_the_sweep_in_which_it_happens(storage: Any) -> None:
    loader = data()
    rows = nb.OutputJacobian(MLP.build(), loader, storage=storage)
    projector = nb.projectors.Alternating(block_rows=6, rtol=1e-12)
    state = projector.prepare(rows)
    seen: list[int] = []

    def callback(sweep: Any, *_: Any) -> None:
        seen.append(sweep)
        if len(seen) == 2:
            loader[1][0][0, 0] += 1.0

    noise = randn(2, rows.n_columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(DataError, match="Batch 1 has changed"):
        projector.apply(state, noise, callback=callback)
    assert len(seen) == 2


@pytest.mark.slow
def test_a_fit_with_rows_formed_again_catches_a_change() -> None:
    loader = data(40)
    posterior = nb.ProjectedPosterior(MLP.build(), prior_precision=1.0)
    projector = nb.projectors.Krylov(nb.projectors.Alternating(block_rows=6))
    posterior.fit(loader, 2, projector=projector, memory_limit=2**13, progress=False)
    loader[2][0][5] *= 2
    with pytest.raises(DataError, match="Batch 2 has changed"):
        posterior.extend(2)


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_that_of_the_data_not_of_their_batches() -> None:
    x, y = CLASSIFICATION.data(n=9)
    print_of = {
        name: Examples(loader, None, DEVICE, held_bytes=held).fingerprint()
        for name, loader, held in (
            ("whole", [(x, y)], None),
            ("cut", batches(x, y, (4, 5)), None),
            ("streamed", batches(x, y, (4, 3, 2)), 0),
            ("reordered", [(x.flip(0), y.flip(0))], None),
            ("relabelled", [(x, (y + 1) % 3)], None),
            ("shorter", [(x[:8], y[:8])], None),
            ("reshaped", [(x.view(9, 2, 2), y)], None),
            ("retyped", [(x, y.int())], None),
        )
    }
    assert print_of["whole"] == print_of["cut"] == print_of["streamed"]
    assert len(set(print_of.values())) == len(print_of) - 2


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_a_checksum_does_not_depend_on_strides(dtype: torch.dtype, width: int) -> None:
    table = (9 * randn(5, 4, generator=torch.Generator().manual_seed(0))).to(dtype)
    columns = table[:, 1] if width == 1 else table[:, 1 : 1 + width]
    whole = checksums([columns], 5)
    assert torch.equal(whole, checksums([columns.contiguous()], 5))
    for i in range(5):
        assert torch.equal(checksums([columns[i : i + 1]], 1), whole[i : i + 1])
