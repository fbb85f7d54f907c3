"""Fits that store what they have reached at every sweep, and what is compared of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.errors import ConvergenceWarning
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.projectors import Alternating, Krylov
from support.models import CLASSIFICATION, MLP

KRYLOV = Krylov(Alternating(block_rows=3), rtol=1e-2)
PROJECTORS: dict[str, Any] = {
    "Krylov": KRYLOV,
    "Alternating": Alternating(block_rows=6, rtol=0.05),
    "out of sweeps": Alternating(block_rows=3, rtol=1e-6, max_sweeps=25),
}


def fit_in_sweeps(projector: Any = KRYLOV, kind: type = nb.ProjectedPosterior, **settings: Any) -> Any:
    given = {"model": MLP.build(), "data": [CLASSIFICATION.data(n=12)], "n_samples": 4, "progress": False, **settings}
    options = {name: given.pop(name) for name in ("parameters", "hessian") if name in given}
    posterior = kind(given.pop("model"), prior_precision=1.0, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*sweeps ran out", category=ConvergenceWarning)
        return posterior.fit(given.pop("data"), given.pop("n_samples"), projector=projector, **given)


def seeded(seed: int = 123) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def told(posterior: Any) -> dict[str, Any]:
    """The report, but for what no two runs have in common."""
    report = posterior.report.to_dict()
    return {name: value for name, value in report.items() if name not in ("seconds", "peak_memory")}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """The sweeps after which a fit hands out its state."""
    seen, save = list[int](), Checkpoint.save

    def note(self: Checkpoint, state: Any, **options: Any) -> None:
        seen.append(int(state["counts"][0]))
        save(self, state, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "save", note)
        yield seen


def interrupted(path: Path, sweep: int = 7, **settings: Any) -> Any:
    """A fit that is stopped by Ctrl-C after a sweep, before that is written."""
    save, calls = Checkpoint.save, iter(range(1, 10**6))

    def stop(self: Checkpoint, state: Any, **options: Any) -> None:
        if next(calls) == sweep:
            raise KeyboardInterrupt
        save(self, state, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "save", stop)
        with pytest.warns(ConvergenceWarning, match="stopped by the user"):
            return fit_in_sweeps(checkpoint=path, **{"generator": seeded(), **settings})
