"""Methods of a posterior that decide: calibrate, p_value, is_ood, predict_set, predict_interval.

The functions with an argument ``self`` are methods of :class:`SamplePosterior`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from nullbayes.decisions import answers, statistics
from nullbayes.decisions.calibration import Calibration
from nullbayes.decisions.compared import best_position_kind, made_strangers, trained_statistics
from nullbayes.decisions.conformal import beyond_rounding, check_alpha, p_values, quantile
from nullbayes.decisions.held_out import COMBINED as COMBINED
from nullbayes.decisions.held_out import pieces, position_kinds, read
from nullbayes.decisions.posterior import Posterior, need_familiar
from nullbayes.decisions.weights import learn_weights
from nullbayes.errors import NotFittedError, SettingsError
from nullbayes.jacobian.batches import is_array
from nullbayes.precision import full_precision
from nullbayes.predictive import Mask, Prediction, check_per, warn_of_padding

P = TypeVar("P", bound=Posterior)


@full_precision()
def calibrate(self: P, loader: Any, targets: Any = None, *, kind: str | None = None, mask: Mask = None) -> P:
    """Learn from held-out data which inputs are strange, and how far predictions are from their targets.

    Afterwards ``ood_score`` without a kind is the calibrated score, and :meth:`p_value`, :meth:`is_ood`,
    :meth:`predict_set` and :meth:`predict_interval` can be used.

    Parameters
    ----------
    loader, targets : iterable of batches, or inputs and targets
        Data that the network was not trained on, like those that it will see, in any order. A thousand examples are
        plenty; 40 are the least. Inputs alone, a tensor, an array, a mapping or a loader of these, are enough for
        :meth:`p_value` and :meth:`is_ood`.
    kind : str, optional
        The score to calibrate, such as "mutual_information". By default it is "combined", and the own score of methods
        that have one.
    mask : callable or "all", optional
        As for :meth:`predict`, without arrays.

    Returns
    -------
    ProjectedPosterior
        The posterior itself; ``posterior.calibration`` says what was found.

    Raises
    ------
    DataError
        If there are too few examples, or if more than one in a hundred of them are training data.

    Notes
    -----
    Guarantees hold for inputs that are drawn like the held-out data. Data that have chosen the network, such as those
    of early stopping, are not quite new to it, so others are better.

    One half of the data, at most 1,000 examples, is used to learn the combined score: it tells these examples from
    artificial strangers made of them, by a sum of standardized statistics (generalized entropy and energy, distances to
    the features of training examples and to their principal directions, logarithm of the posterior's variance) with
    weights that are not negative. The other examples are ranked by that score, and the rank of a new input among them
    is its p-value. Label sets and intervals do not depend on the weights, so all examples count for them.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.randn(500, 4, generator=generator)
    >>> y = x[:, :3].argmax(1)
    >>> model = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.eye(4)[:, :3]})
    >>> posterior = nb.baselines.DiagonalLaplace(model).fit(x[:100], y[:100])
    >>> posterior = posterior.calibrate(x[100:], y[100:])
    >>> new = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 90.0]])
    >>> posterior.is_ood(new, alpha=0.05)
    tensor([False,  True])
    >>> posterior.predict_set(new[:1], alpha=0.1).shape
    torch.Size([1, 3])
    """
    self._check_fitted()
    kind = self._scoring.calibrated if kind is None else kind
    if is_array(mask):
        msg = (
            'For calibrate, mask is a function of the inputs, mask=lambda inputs: ..., or "all": held-out data may '
            "come in any order."
        )
        raise SettingsError(msg)
    if kind == COMBINED:
        need_familiar(self)
    self._calibration = _learned(self, loader, targets, kind, mask)  # data that are refused leave the old one
    return self


def _learned(posterior: Posterior, loader: Any, targets: Any, kind: str, mask: Mask) -> Calibration:
    """Return what held-out data say about the scores and the errors of a posterior."""
    held = read(posterior, pieces(posterior, loader, targets), kind, mask)
    learned, ranked = held.split(learns=kind == COMBINED)
    combine, scores = None, held.columns[:, 0]
    kinds: tuple[str, ...] = ()
    if kind == COMBINED:
        made = made_strangers(posterior, held.pool, mask)
        trained = trained_statistics(posterior, held.pool, mask)
        unweighed = [i for i, name in enumerate(statistics.names(posterior)) if name == statistics.LOOKS]
        combine, kinds = learn_weights(held.columns[learned], made, trained, unweighed), tuple(made)
        scores = combine(held.columns)
    positions, by_position, column = position_kinds(posterior, kind), "", 0
    if held.position_scores is not None:
        by_position = best_position_kind(posterior, held.pool, mask, positions)
        column = positions.index(by_position)
    return Calibration(
        kind=kind,
        statistics=statistics.names(posterior) if kind == COMBINED else (),
        combine=combine,
        strangers=kinds,
        n_learned=len(learned),
        scores=scores[ranked].sort().values,
        errors=_numbers(held.errors, slice(None)),  # of all: they do not depend on the weights
        position_kind=by_position,
        position_scores=None if held.position_scores is None else _numbers(held.position_scores[:, column], ranked),
        mask=_kind_of(mask),
        prior_precision=posterior.prior_precision,
        temperature=posterior.temperature,
        n_samples=posterior.n_samples,
        sigma_noise=answers.noise(posterior.likelihood),
    )


def calibration_of(self: Posterior) -> Calibration | None:
    """What :meth:`calibrate` found; None before."""
    return self._calibration


def p_value(self: Posterior, x: Any, *, per: str = "input", mask: Mask = None) -> Tensor:  # (N,) or (N, ...)
    r"""Return the probability that a familiar input is at least as strange.

    Small p-values mean strange inputs. For an input like the held-out data of :meth:`calibrate`, the p-value is at most
    :math:`\alpha` with a probability of at most :math:`\alpha`, whatever the network and the data are.

    Parameters
    ----------
    x, mask
        As for :meth:`predict`.
    per : "input" or "position"
        "position" gives a p-value for each token or pixel, NaN where it is masked; the guarantee is for a random
        position of a new input.

    Returns
    -------
    Tensor (N,) or (N, ...)
        In the order of the inputs, in float64.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> y = x[:, :3].argmax(1)
    >>> model = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.eye(4)[:, :3]})
    >>> posterior = nb.baselines.DiagonalLaplace(model).fit(x[:100], y[:100]).calibrate(x[100:], y[100:])
    >>> new = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 90.0]])
    >>> posterior.p_value(new) < 0.05
    tensor([False,  True])
    """
    found = need_calibration(self)
    check_per(per)
    check_mask(found, mask)
    if per == "input":
        return found.p_value(self.ood_score(x, found.kind, mask=mask))
    if found.position_scores is None:
        msg = 'There is no score of single positions to compare with: use per="input".'
        raise SettingsError(msg)
    scores = self.ood_score(x, found.position_kind, per=per, mask=mask).double()
    values = p_values(found.position_scores.to(scores), scores)
    return values.masked_fill(scores.isnan(), torch.nan)


def is_ood(self: Posterior, x: Any, alpha: float = 0.05, *, per: str = "input", mask: Mask = None) -> Tensor:  # bool
    """Say whether inputs are out of distribution: yes or no for each.

    Parameters
    ----------
    x, mask, per
        As for :meth:`p_value`; positions that are masked are never flagged.
    alpha : float
        The false-alarm rate: an input like the held-out data is flagged with at most this probability.

    Returns
    -------
    Tensor (N,) or (N, ...) of bool
        True where the p-value is at most ``alpha``.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> y = x[:, :3].argmax(1)
    >>> model = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.eye(4)[:, :3]})
    >>> posterior = nb.baselines.DiagonalLaplace(model).fit(x[:100], y[:100]).calibrate(x[100:], y[100:])
    >>> new = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 90.0]])
    >>> posterior.is_ood(new, alpha=0.05)
    tensor([False,  True])
    """
    found = need_calibration(self)
    ranked = found.scores if per == "input" or found.position_scores is None else found.position_scores
    level = check_alpha(alpha, len(ranked))
    return p_value(self, x, per=per, mask=mask) <= level + 1e-12


def predict_set(self: Posterior, x: Any, alpha: float = 0.1, *, mask: Mask = None) -> Tensor:  # bool (N, C)
    """Return the labels that cannot be excluded.

    Parameters
    ----------
    x, mask
        As for :meth:`predict`.
    alpha : float
        The set of an input like the held-out data lacks the right label with at most this probability.

    Returns
    -------
    Tensor (N, C) of bool
        True for the labels in the set. An empty set means that no label is plausible. "binary" has two columns, no and
        yes. For "multilabel" the set holds all labels that apply, with that probability. Outputs with positions have a
        set for each, in the shape of the probabilities ("binary" and "multilabel": with no and yes in a last dimension
        more), and the guarantee is for a random position.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> y = x[:, :3].argmax(1)
    >>> model = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.eye(4)[:, :3]})
    >>> posterior = nb.baselines.DiagonalLaplace(model).fit(x[:100], y[:100]).calibrate(x[100:], y[100:])
    >>> posterior.predict_set(torch.tensor([[9.0, 0.0, 0.0, 0.0]]), alpha=0.1)
    tensor([[ True, False, False]])
    """
    self._check_fitted()
    answers.check_labels(self._likelihood)
    limit = beyond_rounding(quantile(*_errors(self, alpha)))
    return answers.label_sets(self._likelihood, self._predict(x, mask=mask), limit.to(self._network.device))


def predict_interval(self: Posterior, x: Any, alpha: float = 0.1) -> tuple[Tensor, Tensor]:  # (N, ...) each
    """Return intervals for the targets of a regression.

    The width follows the predictive standard deviation, noise included; held-out data determine its factor.

    Parameters
    ----------
    x
        As for :meth:`predict`.
    alpha : float
        The target of an input like the held-out data is outside with at most this probability, for each output; for
        outputs with positions, at a random position.

    Returns
    -------
    lower, upper : Tensor (N, ...)
        The bounds.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> x = torch.randn(300, 2, generator=torch.Generator().manual_seed(1))
    >>> y = x[:, :1] + 0.1 * x.roll(7, 0)[:, 1:]
    >>> model = nb.as_module(lambda p, x: x @ p["w"], {"w": torch.tensor([[1.0], [0.0]])})
    >>> posterior = nb.baselines.DiagonalLaplace(model, "regression").fit(x[:100], y[:100])
    >>> posterior = posterior.calibrate(x[100:200], y[100:200])
    >>> lower, upper = posterior.predict_interval(x[200:], alpha=0.1)
    >>> ((lower <= y[200:]) & (y[200:] <= upper)).float().mean() > 0.8
    tensor(True)
    """
    self._check_fitted()
    answers.check_numbers(self._likelihood)
    limit = beyond_rounding(quantile(*_errors(self, alpha)))
    lower, upper = answers.interval(self._predict(x), limit.to(self._network.device))
    return self._network.as_returned(lower), self._network.as_returned(upper)


@full_precision()
def combined_score(
    posterior: Posterior, x: Any, per: str, mask: Mask, prediction: Prediction | None = None
) -> Tensor:  # (N,) float64
    """Return the combined score that `calibrate` has learned.

    ``prediction`` is that of the posterior for ``x``, one batch on the network's device, where it is already known.
    """
    found = need_calibration(posterior)
    if found.combine is None:
        msg = f'The posterior was calibrated for "{found.kind}": calibrate(held_out, kind="combined") learns the other.'
        raise NotFittedError(msg)
    if per != "input":
        msg = 'The score "combined" is of whole inputs: for positions name another, such as "generalized_entropy".'
        raise SettingsError(msg)
    posterior._network.check_unchanged()
    if found.statistics != statistics.names(posterior):
        msg = f"The calibration has other statistics than {type(posterior).__name__}: calibrate it again."
        raise NotFittedError(msg)
    if prediction is not None:
        if mask is None:
            warn_of_padding(posterior._likelihood, prediction)
        return found.combine(statistics.statistics(posterior, x, prediction, mask))
    return torch.cat([found.combine(part) for part in statistics.combined(posterior, x, mask)])


def _kind_of(mask: Mask) -> str:
    """Return how positions are masked: by the inputs' own mask if there is one, not at all, or as the user says."""
    return "" if mask is None else "all" if isinstance(mask, str) else "given"


def check_mask(found: Calibration, mask: Mask) -> None:
    """Refuse to compare scores of masked positions with those of all."""
    if found.mask and _kind_of(mask) != found.mask:
        how = 'mask="all"' if found.mask == "all" else "a mask"
        msg = f"The posterior was calibrated with {how}: pass mask=... here as well."
        raise SettingsError(msg)


def need_calibration(self: Posterior) -> Calibration:
    """Return what `calibrate` found, if it still applies."""
    self._check_fitted()
    found = self._calibration
    if found is None:
        msg = "Decisions need held-out data to compare with: call posterior.calibrate(held_out_loader) first."
        raise NotFittedError(msg)
    if msg := outdated(self):
        raise NotFittedError(msg)
    return found


def outdated(self: Posterior) -> str:
    """Say why a calibration does not apply any more; nothing if it does, or if there is none."""
    found = self._calibration
    if found is None:
        return ""
    then = (found.n_samples, found.prior_precision, found.temperature)
    now = (self.n_samples, self.prior_precision, self.temperature)  # more samples may change the precision
    for name, old, new in zip(("number of samples", "prior precision", "temperature"), then, now, strict=True):
        if old != new:
            return f"The {name} was {old:g} when the posterior was calibrated, and is {new:g} now: calibrate it again."
    if found.sigma_noise and found.sigma_noise != answers.noise(self.likelihood):
        return "The noise of the regression is another than when the posterior was calibrated: calibrate it again."
    return ""


def _numbers(values: Tensor | None, which: Tensor | slice) -> Tensor | None:
    """Return the values of some examples, without those that have none, as where every position is ignored."""
    if values is None:
        return None
    values = values[which]
    return values[~values.isnan().reshape(len(values), -1).any(1)]


def _errors(posterior: Posterior, alpha: float) -> tuple[Tensor, float]:
    found = need_calibration(posterior)
    posterior._need_samples()  # which refuses a method that is only a score
    if found.errors is None:
        msg = (
            "The posterior was calibrated without targets that predictions can be compared with: call "
            "calibrate(x, y) with labels, or with numbers for a regression."
        )
        raise SettingsError(msg)
    return found.errors, check_alpha(alpha, len(found.errors))
