"""What a posterior says about inputs, batch by batch, as arrays: predictions, scores, p-values, decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from nullbayes.command.data import Given, batches, count, is_given, take

_LEVEL = 0.9  # of the interval of a regression


@dataclass(frozen=True)
class Answers:
    """What a posterior says about N inputs.

    Attributes
    ----------
    arrays : dict of array (N, ...)
        "mean", "variance", "std", "score", and where there are any "probs", "lower", "upper", "p_value", "strange".
    likelihood : str
        Name of the likelihood.
    """

    arrays: dict[str, np.ndarray]
    likelihood: str

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of a table with one row per input, named as in ``Prediction.to_pandas``.

        Outputs with positions have no columns of their own: the table then holds scores and decisions alone.
        """
        arrays, found = dict(self.arrays), dict[str, np.ndarray]()
        decided: dict[str, np.ndarray] = {
            name: arrays.pop(name) for name in ("score", "p_value", "strange") if name in arrays
        }
        if arrays["mean"].ndim > 2:
            return decided
        probs = arrays.pop("probs", None)
        if probs is not None and self.likelihood == "classification":
            found = {"predicted": probs.argmax(1), "probability": probs.max(1)}
        elif probs is not None:
            found = _spread("predicted", probs >= 0.5)
        for name, key in (
            ("mean", "mean"),
            ("std", "std"),
            ("lower", f"lower_{_LEVEL:g}"),
            ("upper", f"upper_{_LEVEL:g}"),
        ):
            found |= _spread(key, arrays[name]) if name in arrays else {}
        return found | ({} if probs is None else _spread("prob", probs)) | decided


def _spread(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    array = array.reshape(len(array), -1)
    return {name if array.shape[1] == 1 else f"{name}_{i}": array[:, i] for i in range(array.shape[1])}


def ask(posterior: Any, loader: list[Any], alpha: float) -> Answers:
    """Return what a posterior says about a batch, which is the only one of a loader."""
    prediction = posterior.predict(loader)
    tensors = {"mean": prediction.mean, "variance": prediction.variance, "std": prediction.std}
    tensors |= {} if prediction.probs is None else {"probs": prediction.probs}
    if prediction.noise is not None:
        guaranteed = posterior.calibration is not None and posterior.calibration.errors is not None
        ends = posterior.predict_interval(loader, 1.0 - _LEVEL) if guaranteed else prediction.interval(_LEVEL)
        tensors |= dict(zip(("lower", "upper"), ends, strict=True))
    tensors["score"] = posterior.ood_score(loader)
    if posterior.calibration is not None:
        tensors["p_value"] = posterior.p_value(loader)
        tensors["strange"] = tensors["p_value"] <= alpha + 1e-12
    return Answers({name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}, prediction.likelihood)


def ask_all(posterior: Any, data: Any, alpha: float) -> Answers:
    """Return what a posterior says about all data, with a progress bar on a terminal."""
    parts, wrapped = list[Answers](), Given if is_given(data) else list
    for batch in shown(batches(data), "predicting"):
        if not parts and posterior.calibration is not None:
            posterior.is_ood(wrapped([take(batch, slice(0, 1))]), alpha)  # refuses an alpha that means nothing
        parts.append(ask(posterior, wrapped([batch]), alpha))
    if not parts:
        posterior.predict([])  # refuses data without a batch
    names = parts[0].arrays
    return Answers({n: np.concatenate([part.arrays[n] for part in parts]) for n in names}, parts[0].likelihood)


def shown(parts: Iterable[Any], what: str) -> Iterable[Any]:
    """Pass batches on, with a progress bar on a terminal."""
    bar = tqdm(desc=what, unit=" inputs", disable=None, leave=False)
    with bar:
        for part in parts:
            yield part
            bar.update(count(part))
