"""What a fit remembers of the training data: features of some examples, rows of a table, and a checksum of each input.

Features of a network that saturates can be those of familiar inputs for any absurd input. Where inputs are rows of a
table, these examples themselves are remembered as well. A few small inputs are remembered with the network's outputs,
so that a file can tell whether a network with the same parameters is the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nullbayes.decisions.appearance import looks, unlike
from nullbayes.errors import DataError
from nullbayes.jacobian.batches import input_checksums, single_checksums, table_rows, with_leaves
from nullbayes.linalg.spectral import eigh

NEIGHBOURS = (1, 10, 50)
_SHARE = 20  # neighbours are among the nearest one of so many remembered examples
_MOST_DIRECTIONS = 2048  # examples from which the principal directions of wider features are found
_AT_ONCE = 1024  # inputs whose distances are in memory at a time
_ROUNDING = 1e-7  # of a squared distance in float32


@dataclass(frozen=True)
class Probe:
    """A few training inputs with the outputs of the network, which tell its function.

    Attributes
    ----------
    inputs : mapping of str to Tensor (n, ...)
        The tensors of the inputs on the CPU, by their places as JSON: names in mappings, numbers in tuples.
    outputs : Tensor (n, k)
        Some of the outputs, on the CPU.
    """

    inputs: Mapping[str, Tensor]
    outputs: Tensor


@dataclass(frozen=True)
class Familiar:
    """What is remembered of the training data.

    Attributes
    ----------
    layer : str
        The name of the layer whose inputs are the features.
    features : Tensor (n, d)
        The features of some examples, evenly spaced over all, each scaled to length one.
    sums : Tensor (N,)
        The checksum of every training input, on the CPU.
    table : tuple of Tensor (n, ...)
        The tensors of these examples, numbers and categories, if the inputs are rows of a table; else empty.
    tuned : Tensor (T,) or None
        The checksums of the inputs that have chosen precision or temperature since, on the CPU.
    probe : Probe or None
        A few inputs with their outputs; None if they are large, or hold other things than tensors.
    exact : bool
        Whether checksums are of inputs as they are, because single precision does not tell one from another.
    looks : Tensor (2, k) or None
        What the numbers of these examples look like, in float64; None for rows of a table, and where all are tokens.
    """

    layer: str
    features: Tensor
    sums: Tensor
    table: tuple[Tensor, ...] = ()
    tuned: Tensor | None = None
    probe: Probe | None = None
    exact: bool = False
    looks: Tensor | None = None

    @cached_property
    def rows(self) -> Tensor | None:  # (n, p)
        """The numbers of the remembered rows; None where inputs are no rows of a table."""
        return table_rows(self.table) if self.table else None

    def inputs(self, like: Any, most: int) -> Any:
        """Return the remembered rows, at most so many and evenly spaced, as inputs of the same form as others."""
        step = -(-len(self.features) // most)
        return with_leaves(like, (tensor[::step] for tensor in self.table))

    def row_distances(self, x: Any) -> Tensor:  # (n,)
        """Return the logarithm of the distance to the nearest remembered row, in standard deviations per column."""
        known, new = self.rows, table_rows(x)
        assert known is not None
        if new is None or new.shape[1] != known.shape[1]:
            msg = "The inputs are no rows of the table that the network was trained on."
            raise DataError(msg)
        known, new = known.double(), new.double()
        spread = known.std(0, unbiased=False)
        spread = torch.where(spread > 0, spread, torch.ones_like(spread))
        parts = [torch.cdist(some, known / spread).amin(1) for some in (new / spread).split(_AT_ONCE)]
        nearest: Tensor = torch.cat(parts) / known.shape[1] ** 0.5
        return nearest.clamp_min(_ROUNDING).log()

    def unlike(self, x: Any) -> Tensor:  # (n,)
        """Return how far inputs look unlike those of the training data, in standard deviations."""
        found = looks(x)
        if self.looks is None or found is None or found.shape[1:] != self.looks.shape[1:]:
            msg = (
                "The inputs have other types than in training, such as whole numbers in place of floating-point ones: "
                "convert them to those types."
            )
            raise DataError(msg)
        return unlike(self.looks, found)

    def distances(self, features: Tensor) -> Tensor:  # (n, d) -> (n, k)
        """Return the logarithm of the distance to the 1st, 10th and 50th nearest remembered example.

        Features are scaled to length one before (Sun et al. 2022). Of few examples, neighbours are among the nearest
        twentieth: the 50th of 300 would be of another class, as far from familiar inputs as from strange ones.
        """
        ranks = [min(k, max(1, len(self.features) // _SHARE)) for k in NEIGHBOURS]
        found = []
        for some in normalize(features.to(self.features)).split(_AT_ONCE):
            near = (some @ self.features.T).topk(max(ranks)).values
            found.append(2.0 - 2.0 * near[:, [rank - 1 for rank in ranks]].double())
        return torch.cat(found).clamp_min(_ROUNDING).log() / 2.0

    def residual(self, features: Tensor) -> Tensor:  # (n, d) -> (n,)
        """Return the logarithm of the distance of the features to the principal directions of the remembered ones.

        Features are scaled to length one before. Of all directions in which the remembered features vary, the half in
        which they vary most counts as principal (Wang et al. 2022).
        """
        mean, leading = self._principal
        centred = normalize(features.to(self.features)) - mean
        squares = centred.square().sum(1) - (centred @ leading).square().sum(1)
        return squares.double().clamp_min(_ROUNDING).log() / 2.0

    @cached_property
    def _principal(self) -> tuple[Tensor, Tensor]:  # (d,), (d, k)
        """The mean of the remembered features, and their principal directions, found in float64."""
        step = -(-len(self.features) // _MOST_DIRECTIONS) if self.features.shape[1] > _MOST_DIRECTIONS else 1
        known = self.features[::step].double()
        mean = known.mean(0)
        centred = known - mean
        few = len(centred) < centred.shape[1]  # then the matrix of the examples is the smaller one
        values, vectors = eigh(centred @ centred.T if few else centred.T @ centred)
        rank = int((values > _ROUNDING * values[-1].clamp_min(_ROUNDING)).sum())
        leading = vectors[:, len(values) - rank // 2 :]
        leading = normalize(centred.T @ leading, dim=0) if few else leading
        return mean.to(self.features), leading.to(self.features)

    @property
    def repeated(self) -> float:
        """The share of training inputs that occur more than once.

        About as many new inputs are equal to a training input by chance (Good 1953): none for photographs, many for a
        table of a few categories.
        """
        return repeated_share(self.sums)

    def checksums(self, x: Any, n: int) -> Tensor:  # (n,)
        """Return the checksums of ``n`` inputs, in the precision in which training inputs are known."""
        return (input_checksums if self.exact else single_checksums)(x, n)

    def seen_in(self, sums: Tensor) -> Tensor:  # (n,) -> bool (n,)
        """Return which inputs, given by their checksums, were training inputs."""
        return torch.isin(sums, self.sums)


def repeated_share(sums: Tensor) -> float:  # (n,)
    """Return the share of inputs, given by their checksums, that occur more than once."""
    counts = sums.unique(return_counts=True)[1]
    return 1.0 - float((counts == 1).sum()) / len(sums)
