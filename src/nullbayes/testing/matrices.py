r"""Matrices with prescribed spectra, on which every projector is tested.

A projector onto the null space of :math:`A` can fail on rows that repeat, vanish or differ in length, on small singular
values, or if the null space is everything or nothing. `cases` has a small matrix for each of these, and says which
projectors are expected *not* to converge on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Case", "cases", "matrix_from_singular_values"]


@dataclass(frozen=True, slots=True, eq=False)  # tensors cannot be compared by ==, which returns a tensor
class Case:
    r"""A matrix, and what to expect of a projector onto its null space.

    Attributes
    ----------
    name : str
        Short and unique name, which serves as a test id.
    matrix : Tensor
        :math:`A` of shape (R, P), float64.
    block_rows : int
        Rows per block, for methods that sweep over blocks. The last block may be smaller.
    rank : int or None
        Rank at float64 precision; None if the singular values have no gap, so that the rank depends on the cutoff.
    note : str
        Why the case is there, in one sentence.
    stalls : frozenset of str
        Projectors that are expected not to reach :math:`\|A v\| \le 10^{-8} \|A \varepsilon\|` in 200 sweeps.

    Examples
    --------
    >>> case = cases()[0]
    >>> case.name, case.rank, case.matrix.shape
    ('full_rank', 60, torch.Size([60, 100]))
    """

    name: str
    matrix: Tensor
    block_rows: int
    rank: int | None
    note: str
    stalls: frozenset[str] = frozenset()


def matrix_from_singular_values(
    singular_values: Tensor | Sequence[float],
    n_rows: int,
    n_columns: int,
    generator: torch.Generator,
) -> Tensor:
    r"""Return a matrix :math:`A = U \,\mathrm{diag}(\sigma)\, V^\top` with random orthonormal columns in U and V.

    Parameters
    ----------
    singular_values : Tensor or sequence of float
        At most ``min(n_rows, n_columns)`` singular values; the others are zero.
    n_rows, n_columns : int
        Shape (R, P) of the matrix.
    generator : torch.Generator
        Random source of U and V, which are QR factors of Gaussian matrices.

    Returns
    -------
    Tensor
        The matrix (R, P), float64, on the device of the generator.

    Raises
    ------
    ValueError
        If there are too many singular values.

    Examples
    --------
    >>> matrix = matrix_from_singular_values([3.0, 2.0], 4, 5, torch.Generator().manual_seed(0))
    >>> torch.linalg.svdvals(matrix)[:2]
    tensor([3., 2.], dtype=torch.float64)
    """
    sigma = torch.as_tensor(singular_values, dtype=torch.float64, device=generator.device)
    if sigma.ndim != 1 or len(sigma) > min(n_rows, n_columns):
        most = min(n_rows, n_columns)
        message = (
            f"A matrix of shape ({n_rows}, {n_columns}) has at most {most} singular values, but "
            f"singular_values has shape {tuple(sigma.shape)}; pass fewer of them, in one dimension."
        )
        raise ValueError(message)
    left = _orthonormal_columns(n_rows, len(sigma), generator)
    right = _orthonormal_columns(n_columns, len(sigma), generator)
    return left * sigma @ right.T


def cases(device: torch.device | str = "cpu") -> tuple[Case, ...]:
    """Return all cases; the matrices are the same at every call and on every device.

    Parameters
    ----------
    device : torch.device or str
        Device of the matrices.

    Returns
    -------
    tuple of Case
        The cases.

    Examples
    --------
    >>> [case.name for case in cases() if "Krylov" in case.stalls]
    ['power_law']
    """
    return tuple(replace(case, matrix=case.matrix.to(device)) for case in _cases())


def _cases() -> tuple[Case, ...]:
    return (
        Case(
            name="full_rank",
            matrix=_well_conditioned(60, 100, seed=1),
            block_rows=16,
            rank=60,
            note="The ordinary case; its last block is smaller than the others.",
        ),
        _orthogonal_blocks(),
        _repeated_rows(),
        _zero_rows(),
        Case(
            name="all_zero",
            matrix=torch.zeros(20, 30, dtype=torch.float64, device="cpu"),
            block_rows=5,
            rank=0,
            note="Every vector is in the null space, and the relative residual is 0/0.",
        ),
        Case(
            name="single_row",
            matrix=_well_conditioned(1, 50, seed=5),
            block_rows=1,
            rank=1,
            note="The smallest number of rows.",
        ),
        Case(
            name="one_block",
            matrix=_well_conditioned(36, 80, seed=6),
            block_rows=36,
            rank=36,
            note="All rows in one block, so that a single sweep is exact.",
        ),
        Case(
            name="power_law",
            matrix=matrix_from_singular_values(_logspace(0, -8, 100), 100, 150, _seeded(7)),
            block_rows=20,
            rank=None,
            stalls=frozenset({"ExactDual", "ExactPrimal", "Alternating", "Krylov", "Lanczos", "Sketched"}),
            note="Eight decades without a gap, as in networks; a Gram matrix loses the smallest ones.",
        ),
        Case(
            name="step",
            matrix=matrix_from_singular_values([1.0] * 40 + [1e-4] * 40, 80, 120, _seeded(8)),
            block_rows=20,
            rank=80,
            stalls=frozenset({"Alternating"}),
            note="Two groups of equal singular values, four decades apart.",
        ),
        Case(
            name="more_rows_than_columns",
            matrix=_well_conditioned(120, 60, seed=9),
            block_rows=20,
            rank=60,
            note="Full column rank: the null space is {0} and the projection must vanish.",
        ),
        Case(
            name="tall_rank_deficient",
            matrix=matrix_from_singular_values(torch.linspace(1, 3, 50, device="cpu"), 120, 80, _seeded(10)),
            block_rows=20,
            rank=50,
            note="More rows than columns, and yet a null space of 30 dimensions.",
        ),
        _nearly_parallel_blocks(),
        _paper_rate_counterexample(),
        _rows_of_very_different_length(),
    )


def _orthogonal_blocks() -> Case:
    generator = _seeded(2)
    rows = _orthonormal_columns(100, 48, generator).T
    sigma = torch.linspace(1, 3, 12, device="cpu")
    mixing = [matrix_from_singular_values(sigma, 12, 12, generator) for _ in range(4)]
    return Case(
        name="orthogonal_blocks",
        matrix=torch.block_diag(*mixing) @ rows,
        block_rows=12,
        rank=48,
        note="Rows of different blocks are orthogonal, so that one sweep is exact.",
    )


def _repeated_rows() -> Case:
    distinct = torch.arange(20, device="cpu")
    index = torch.cat([distinct.repeat_interleave(2), distinct])
    return Case(
        name="repeated_rows",
        matrix=_well_conditioned(20, 80, seed=3)[index],
        block_rows=10,
        rank=20,
        note="Each row occurs twice in one block and once in another, as repeated examples do.",
    )


def _zero_rows() -> Case:
    matrix = _well_conditioned(50, 90, seed=4)
    matrix[::5] = 0
    matrix[20:30] = 0
    return Case(
        name="zero_rows",
        matrix=matrix,
        block_rows=10,
        rank=32,
        note="Zero rows in every block, and one block of zero rows only, as from loss gradients that vanish.",
    )


def _nearly_parallel_blocks() -> Case:
    basis = _orthonormal_columns(100, 50, _seeded(11)).T
    first, other = basis[:25], basis[25:]
    angles = _logspace(-3, -1, 25)[:, None]
    return Case(
        name="nearly_parallel_blocks",
        matrix=torch.cat([first, angles.cos() * first + angles.sin() * other]),
        block_rows=25,
        rank=50,
        stalls=frozenset({"Alternating"}),
        note="The row spaces of two blocks make angles from 0.001 to 0.1 rad: a sweep contracts by 1 - 1e-6.",
    )


def _paper_rate_counterexample() -> Case:
    n, delta = 20, 0.05
    matrix = torch.zeros(n, n + 10, dtype=torch.float64, device="cpu")  # 10 more columns: a null space
    matrix[:, :n].fill_diagonal_(1)
    matrix[-1, : n - 1] = (n - 1) ** -0.5
    matrix[-1, n - 1] = delta
    return Case(
        name="paper_rate_counterexample",
        matrix=matrix,
        block_rows=1,
        rank=n,
        stalls=frozenset({"Alternating"}),
        note="Rows nearly orthogonal in pairs, on which a sweep contracts by 1 / (1 + 0.05**2) only, against "
        "the rate of Lemma 4.1 of the paper.",
    )


def _rows_of_very_different_length() -> Case:
    matrix = _well_conditioned(60, 100, seed=13)
    exponent = -6 * torch.rand(60, 1, dtype=torch.float64, generator=_seeded(14), device="cpu")
    return Case(
        name="rows_of_very_different_length",
        matrix=10**exponent * matrix,
        block_rows=15,
        rank=60,
        note="Lengths over six decades, as loss gradients have; the null space does not depend on them.",
    )


def _well_conditioned(n_rows: int, n_columns: int, seed: int) -> Tensor:
    sigma = torch.linspace(1, 3, min(n_rows, n_columns), device="cpu")
    return matrix_from_singular_values(sigma, n_rows, n_columns, _seeded(seed))


def _orthonormal_columns(n_rows: int, n_columns: int, generator: torch.Generator) -> Tensor:
    gaussian = torch.randn(n_rows, n_columns, dtype=torch.float64, generator=generator, device=generator.device)
    q: Tensor = torch.linalg.qr(gaussian).Q
    return q


def _logspace(start: float, end: float, steps: int) -> Tensor:
    return torch.logspace(start, end, steps, dtype=torch.float64, device="cpu")


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
