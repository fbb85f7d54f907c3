r"""Variances at new inputs: exactly, without sampling, and relative to those of noise that is not projected.

A sample is :math:`v = T \varepsilon`, so the variance of the output with the row :math:`w` is :math:`\|T^\top w\|^2`.
A direct projector has one map :math:`T`. An iterative one stops when the noise has reached the tolerance, which rows of
:math:`J(x)` reach much earlier; they are therefore taken through as many sweeps as the samples were. The steps of
conjugate gradients depend on the noise: those of a sample, taken by other vectors, can grow without bound, and their
mean over samples says nothing of the samples. There :math:`w = u + (w - u)`, with :math:`u` the result of thrice as
many steps of its own. The first part lies in the null space, and its variance is :math:`\|u\|^2`. The second lies in
the row space, of which samples have what the tolerance leaves, and its variance is measured on them.

The variance is large for two reasons: because the Jacobian of an input is large, and because its direction is new. The
relative variance :math:`\operatorname{tr} J P J^\top / \operatorname{tr} J J^\top` divides the size out. It needs
neither precision nor temperature.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import SettingsError
from nullbayes.jacobian.batches import BatchFn, is_array, n_examples, take_examples
from nullbayes.jacobian.products import linearized, output_rows
from nullbayes.posteriors.arguments import normal
from nullbayes.posteriors.measured import Measured
from nullbayes.posteriors.plan import Prepared, described
from nullbayes.posteriors.scoring import Scoring
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask, Masks, default_score, joined, pooled, stream
from nullbayes.projectors import Outcome

_REPLAYED = 30  # samples whose sweeps are counted
_LONGER = 3  # times the sweeps of the samples: what is left of a row is then little beside what is left of them
_VECTORS = 10  # held in memory for each row that is projected
RELATIVE = "relative_variance"


def scoring(self: Any) -> Scoring:
    """The scores of a posterior in a null space."""
    return Scoring(default_score(self._likelihood), own={RELATIVE: partial(relative_variance, self)})


@full_precision()
def relative_variance(self: Any, x: Any, per: str, mask: Mask) -> Tensor:  # (N,) or (N, ...) in [0, 1]
    """Return the variance of the projected noise over that of the same noise before its projection."""
    with self._network.group.together():
        return _relative_variance(self, x, per, mask)


def _relative_variance(self: Any, x: Any, per: str, mask: Mask) -> Tensor:
    if self._base is not None:
        msg = f'"{RELATIVE}" is known for noise N(0, I) only, not for a base distribution: use "max_variance".'
        raise SettingsError(msg)
    network, likelihood, n = self._network, self._likelihood, self.n_samples
    network.check_unchanged()
    noise = normal(network, self._need_measured().seed, 0, n).to(self.directions)
    both = torch.cat([self.directions, noise])
    together = is_array(mask) or per != "input"  # else lengths may differ
    parts, masks = [], Masks(likelihood, mask)
    for piece in stream(x, network, self._batch_fn, len(both)):
        outputs, changes = linearized(network, piece, both)
        masks = masks if together else Masks(likelihood, mask)
        masks.look(piece, outputs)
        units = likelihood.noise_variance(outputs)
        squares = changes.square() if units is None else changes.square() / units
        after, before = (likelihood.at_positions(part.mean(0), largest=False) for part in (squares[:n], squares[n:]))
        ratio = (after / before.clamp_min(torch.finfo(before.dtype).tiny)).clamp_max(1.0)
        parts.append(ratio if together else pooled(ratio, masks.joined(outputs)))
    found = joined(parts)
    if not together:
        return found
    whole = masks.joined(outputs.new_zeros(len(found), *outputs.shape[1:]))
    return pooled(found, whole, per)


@full_precision()
def functional_variance(self: Any, x: Any, *, exact: bool = False) -> Tensor:
    """Return the variance of the linearized outputs.

    Parameters
    ----------
    x : as for :meth:`predict`
        The inputs.
    exact : bool
        Compute the variance without Monte Carlo error, by one projection per output of each input. It needs the rows
        of the fit (see :meth:`prepare`), and noise N(0, I). What the tolerance of an iterative projector leaves in the
        samples is added, as measured on them.

    Returns
    -------
    Tensor (N, ...)
        One variance per output, at the prior precision in use.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> posterior.functional_variance(x, exact=True).flatten()
    tensor([0., 0., 1., 1.])
    """
    if not exact:
        estimated: Tensor = self.predict(x).variance
        return estimated
    prepared = self._need_prepared()
    if self._base is not None:
        msg = "The exact variance is known for the base distribution N(0, I) only: use exact=False."
        raise SettingsError(msg)
    if self._exact is None:
        self._exact = ExactVariances(prepared, self._need_measured(), self.directions)
    with self._network.group.together():
        found: Tensor = self._network.as_returned(self._exact(x, self._batch_fn) / self.prior_precision)
    return found


class ExactVariances:
    """Variances of linearized outputs without Monte Carlo error, at a prior precision of 1.

    There are as many sweeps as the samples took. Where ``prepared`` has another projector than the one that drew them,
    it projects some of them again to see how many it takes; of samples that did not converge, it is the sweep after
    which they were stopped, by a projector of the same class.
    """

    def __init__(self, prepared: Prepared, measured: Measured, directions: Tensor) -> None:
        self.directions = directions  # (S, P) of the samples
        self.network = prepared.jacobian.network
        self.projector, self.state = prepared.plan.projector, prepared.state
        few = min(_REPLAYED, len(measured.residual))
        division = self.network.division
        longest = self.network.n_parameters if division is None else max(division.sizes)
        row_bytes = longest * self.network.dtype.itemsize
        self.at_once = max(few, prepared.jacobian.working_bytes // (_VECTORS * row_bytes))
        stopped = not measured.converged and measured.projector == type(self.projector).__name__
        known = stopped or measured.settings == described(self.projector)
        sweeps = list(measured.sweeps_per_sample[:few]) if known else self._sweeps(measured.seed, few)
        self.shares = [(count, sweeps.count(count) / few) for count in dict.fromkeys(sweeps)]

    def _sweeps(self, seed: int, few: int) -> list[int]:
        """Return how many sweeps each of some samples takes."""
        info = self.projector.apply(self.state, normal(self.network, seed, 0, few)).info
        if info.outcome is Outcome.INTERRUPTED:
            raise KeyboardInterrupt  # fewer sweeps are another map
        taken: list[int] = info.sweeps_per_sample.tolist()
        return taken

    def __call__(self, x: Any, batch_fn: BatchFn | None) -> Tensor:  # (N, ...)
        """Return the variance of each output, for inputs or a loader of them."""
        parts = []
        for piece in stream(x, self.network, batch_fn, n_samples=256):
            step = max(1, self.at_once // math.prod(self.network.output_shape(piece)))
            for start in range(0, n_examples(piece), step):
                parts.append(self._squares(output_rows(self.network, take_examples(piece, start, start + step))))
        return torch.cat(parts)

    def _squares(self, rows: Tensor) -> Tensor:  # (n, ..., P) -> (n, ...)
        parts = []
        for some in rows.flatten(0, -2).split(self.at_once):
            parts.append(torch.stack([share * self._along(some, count) for count, share in self.shares]).sum(0))
        return torch.cat(parts).view(rows.shape[:-1])

    def _along(self, rows: Tensor, sweeps: int) -> Tensor:  # (m, P) -> (m,)
        """Return the variance along each row of samples that took so many sweeps."""
        adapts, total = self.projector.adapts, self.network.group.sum
        inside = self.projector.apply_transposed(self.state, rows, _LONGER * sweeps if adapts else sweeps)
        variance = total(inside.square().sum(1))
        if adapts:
            variance += total((rows - inside) @ self.directions.T).square().mean(1)
        return variance
