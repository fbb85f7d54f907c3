"""A small network with ReLU features, its data, and what it computes in numpy, for the tests of detectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from support.drawing import randint, randn

N_CLASSES, WIDTH = 3, 8


def network(dtype: torch.dtype = torch.float64, width: int = WIDTH) -> nn.Sequential:
    """Five inputs, ReLU features, three logits; the parameters do not depend on torch's initialization."""
    model = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, N_CLASSES))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
            parameter.copy_(0.7 * drawn)
    return model.to(torch.get_default_device(), dtype)


def data(n: int = 40, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    x, y = randn(n, 5, generator=generator, dtype=torch.float64), randint(N_CLASSES, (n,), generator=generator)
    return x.to(dtype), y


def new_inputs(n: int = 7) -> Tensor:
    """Inputs that are not among the data, further out."""
    return 2.0 * randn(n, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def computed(model: nn.Sequential, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The features (n, d) and logits (n, C) of a network, in numpy."""
    w1, b1, w2, b2 = (p.detach().cpu().double().numpy() for p in model.parameters())
    features = np.maximum(x.cpu().double().numpy() @ w1.T + b1, 0.0)
    return features, features @ w2.T + b2


def scores(kind: Any, x: Tensor | None = None, **settings: Any) -> np.ndarray:
    """The scores of new inputs by a detector of the small network."""
    detector = kind(network(), **settings).fit(*data(), progress=False)
    return detector.ood_score(new_inputs() if x is None else x).cpu().numpy()
