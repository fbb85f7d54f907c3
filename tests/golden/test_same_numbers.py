"""The same seed gives the same samples in every version of the library.

`numbers.json` holds what fits of every method and every projector returned when it was written. A change of structure
must not change them. A change of numerics that is wanted writes the file again, and the diff shows what moved:

    python tests/golden/test_same_numbers.py
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes import baselines, detectors, projectors

FILE = Path(__file__).with_name("numbers.json")
DIGITS = 8  # that are stored; sums in another order move the last ones of float64
SCORES_ONLY = (baselines.LocalEnsemble, baselines.SketchedLanczos)
DETECTORS = tuple(kind for kind in vars(detectors).values() if inspect.isclass(kind))
OWN_SCORE = (
    baselines.MAP,
    baselines.TemperatureScaling,
    baselines.SCOD,
    *DETECTORS,
    *SCORES_ONLY,
)  # others: by their variance
STILL = (baselines.MAP, baselines.TemperatureScaling, *DETECTORS)  # whose one sample is the network itself
WITHOUT_PRIOR = (baselines.SWAG, baselines.DeepEnsemble, *STILL, *SCORES_ONLY)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu")


def network(*, norm: bool = True) -> nn.Module:
    """A small convolutional network whose parameters do not depend on torch's initialization."""
    between = [nn.LayerNorm(8)] if norm else []
    layers = [nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 8), *between, nn.Tanh(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).double().cpu()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.4 * drawn(*parameter.shape, seed=number))
    return model


def data() -> tuple[Tensor, Tensor]:
    return drawn(20, 1, 6, 6, seed=100), torch.arange(20, device="cpu") % 3


def train_epoch(model: nn.Module) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.1 * drawn(*parameter.shape, seed=200 + number) * parameter.mean().abs()


def train_member(seed: int) -> nn.Module:
    model = network()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.1 * drawn(*parameter.shape, seed=300 + 20 * seed % 1000 + number)
    return model


def fitted(kind: Any, precision: Any = "optimal", **settings: Any) -> Any:
    own = {} if kind in WITHOUT_PRIOR else {"prior_precision": precision}
    settings = {"generator": torch.Generator("cpu").manual_seed(7), "progress": False, **settings}
    model = network(norm=kind is not baselines.KroneckerLaplace)  # which knows linear and convolution layers only
    return kind(model, **own).fit([data()], 4, **settings)


def numbers(posterior: Any) -> dict[str, list[float]]:
    """Some numbers that depend on every part of a fit."""
    x = drawn(3, 1, 6, 6, seed=101)
    found = {"score": posterior.ood_score(x, None if type(posterior) in OWN_SCORE else "max_variance")}
    if type(posterior) not in SCORES_ONLY:
        prediction = posterior.predict(x)
        found |= {"mean": prediction.mean[0], "probs": prediction.probs[1]}
        if type(posterior) not in STILL:
            found["variance"] = prediction.variance[0]
            found["sample"] = torch.cat([value[1].flatten()[::29] for value in posterior.sample(2).values()])
    if type(posterior) not in WITHOUT_PRIOR:
        found["prior_precision"] = torch.tensor([posterior.prior_precision], dtype=torch.float64, device="cpu")
    return {
        name: [float(f"{value:.{DIGITS}g}") for value in values.flatten().tolist()] for name, values in found.items()
    }


# Krylov has a small tolerance: near a large one, rounding decides which sweep is the last.
_BLOCKS = projectors.Alternating(block_rows=12, rtol=1e-3, coarse=4)
FITS: dict[str, Callable[[], Any]] = {
    "projected, auto": lambda: fitted(nb.ProjectedPosterior, "auto"),
    "projected, paper": lambda: fitted(nb.ProjectedPosterior, "paper"),
    "projected, held out": lambda: fitted(nb.ProjectedPosterior, held_out=[data()]),
    "loss-projected, auto": lambda: fitted(nb.LossProjectedPosterior, "auto"),
    "loss-projected, optimal": lambda: fitted(nb.LossProjectedPosterior),
    "projected, extended": lambda: fitted(nb.ProjectedPosterior).extend(3),
    "dual": lambda: fitted(nb.ProjectedPosterior, projector=projectors.ExactDual()),
    "primal": lambda: fitted(nb.ProjectedPosterior, projector=projectors.ExactPrimal()),
    "alternating": lambda: fitted(nb.ProjectedPosterior, projector=_BLOCKS),
    "krylov": lambda: fitted(nb.ProjectedPosterior, projector=projectors.Krylov(_BLOCKS, rtol=1e-9)),
    "lanczos": lambda: fitted(nb.ProjectedPosterior, projector=projectors.Lanczos(rank=30)),
    "SWAG": lambda: fitted(baselines.SWAG, train=train_epoch, n_models=5),
    "deep ensemble": lambda: fitted(baselines.DeepEnsemble, train=train_member),
    **{
        kind.__name__: lambda kind=kind: fitted(kind, 2.0)  # type: ignore[misc]
        for kind in (
            baselines.MAP,
            baselines.TemperatureScaling,
            *DETECTORS,
            baselines.DiagonalLaplace,
            baselines.LastLayerLaplace,
            baselines.KroneckerLaplace,
            baselines.LinearizedLaplace,
            baselines.LanczosLaplace,
            baselines.SCOD,
            baselines.LocalEnsemble,
            baselines.SketchedLanczos,
        )
    },
}


def test_every_baseline_has_numbers() -> None:
    kinds = {kind for kind in vars(baselines).values() if inspect.isclass(kind)}
    kinds = {kind for kind in kinds - {baselines.Baseline} if issubclass(kind, baselines.Baseline)}
    named = {kind.__name__ for kind in kinds - {baselines.DeepEnsemble}} | {"deep ensemble"}
    assert named <= FITS.keys(), "a baseline that is not in FITS"
    assert json.loads(FILE.read_text()).keys() <= FITS.keys(), "numbers of a fit that is no more"


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore::nullbayes.errors.NullBayesWarning")
@pytest.mark.parametrize("name", FITS)
def test_same_numbers(name: str) -> None:
    everything = json.loads(FILE.read_text())
    assert name in everything, "a new method: run python tests/golden/test_same_numbers.py, and look at the diff"
    stored, found = everything[name], numbers(FITS[name]())
    assert found.keys() == stored.keys()
    for part, values in stored.items():
        assert found[part] == pytest.approx(values, rel=1e-6, abs=1e-9), part


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    FILE.write_text(json.dumps({name: numbers(make()) for name, make in FITS.items()}, indent=1) + "\n")
    sys.stdout.write(f"wrote {FILE}\n")
