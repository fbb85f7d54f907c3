"""Pieces: entries whole or in half precision, and outer products, each algebra on a range of columns."""

import pytest
import torch
from torch import Tensor

from nullbayes.linalg.compact import SumPiece
from nullbayes.linalg.pieces import DensePiece, OuterPiece, Piece, normal_flops
from support.layouts import MIXTURES, gaussian, layout

N, OUTPUTS = 7, 3
every_mixture = pytest.mark.parametrize("kind", MIXTURES)


def entries(piece: Piece, columns: int, n_rows: int = N * OUTPUTS) -> Tensor:
    result = torch.zeros(n_rows, columns, dtype=torch.float64)
    piece.put_dense(result)
    return result


# --- every kind ---


@every_mixture
def test_pieces_add_up_to_the_matrix(kind: str) -> None:
    found = layout(kind, order=1)
    torch.testing.assert_close(sum(entries(piece, found.matrix.shape[1]) for piece in found.pieces), found.matrix)


@every_mixture
def test_tiles_of_the_gram_matrix_are_products_of_two_ranges(kind: str) -> None:
    for piece in layout(kind).pieces:
        whole = entries(piece, layout(kind).matrix.shape[1])
        for a, b, c, d in [(0, 7, 0, 7), (0, 2, 3, 7), (5, 6, 0, 1)]:
            left, right = slice(a * OUTPUTS, b * OUTPUTS), slice(c * OUTPUTS, d * OUTPUTS)
            torch.testing.assert_close(
                piece.take(left).cross(piece.take(right), torch.float64, 2**20), whole[left] @ whole[right].T
            )


@every_mixture
def test_pieces_are_filled_a_range_at_a_time(kind: str) -> None:
    found = layout(kind)
    for piece in found.pieces:
        empty = piece.allocate(N * OUTPUTS, piece.tensors()[0].device)
        for first, last in [(0, 3), (3, 7)]:
            where = slice(first * OUTPUTS, last * OUTPUTS)
            empty.take(where).fill(piece.take(where))
        columns = found.matrix.shape[1]
        torch.testing.assert_close(entries(empty, columns), entries(piece, columns))
        assert [tensor.shape for tensor in empty.tensors()] == [tensor.shape for tensor in piece.tensors()]
        assert piece.costs().n_bytes == sum(tensor.numel() * tensor.itemsize for tensor in piece.tensors()) > 0


@every_mixture
def test_pieces_can_be_moved_to_a_device(kind: str) -> None:
    for piece in layout(kind).pieces:
        here = piece.to(torch.device("cpu"))
        assert type(here) is type(piece)
        assert all(tensor.device.type == "cpu" for tensor in here.tensors())
        for mine, theirs in zip(here.tensors(), piece.tensors(), strict=True):
            assert torch.equal(mine, theirs.cpu())


def test_outer_products_cost_less_than_their_entries() -> None:
    wide = OuterPiece(gaussian(N, 50), gaussian(N, OUTPUTS, 40), 0, None)
    count = 50 * 40
    costs = wide.costs()
    assert 0 < costs.gram_flops < 2 * count
    assert 0 < costs.product_flops < 2 * count
    assert costs.n_bytes < N * OUTPUTS * count * 8
    dense = DensePiece(gaussian(N * OUTPUTS, 6), 0)
    assert dense.costs()[1:3] == dense.halved().costs()[1:3] == (12.0, 12.0)
    assert dense.costs().entry_flops == wide.costs().entry_flops == 0.0
    sums = SumPiece(gaussian(N, 7, 5), gaussian(N, OUTPUTS, 3, 7), 0, None)
    assert sums.costs().entry_flops == 2 * 7 * 15  # entries are computed from what is held, and summed over positions
    both = layout("layer and entries").rows()
    assert both.costs().gram_flops == sum(piece.costs().gram_flops for piece in both.pieces)
    assert both.costs().product_flops == sum(piece.costs().product_flops for piece in both.pieces)
    assert normal_flops(wide.factors(OUTPUTS)) < normal_flops(DensePiece(torch.zeros(3, count), 0).factors(OUTPUTS))


# --- half precision ---


def mixed_rows(dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows from very short to very long, with entries over many decades inside each."""
    lengths = torch.tensor([1e-30, 1e-12, 1e-3, 1.0, 255.9, 6e4, 1e12, 1e30], dtype=torch.float64)[:, None]
    spread = 10 ** (-3 * gaussian(8, 40, seed=1).abs())
    return (lengths * spread * gaussian(8, 40)).to(dtype)


def test_error_of_each_row_is_small_beside_its_own_length() -> None:
    matrix = mixed_rows()
    half = DensePiece(matrix, 0).halved()
    assert half.scale is not None
    assert half.matrix.dtype == torch.float16
    assert torch.isfinite(half.matrix).all()
    error = (entries(half, 40, 8) - matrix.double()).norm(dim=1)
    lengths = matrix.double().norm(dim=1)
    assert (error <= 2.0**-11 * lengths).all()  # eleven bits, rounded to nearest
    assert (error > 0).all()


def test_largest_entries_are_the_most_that_eleven_bits_can_be_wrong_by() -> None:
    for largest in (0.5, 0.999, 1.0, 1.9999, 65504.0, 3e38):
        matrix = torch.tensor([[largest, -largest, largest / 3]])
        error = entries(DensePiece(matrix, 0).halved(), 3, 1) - matrix.double()
        assert error.abs().max() <= 2.0**-11 * largest


def test_scales_are_powers_of_two_and_numbers_of_ten_bits_are_kept_exactly() -> None:
    matrix = mixed_rows()
    half = DensePiece(matrix, 0).halved()
    assert half.scale is not None
    assert torch.equal(torch.frexp(half.scale)[0], torch.full_like(half.scale, 0.5))
    once = entries(half, 40, 8)
    again = entries(DensePiece(once.float(), 0).halved(), 40, 8)
    assert torch.equal(once, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
def test_rows_of_zeros_stay_zero(dtype: torch.dtype) -> None:
    matrix = mixed_rows(dtype)
    matrix[::2] = 0
    half = DensePiece(matrix, 0).halved()
    assert half.scale is not None
    assert not entries(half, 40, 8)[::2].any()
    assert entries(half, 40, 8)[1::2].any(1).all()
    assert torch.isfinite(half.cross(half, torch.float64, 2**20)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
def test_products_of_two_halves_lose_nothing_but_the_rounding_of_the_sum(dtype: torch.dtype) -> None:
    matrix = gaussian(8, 40).float() * 10 ** torch.linspace(-6, 6, 8)[:, None]
    half = DensePiece(matrix, 0).halved()
    assert half.scale is not None
    exact = entries(half, 40, 8)
    lengths = exact.norm(dim=1)
    tile = half.take(slice(0, 5)).cross(half.take(slice(2, 8)), dtype, 2**20)
    assert tile.dtype == dtype
    error = (tile.double() - exact[:5] @ exact[2:].T).abs() / lengths[:5, None] / lengths[2:]
    assert error.max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("room", [1, 90, 2**25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
def test_halved_rows_multiply_like_their_entries(dtype: torch.dtype, room: int) -> None:
    """However many are widened at a time."""
    half = DensePiece(gaussian(8, 40).to(dtype), 5).halved()
    whole = entries(half, 50, 8)
    right, left = gaussian(3, 50, seed=1), gaussian(3, 8, seed=2)
    forward, back = torch.zeros(3, 8, dtype=dtype), torch.full((3, 50), 7.0, dtype=dtype)
    half.add_mv(right.to(dtype), forward)
    half.add_mv(right.to(dtype), forward)  # adds
    half.add_rmv(left.to(dtype), back)  # adds
    atol = 200 * torch.finfo(dtype).eps
    torch.testing.assert_close(forward.double(), 2 * right @ whole.T, rtol=0, atol=atol)
    torch.testing.assert_close(back[:, 5:45].double(), 7 + (left @ whole)[:, 5:45], rtol=0, atol=atol)
    assert (back[:, :5] == 7).all()
    assert (back[:, 45:] == 7).all()
    torch.testing.assert_close(half.cross(half, torch.float64, room), whole @ whole.T, rtol=0, atol=1e-5 * atol + 1e-12)


def test_halved_rows_take_half_the_bytes() -> None:
    dense = DensePiece(gaussian(8, 4000).float(), 0)
    whole, half = dense.costs().n_bytes, dense.halved().costs().n_bytes
    assert 0.5 * whole <= half <= 0.501 * whole
    outer = layout("weight and bias").pieces[0]
    assert outer.halved() is outer  # small already
