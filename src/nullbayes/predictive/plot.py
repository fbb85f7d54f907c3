"""The figure of a prediction: bars of probabilities for a few inputs, or sorted means with a band."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nullbayes.errors import SettingsError, optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nullbayes.predictive.prediction import Prediction

_COLOR = "#2563a8"


def draw(prediction: Prediction, n_inputs: int) -> Figure:
    """Draw classes as one panel per input, and numbers as one panel per output; other shapes are refused."""
    with optional("plot()"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    if prediction.mean.ndim == 1:  # one number per input
        prediction = prediction.reshaped(lambda tensor: tensor[..., None])
    if prediction.mean.ndim != 2:
        msg = (
            f"Predictions of shape (N, outputs) can be drawn, not {tuple(prediction.mean.shape)}: take some positions."
        )
        raise SettingsError(msg)
    classes = prediction.probs is not None
    n_panels = min(n_inputs, len(prediction.mean)) if classes else min(n_inputs, prediction.mean.shape[1])
    figure = Figure(figsize=(3.2 * n_panels, 3.0) if classes else (6.0, 3.0 * n_panels), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1 if classes else n_panels, n_panels if classes else 1, squeeze=False).ravel()
    for i, axis in enumerate(axes):
        _bars(axis, prediction, i) if classes else _band(axis, prediction, i)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _bars(axis: Any, prediction: Prediction, i: int) -> None:
    """Draw the probabilities of an input; lines reach from the 5 % to the 95 % quantile over its samples."""
    assert prediction.probs is not None
    samples, probs = prediction.samples[:, i].double(), prediction.probs[i].double().cpu()
    each = samples.softmax(-1) if prediction.likelihood == "classification" else samples.sigmoid()
    low, high = torch.quantile(each.cpu(), torch.tensor([0.05, 0.95], dtype=torch.float64, device="cpu"), dim=0)
    places = range(len(probs))
    axis.bar(places, probs.numpy(), color=_COLOR, alpha=0.7)
    axis.vlines(places, low.numpy(), high.numpy(), color="black", lw=1.5)
    axis.set(title=f"input {i}", xlabel="class", ylabel="probability", ylim=(0.0, 1.02), xticks=places)


def _band(axis: Any, prediction: Prediction, output: int) -> None:
    """Draw the means of an output in ascending order, with two standard deviations of the posterior around them."""
    order, places = prediction.mean[:, output].argsort(), range(len(prediction.mean))
    mean, std = (values[order, output].double().cpu().numpy() for values in (prediction.mean, prediction.std))
    axis.fill_between(places, mean - 2 * std, mean + 2 * std, color=_COLOR, alpha=0.25, lw=0, label="± 2 std")
    axis.plot(places, mean, color=_COLOR, lw=1.5, label="mean")
    axis.set(title=f"output {output}", xlabel="inputs, sorted by their mean", ylabel="prediction")
    axis.legend(frameon=False, fontsize=8)
