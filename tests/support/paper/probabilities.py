"""Probabilities and labels with a given mean confidence and accuracy."""

import numpy as np
import torch
from torch import Tensor


def predictions(confidence: float, accuracy: float, seed: int, n: int = 20_000) -> tuple[Tensor, Tensor]:
    """Probabilities of 10 classes with a mean confidence, most of them close to 1, and labels with an accuracy."""
    rng = np.random.default_rng(seed)
    share = (1 - confidence) / 0.9
    doubt = 0.9 * rng.beta(0.5 * share, 0.5 * (1 - share), n)  # at most 0.9, so that the predicted class stays on top
    predicted = rng.integers(10, size=n)
    probs = np.repeat(doubt[:, None] / 9, 10, axis=1)
    probs[np.arange(n), predicted] = 1 - doubt
    wrong = doubt >= np.quantile(doubt, accuracy)  # the most doubtful ones
    labels = np.where(wrong, (predicted + rng.integers(1, 10, size=n)) % 10, predicted)
    return torch.as_tensor(probs), torch.as_tensor(labels)
