r"""GradPCA: gradients outside of the principal directions of their class means (Seleznova et al. 2026).

The gradient :math:`g(x)` of the logits in the parameters has low rank on the training data: those of a class nearly
coincide. The principal directions of the class means :math:`g_1, \ldots, g_C` around their mean :math:`\bar g` come
from a matrix of :math:`C \times C` inner products, and the score is the share of :math:`\|g(x) - \bar g\|^2` that lies
outside of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from nullbayes.baselines.base import Baseline
from nullbayes.baselines.map_estimate import NetworkItself
from nullbayes.baselines.method import FitContext, Learned, LikelihoodLike, Options, Question
from nullbayes.detectors.features import check_classes, check_fraction, classes_of, counting, fitting, groups
from nullbayes.errors import DataError, SettingsError
from nullbayes.jacobian.network import Network
from nullbayes.linalg.spectral import eigh, relative_cutoff
from nullbayes.precision import full_precision

OUTPUTS = ("sum", "max")
_AT_ONCE = 1024  # examples


@dataclass(frozen=True)
class _Subspace:
    """An orthonormal basis (k, P) of principal directions, and the mean (P,) that they start from."""

    basis: Tensor
    mean: Tensor


@dataclass(frozen=True)
class _ClassGradients(NetworkItself):
    share: float = 0.99
    output: str = "sum"

    own_score = "gradpca"

    def __post_init__(self) -> None:
        check_fraction("share", self.share)
        if self.output not in OUTPUTS:
            msg = f"output must be one of {', '.join(OUTPUTS)}, not {self.output!r}."
            raise SettingsError(msg)

    @full_precision()
    def fit(self, context: FitContext) -> Learned[_Subspace]:
        """Find the principal directions of the mean gradients of the classes that occur."""
        network, rows = context.network, context.rows
        check_classes(context.name, rows.likelihood, network.output_shape(rows.examples.read(0, 1)[0]))
        index, weights, n_classes = self._weights(context)
        needed = 3 * n_classes * network.n_parameters * network.dtype.itemsize
        if needed > context.available:
            msg = (
                f"{context.name} holds a gradient per class, which takes {needed / 2**20:,.1f} MiB, more than the "
                f"memory limit of {context.available / 2**20:,.1f} MiB: name fewer parameters, such as those of the "
                "last block, with parameters=..., or raise memory_limit."
            )
            raise SettingsError(msg)
        means = network.theta.new_zeros(n_classes, network.n_parameters)
        for where, block in rows.blocks(rows.rows_per_pass):
            some = slice(where.start // rows.rows_per_example, where.stop // rows.rows_per_example)
            present, places = index[some].unique(return_inverse=True)
            spread = weights.new_zeros(len(present), len(places), weights.shape[1])
            spread[places, torch.arange(len(places), device=places.device)] = weights[some]
            means[present] += block.rmv(spread.flatten(1))
        mean = means.mean(0)
        basis = _principal(means - mean, self.share)
        return Learned(_Subspace(basis, mean), None, f"{len(basis)} directions of the gradients of {n_classes} classes")

    def _weights(self, context: FitContext) -> tuple[Tensor, Tensor, int]:
        """Return the place of each example's class, its share of each output in the class mean, and how many classes.

        Examples that are ignored have no share.
        """
        examples, likelihood = context.rows.examples, context.rows.likelihood
        classes, chosen, kept = [], [], []
        for start, stop in examples.ranges(_AT_ONCE):
            x, y = examples.read(start, stop)
            outputs = context.network.outputs(x)
            chosen.append(self._chosen(outputs))
            kept.append(counting(likelihood, outputs, y))
            classes.append(classes_of(y))
        keep, index = torch.cat(kept), torch.zeros_like(torch.cat(classes))
        index[keep], counts = groups(torch.cat(classes)[keep])
        if len(counts) < 2:
            msg = "The training data have one class only: the directions between class means need two at least."
            raise DataError(msg)
        weights = torch.cat(chosen)
        shares = keep.to(weights.dtype) / counts[index]
        return index, weights * shares[:, None], len(counts)

    def _chosen(self, outputs: Tensor) -> Tensor:  # (n, C)
        """Return which logits are differentiated: all of them, or the largest one."""
        if self.output == "sum":
            return torch.ones_like(outputs)
        return torch.zeros_like(outputs).scatter(1, outputs.argmax(1, keepdim=True), 1.0)

    def score_rows(self, state: _Subspace, rows: Tensor, question: Question) -> Tensor:  # (n, C, P) -> (n,)
        """Return the share of the squared gradient that is outside of the principal directions."""
        chosen = self._chosen(question.network.outputs(question.x))
        apart = (chosen[:, :, None] * rows).sum(1) - state.mean
        outside = apart - apart @ state.basis.T @ state.basis
        return outside.square().sum(1) / apart.square().sum(1).clamp_min(torch.finfo(apart.dtype).tiny)

    def tensors(self, state: _Subspace) -> dict[str, Tensor]:
        """Return the directions and the mean."""
        return {"basis": state.basis, "mean": state.mean}

    def restored(self, tensors: Mapping[str, Tensor], network: Network, seed: int) -> _Subspace:
        """Return the subspace from a file's tensors."""
        found = fitting(tensors, {"basis": "kp", "mean": "p"}, {"p": network.n_parameters})
        return _Subspace(found["basis"], found["mean"])


def _principal(centred: Tensor, share: float) -> Tensor:  # (C, P) -> (k, P)
    """Return the fewest principal directions of vectors that hold so large a share of their squares."""
    values, vectors = eigh((centred @ centred.T).double())
    values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)
    if not float(values[0]) > 0.0:
        msg = "The mean gradients of all classes are the same: there are no directions between them."
        raise DataError(msg)
    held = values.cumsum(0) / values.sum()
    most = int((values > values[0] * relative_cutoff(len(values), centred.dtype)).sum())
    k = min(int((held < share).sum()) + 1, most)
    directions = vectors[:, :k].T.to(centred.dtype) @ centred
    basis: Tensor = torch.linalg.qr(directions.T).Q.T.contiguous()
    return basis


class GradPCA(Baseline):
    r"""The part of an input's gradient outside of the principal directions of the class means (Seleznova et al. 2026).

    The gradient is that of the sum of all logits in the parameters that vary, as in the code of the authors, or that of
    the largest logit. It costs as much as the rows of all logits of an input, and a gradient per class is held in
    memory: for a large network, name the parameters of its last block with ``parameters=...``.

    Parameters
    ----------
    model, likelihood : nn.Module, str
        The trained network, and what its outputs mean: "classification", with outputs (n, C).
    share : float
        How much of the variance of the class means the principal directions hold.
    output : "sum" or "max"
        What is differentiated: the sum of the logits, or the largest logit.
    parameters : None, str, iterable of str, or callable
        Which parameters the gradients are of, by name; all by default.
    batch_fn, output_fn : optional
        Functions that read batches and outputs. See :class:`Baseline <nullbayes.baselines.Baseline>` for details.
    prior_precision : float
        Leave it out: there is no prior.

    Notes
    -----
    The score is :math:`1 - \|U^\top (g(x) - \bar g)\|^2 / \|g(x) - \bar g\|^2`, where the orthonormal columns of
    :math:`U` are the principal directions and :math:`\bar g` is the mean of the class means, each of which counts the
    same. With the parameters of the last linear layer alone and ``output="sum"``, it depends on the features only.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(2, 2), torch.tensor([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [1.0, 1.0]])
    >>> nb.detectors.GradPCA(model).fit(x[:2], torch.tensor([0, 1])).ood_score(x).round(decimals=4)
    tensor([0.0000, 0.0000, 0.0000, 0.5000])
    """

    _method = _ClassGradients()

    def __init__(
        self,
        model: nn.Module,
        likelihood: LikelihoodLike = "classification",
        *,
        share: float = 0.99,
        output: str = "sum",
        **options: Unpack[Options],
    ) -> None:
        super().__init__(model, likelihood, **options)
        self._method = _ClassGradients(share, output)
