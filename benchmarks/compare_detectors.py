"""Compare the detectors with those of pytorch-ood: order and size of the scores on the same network and data.

    python benchmarks/compare_detectors.py

Both sides see the same trained network, in single precision. For each detector the rank correlation of the scores is
printed, and their largest difference relative to the spread of the scores, after what pytorch-ood scales otherwise by a
constant is scaled back. The exit status is 1 if one is beyond the tolerance. Needs ``pytorch-ood`` and
``scikit-learn``, and a torchvision that fits torch, because pytorch-ood imports it:

    pip install torch torchvision scikit-learn nullbayes
    pip install --no-deps pytorch-ood

Some formulas differ, which this network does not show:

- Features that never vary do not count in our covariances. pytorch-ood adds 1e-6 to the diagonal of sums over examples,
  so an input that activates a feature that is always zero in training has a huge distance.
- pytorch-ood clamps probabilities at 1e-7 in GEN, and subtracts the largest probability from 1, which makes confident
  inputs equal.
- pytorch-ood takes a limited number of steps towards the temperature, so the likelihoods are compared: ours must not
  be lower.

pytorch-ood has no GradPCA.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import nullbayes as nb

N, CLASSES, WIDTH, STEPS = 600, 5, 24, 30
CORRELATION, DIFFERENCE = 0.9999, 5e-3  # the least and the largest allowed


def problem() -> tuple[nn.Sequential, Tensor, Tensor, Tensor]:
    """Return a trained network with positive features, its training data, and new inputs, half of them unlike these."""
    torch.manual_seed(0)
    centres = 1.5 * torch.randn(CLASSES, 10)
    y = torch.arange(N) % CLASSES
    x = centres[y] + torch.randn(N, 10)
    model = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, WIDTH), nn.Softplus(), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), x, y, torch.cat([centres[y[:200]] + torch.randn(200, 10), 2.0 * torch.randn(200, 10)])


def pairs(model: nn.Sequential, x: Tensor, y: Tensor, new: Tensor) -> dict[str, tuple[Any, Callable[[], Tensor]]]:
    """Return for each detector ours, and a function that returns their scores of the new inputs."""
    from pytorch_ood import detector as theirs

    ours, frozen = nb.detectors, copy.deepcopy(model).requires_grad_(False)
    body, head = frozen[:-1], frozen[-1]
    with torch.no_grad():
        train, features, logits = body(x), body(new), model(new)

    def maps(values: Tensor) -> Tensor:
        return values[:, :, None, None]

    def flat_head(values: Tensor) -> Tensor:
        return head(values.flatten(1))

    def of_features(made: Any) -> Callable[[], Tensor]:
        return lambda: made.fit_features(train, y).predict_features(features)

    def mahalanobis() -> Tensor:  # half of the squared distance, by a covariance that is not divided by N
        return 2.0 * N * theirs.Mahalanobis(body).fit_features(train, y).predict_features(features)

    def react() -> Tensor:
        made = theirs.ReAct(lambda v: maps(body(v)), flat_head, percentile=0.9)
        return made.fit_feature_maps(maps(train), y).predict_feature_maps(maps(features))

    return {
        "MSP": (ours.MSP(model), lambda: 1.0 + theirs.MaxSoftmax.score(logits)),  # theirs is minus the probability
        "MaxLogit": (ours.MaxLogit(model), lambda: theirs.MaxLogit.score(logits)),
        "Energy": (ours.Energy(model), lambda: theirs.EnergyBased.score(logits)),
        "GEN": (ours.GEN(model), lambda: CLASSES * theirs.GEN.score(logits)),  # a mean over classes
        "KNN": (ours.KNN(model, k=10), of_features(theirs.KNN(body, k=10))),
        "Mahalanobis": (ours.Mahalanobis(model), mahalanobis),
        "RelativeMahalanobis": (
            ours.RelativeMahalanobis(model),
            lambda: N * theirs.RMD(body).fit_features(train, y).predict_features(features),
        ),
        "ViM": (ours.ViM(model, directions=8), of_features(theirs.ViM(body, 8, head.weight, head.bias))),
        "ReAct": (ours.ReAct(model), react),
        "SCALE": (
            ours.SCALE(model),
            lambda: theirs.SCALE(body, flat_head, percentile=0.85).predict_feature_maps(maps(features)),
        ),
        "FDBD": (ours.FDBD(model), of_features(theirs.fDBD(body, head))),
        "NNGuide": (ours.NNGuide(model), of_features(theirs.NNGuide(body, head))),
    }


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation."""
    ranks = torch.stack([values.argsort().argsort().double() for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def temperatures(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
    """Return our temperature and theirs, each with the negative log-likelihood of the data."""
    from pytorch_ood.detector import TemperatureScaling

    with torch.no_grad():
        logits = model(x)
    found = {
        "ours": nb.baselines.TemperatureScaling(model).fit(x, y, progress=False).temperature,
        "theirs": float(TemperatureScaling(model).fit_logits(logits, y).t),
    }
    return {name: (t, float(nn.functional.cross_entropy(logits.double() / t, y))) for name, t in found.items()}


def main() -> int:
    """Compare all detectors; return the exit status."""
    try:
        import pytorch_ood.detector  # noqa: F401
    except Exception as error:  # a torchvision that does not fit torch is a RuntimeError
        print(f"pytorch-ood cannot be imported ({error}): the docstring of this script says how to install it.")
        return 1
    warnings.simplefilter("ignore")
    model, x, y, new = problem()
    bad = []
    print(f"{'detector':<22}{'rank correlation':>18}{'largest difference':>20}")
    for name, (ours, theirs) in pairs(model, x, y, new).items():
        scores, wanted = ours.fit(x, y, progress=False).ood_score(new).double(), theirs().double()
        correlation, difference = rank_correlation(scores, wanted), float((scores - wanted).abs().max() / wanted.std())
        print(f"{name:<22}{correlation:>18.6f}{difference:>20.1e}")
        if correlation < CORRELATION or difference > DIFFERENCE:
            bad.append(name)
    found = temperatures(model, new[:200], y[:200])
    for name, (temperature, nll) in found.items():
        print(f"temperature of held-out data, {name}: {temperature:.4f}, with a negative log-likelihood of {nll:.6f}")
    if found["ours"][1] > found["theirs"][1] + 1e-6:
        bad.append("TemperatureScaling")
    print(f"beyond the tolerance: {', '.join(bad) or 'none'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
