"""A posterior on data with targets: how far its predictions moved from the network's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nullbayes.errors import DataError
from nullbayes.jacobian.batches import BatchFn, check_columns, take_examples, to_device
from nullbayes.jacobian.data import check_batch
from nullbayes.jacobian.loaders import as_loader, batch_fn_for, numbered
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.products import centred, linearized
from nullbayes.likelihoods import Likelihood
from nullbayes.posteriors.measured import worst_ratio
from nullbayes.precision import full_precision
from nullbayes.predictive import default_link, joined, nll, summarize

AT_ONCE = 1024  # examples
CHUNK = 8192  # examples times samples in memory at a time


@dataclass(frozen=True)
class FitCheck:
    """How far a posterior's predictions moved from the network's own on some data.

    Attributes
    ----------
    n_data : int
        Examples checked.
    mean_shift, max_shift : float
        Root mean square and largest distance of the mean outputs from the network's, in units of the outputs. They are
        zero up to rounding for linearized predictions, whose mean is the network's output.
    std : float
        Root mean square standard deviation of the outputs.
    output_std : float
        The spread of the network's own outputs, to compare these with.
    worst_ratio : float or None
        The largest ratio of the standard deviation of an output to its spread, for several outputs with units of
        their own.
    nll_model, nll_posterior : float
        Negative log-likelihood per target, of the network and of the posterior's prediction, both at the posterior's
        temperature.
    accuracy_model, accuracy_posterior : float or None
        Share of right classes (or right labels); None for likelihoods without classes.
    temperature : float
        Of the posterior.
    nll_untempered : float
        Negative log-likelihood per target of the network as it is, at temperature 1. A temperature that held-out data
        chose takes back what a network is too sure of on its training data, so that ``nll_model`` is larger there by
        design; a posterior keeps its promise if it is as good as ``nll_model``.

    Examples
    --------
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 2, bias=False), torch.eye(4), torch.tensor([0, 1, 0, 1])
    >>> posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:2], y[:2])
    >>> check = posterior.check_fit(x, y)
    >>> check.std > 0.1, abs(check.mean_shift) < 1e-6, check.accuracy_model == check.accuracy_posterior
    (True, True, True)
    """

    n_data: int
    mean_shift: float
    max_shift: float
    std: float
    output_std: float
    worst_ratio: float | None
    nll_model: float
    nll_posterior: float
    accuracy_model: float | None
    accuracy_posterior: float | None
    temperature: float
    nll_untempered: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Lay the check out as a table."""
        lines = [
            f"{self.n_data:,} examples; outputs spread by {self.output_std:.3g}",
            f"mean outputs moved by {self.mean_shift:.2g} (at most {self.max_shift:.2g}), "
            f"standard deviation {self.std:.2g}",
            "",
            f"{'':<28} {'nll':>9}" + ("" if self.accuracy_model is None else "  accuracy"),
            *(
                f"{name:<28} {nll:9.4f}" + ("" if share is None else f"  {share:8.4f}")
                for name, nll, share in self.rows()
            ),
        ]
        return "\n".join([*lines, *([] if self.temperature == 1.0 else ["", self.why()])])

    def rows(self) -> list[tuple[str, float, float | None]]:
        """Return what is compared, with its negative log-likelihood per target and its accuracy.

        These are the network, the network at the posterior's temperature if that is not 1, and the posterior.
        """
        tempered = (f"network at temperature {self.temperature:.3g}", self.nll_model, self.accuracy_model)
        return [
            ("network", self.nll_untempered, self.accuracy_model),
            *([] if self.temperature == 1.0 else [tempered]),
            ("posterior", self.nll_posterior, self.accuracy_posterior),
        ]

    def why(self) -> str:
        """Say which network the posterior is compared with, and why."""
        if self.temperature == 1.0:
            return "The posterior is compared with the network."
        return (
            f"The posterior predicts at a temperature of {self.temperature:.3g}, so it is compared with the network at "
            "the same temperature: one that suits new data is not the best one for training data."
        )


def pieces(
    network: Network, batch_fn: BatchFn | None, data: Any, size: int = AT_ONCE
) -> Iterator[tuple[Any, Tensor]]:  # inputs and targets
    """Iterate once over inputs and targets, in any order, on the network's device, ``size`` examples at a time."""
    network.check_unchanged()
    with torch.random.fork_rng(devices=()):  # a DataLoader draws a seed
        iterator = iter(loader := as_loader(data))
    batch_fn, empty = batch_fn_for(loader, batch_fn), True
    for number, batch in enumerate(iterator):
        if batch_fn is None:
            check_columns(batch, network.input_signature)
        x, y = numbered(number, batch, batch_fn, network.dtype)
        check_batch(number, x, y)
        network.check_form(x)
        empty = False
        for start in range(0, len(y), size):
            piece = take_examples(x, start, start + size), y[start : start + size]
            moved: tuple[Any, Tensor] = to_device(piece, network.device)
            yield moved
    if empty:
        msg = "The loader is empty: it yields no batch."
        raise DataError(msg)


def evaluate(
    network: Network, likelihood: Likelihood, parts: Iterable[tuple[Any, Tensor]], directions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the network's outputs (N, ...), the centred changes by directions (S, N, ...), and the targets."""
    outputs, changes, targets = [], [], []
    with network.group.together():
        for x, y in parts:
            own, change = linearized(network, x, directions)
            likelihood.check(own, y)
            outputs.append(own)
            changes.append(centred(change))
            targets.append(y)
    return joined(outputs), torch.cat(changes, dim=1), torch.cat(targets)


@full_precision()
def check_fit(self: Any, loader: Any, targets: Any = None) -> FitCheck:
    """Measure how far predictions, their likelihood and accuracy moved from the network's own on some data.

    Parameters
    ----------
    loader, targets : iterable of batches, or inputs and targets
        The data, in any order: ``check_fit(loader)`` or ``check_fit(x, y)``.

    Returns
    -------
    FitCheck
        The distances, at the prior precision in use.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> check = posterior.check_fit(x[:2], y[:2])
    >>> abs(check.nll_posterior - check.nll_model) < 1e-3
    True
    """
    outputs, changes, labels = self._evaluate(loader if targets is None else (loader, targets))
    return _compared(
        self._likelihood, outputs, changes / self.prior_precision**0.5, labels, default_link(self._pred_type)
    )


def _compared(
    likelihood: Likelihood, outputs: Tensor, changes: Tensor, targets: Tensor, link: str
) -> FitCheck:  # (N, ...), (S, N, ...)
    """Compare the predictions of samples, given by their changes of the outputs, with the network's own."""
    counted = counted_outputs(likelihood, outputs, targets)
    shift = changes.mean(0)[counted]
    mean, changes = outputs + changes.mean(0), centred(changes)
    found, ratio = None, None
    if likelihood.has_probabilities:
        found = summarize(mean, changes, likelihood, link).probs
    if outputs.ndim == 2 and outputs.shape[1] > 1 and likelihood.independent_outputs:
        ratio = worst_ratio(changes.var(0).mean(0).sqrt(), outputs.std(0, unbiased=False))
    own = None if found is None else likelihood.accuracy(likelihood.probabilities(outputs), targets)
    return FitCheck(
        n_data=len(outputs),
        mean_shift=float(shift.square().mean().sqrt()),
        max_shift=float(shift.abs().max()),
        std=float(changes.var(0)[counted].mean().sqrt()),
        output_std=likelihood.spread(outputs, targets),
        worst_ratio=ratio,
        nll_model=nll(likelihood, outputs, None, targets),
        nll_posterior=nll(likelihood, mean, changes, targets, link),
        accuracy_model=own,
        accuracy_posterior=None if found is None else likelihood.accuracy(found, targets),
        temperature=likelihood.temperature,
        nll_untempered=nll(
            likelihood if likelihood.temperature == 1.0 else likelihood.tempered(1.0), outputs, None, targets
        ),
    )


def counted_outputs(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:  # bool (N, ...)
    """Return which outputs the targets speak of; refuse targets of which every one is ignored."""
    counted = likelihood.counted(outputs, targets)
    counted = torch.ones_like(outputs, dtype=torch.bool) if counted is None else counted
    if not bool(counted.any()):
        msg = "Every target is one to be ignored (ignore_index): there is nothing to compare predictions with."
        raise DataError(msg)
    return counted
