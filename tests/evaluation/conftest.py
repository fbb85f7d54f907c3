"""Methods that several tests of `nb.evaluate` compare; none of them changes a method."""

from __future__ import annotations

from typing import Any

import pytest

import nullbayes as nb
from nullbayes.evaluation import Evaluation
from support.evaluated import STRANGERS, X, Y, fitted


@pytest.fixture(scope="session")
def projected() -> Any:
    return fitted(nb.ProjectedPosterior)


@pytest.fixture(scope="session")
def network() -> Any:
    return fitted(nb.baselines.MAP)


@pytest.fixture(scope="session")
def ensemble() -> Any:
    return fitted(nb.baselines.LocalEnsemble, memory_budget=3)


@pytest.fixture(scope="session")
def evaluation(projected: Any, network: Any, ensemble: Any) -> Evaluation:
    methods = {"projected": projected, "network": (network, "energy"), "ensemble": ensemble}
    return nb.evaluate(methods, (X, Y), STRANGERS)
