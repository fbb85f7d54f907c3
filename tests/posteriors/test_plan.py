"""A plan has a key for its numbers and a counter for how often it was made smaller; its notes are for people only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import nullbayes as nb
from models import CLASSIFICATION, MLP
from nullbayes.errors import SettingsError
from nullbayes.posteriors.plan import FitPlan, FitRequest, described, make_plan, shrink
from nullbayes.projectors import Alternating, ExactDual, Krylov, Projection, Projector


def request(projector: Any = "auto", n: int = 40) -> FitRequest:
    rows = nb.OutputJacobian(MLP.build(), [CLASSIFICATION.data(n=n)])
    return FitRequest(rows, 4, projector, 1e-2, "1GB")


def shrunk(asked: FitRequest, plan: FitPlan) -> list[FitPlan]:
    """The plan, and all smaller ones."""
    plans = [plan]
    while True:
        try:
            plans.append(shrink(asked, plans[-1]))
        except SettingsError:
            return plans


@pytest.mark.parametrize("projector", [Krylov(Alternating(block_rows=60)), "auto"], ids=["blocks", "auto"])
def test_notes_are_no_counter(projector: Any) -> None:
    asked = request(projector)
    plan = make_plan(asked)
    keys = [smaller.key for smaller in shrunk(asked, plan)]
    assert len(keys) > 1
    for notes in (("a note for another reason",), ("one", "two", "three")):
        noted = shrunk(asked, replace(plan, notes=notes))
        assert [smaller.key for smaller in noted] == keys
        assert [smaller.halvings for smaller in noted] == list(range(len(keys)))
        assert all(smaller.notes[: len(notes)] == notes for smaller in noted)
    for halvings, key in enumerate(keys):
        assert make_plan(asked, plan.limit, plan.host, halvings).key == key


class Own(Projector):
    """A projector of a user's that is not a dataclass."""

    def __init__(self, strength: float) -> None:
        self.strength, self.rtol, self.atol = strength, 1e-2, 0.0

    def _prepare(self, rows: nb.Rows) -> Any:
        return ExactDual().prepare(rows)

    def _apply(self, state: Any, noise: Tensor, callback: Any, store: Any) -> Projection:
        return ExactDual().apply(state, noise, callback=callback)


def test_projectors_are_known_by_their_settings() -> None:
    assert described(Own(0.5)) == described(Own(0.5)) == "Own(atol=0.0, rtol=0.01, strength=0.5)"
    assert described(Own(0.5)) != described(Own(0.25))
    assert described(Krylov(rtol=0.5)) == str(Krylov(rtol=0.5))
    assert make_plan(request(Own(0.5))).key == make_plan(request(Own(0.5))).key


def test_the_user_s_projector_is_used_as_asked_for() -> None:
    assert make_plan(request(ExactDual())).reason == "as asked for"
    assert make_plan(request()).reason == nb.plan(MLP.build(), [CLASSIFICATION.data(n=40)], 4, "1GB").reason
