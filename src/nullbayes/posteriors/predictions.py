"""The samples of a posterior, and their predictions: methods of :class:`SamplePosterior`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from nullbayes import predictive
from nullbayes.errors import SettingsError
from nullbayes.posteriors.arguments import whole
from nullbayes.precision import computed_parametrizations, full_precision
from nullbayes.predictive import Mask, Prediction


def predict(
    self: Any,
    x: Any,
    *,
    pred_type: str | None = None,
    n_samples: int | None = None,
    link_approx: str | None = None,
    mask: Mask = None,
) -> Prediction:
    """Predict for inputs, or for a loader of them.

    Parameters
    ----------
    x : Tensor, array, tuple, mapping, dataset or loader
        What the model takes: one argument, several, or named ones; or an iterable of such (targets in pairs are
        ignored). A loader that shuffles or drops examples is refused: answers come in the order of the inputs.
    pred_type : "linearized" or "sampled", optional
        The linearized network, for which the theory holds, or the network at the sampled parameters. "linearized" by
        default; "sampled" for methods whose samples are networks themselves. Methods that are only a score refuse both.
    n_samples : int, optional
        Use only the first so many samples.
    link_approx : "margin", "probit", "bridge" or "mc", optional
        How probabilities are averaged over the posterior. "margin", the default for linearized predictions, shrinks
        the distance of each logit to that of the predicted class by its variance: no Monte Carlo noise, and the
        predicted class is always the network's. "probit" shrinks each logit by its own variance and "bridge" is the
        Laplace bridge, both as in laplace-torch; "mc" is the mean of the samples' probabilities, the default for
        sampled predictions. For binary and multilabel likelihoods "margin" and "probit" are the same.
    mask : Tensor (N, ...), callable (inputs) -> Tensor, or "all", optional
        True at the positions of outputs such as (N, T, C) that count; padding does not, and scores leave it out. By
        default an input's own ``attention_mask``, if it has one; "all" counts everything.

    Returns
    -------
    Prediction
        Mean, variance and samples of the outputs in the shape in which the model returns them, and probabilities where
        the likelihood has them.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> prediction = posterior.predict(x)
    >>> prediction.samples.shape, torch.equal(prediction.mean, model(x))
    (torch.Size([10, 4, 1]), True)
    >>> (prediction.std.flatten() > 1e-3).tolist()
    [False, False, True, True]
    """
    found: Prediction = self._predict(x, pred_type=pred_type, n_samples=n_samples, link_approx=link_approx, mask=mask)
    return found.reshaped(self._network.as_returned)


@full_precision()
def predict_outputs(
    self: Any,
    x: Any,
    *,
    pred_type: Any = None,
    n_samples: Any = None,
    link_approx: Any = None,
    mask: Mask = None,
) -> Prediction:
    """Predict with a dimension for the outputs, (N, 1), also where the model returns one number per input."""
    self._network.check_unchanged()
    pred_type = self._pred_type if pred_type is None else pred_type
    options = {"pred_type": pred_type, "link": link_approx, "batch_fn": self._batch_fn, "mask": mask}
    root, network = self.prior_precision**0.5, self._network
    with network.group.together():
        return predictive.predict(network, self._likelihood, x, self._first(n_samples), root=root, **options)


def sample(self: Any, n: int | None = None) -> dict[str, Tensor]:
    """Return the parameters of samples, for ``torch.func.functional_call`` for example.

    Parameters
    ----------
    n : int, optional
        Only those of the first ``n`` samples.

    Returns
    -------
    dict of Tensor (n, ...)
        The parameters that vary, by name, stacked over samples: ``n`` times as much memory as they take.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x, y = torch.nn.Linear(4, 1, bias=False), torch.eye(4), torch.ones(4, 1)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], y[:2], 10)
    >>> posterior.sample(3)["weight"].shape
    torch.Size([3, 1, 4])
    """
    self._need_samples()
    network = self._network
    deviations = network.all_columns(self._deviations(n, least=1))
    return network.whole.unflatten(network.whole.theta + deviations)  # type: ignore[no-any-return]


@contextlib.contextmanager
def sampled_parameters(self: Any, i: int) -> Iterator[nn.Module]:
    """Put a sample into the user's model during a ``with`` block; the trained parameters return after it.

    Parameters
    ----------
    i : int
        The number of the sample, from 0; negative numbers count from the last.

    Yields
    ------
    nn.Module
        The user's own model, with other parameters.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(4, 2, bias=False), torch.eye(4)
    >>> posterior = nb.ProjectedPosterior(model, prior_precision=1.0).fit(x[:2], torch.tensor([0, 1]))
    >>> own = model(x)
    >>> with posterior.sampled_parameters(0) as sampled:
    ...     print(torch.isclose(sampled(x), own, atol=1e-6).all(1))
    tensor([ True,  True, False, False])
    """
    if not -self.n_samples <= whole(i, "i") < self.n_samples:
        msg = f"There is no sample {i}: there are {self.n_samples}."
        raise SettingsError(msg)
    self._network.check_unchanged()
    model, values = self._network.model, self._sampled_tensors(i)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trained = {name: named[name].data for name in values}
    try:
        for name, value in values.items():
            named[name].data = value.to(trained[name].dtype, copy=True)
        with computed_parametrizations():
            yield model
    finally:
        for name, value in trained.items():
            named[name].data = value
