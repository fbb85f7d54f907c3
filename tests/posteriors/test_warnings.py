"""Warnings point at the line of the user's code that called the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.errors import CollapseWarning, ConvergenceWarning, NullBayesWarning, UnderfitWarning, warn
from nullbayes.projectors import Alternating
from support.models import CLASSIFICATION, MLP
from support.posterior_fits import each_kind, fit_mlp


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")
@each_kind
def test_samples_that_do_not_converge_are_warned_of_at_the_line_of_the_user(kind: type) -> None:
    with pytest.warns(ConvergenceWarning) as caught:
        fit_mlp(kind, projector=Alternating(4, 1e-9, max_sweeps=2))
    assert {warning.filename.rpartition("/")[2] for warning in caught} == {"posterior_fits.py"}
    posterior = kind(MLP.build(), prior_precision=1.0)
    with pytest.warns(ConvergenceWarning) as caught:
        posterior.fit([CLASSIFICATION.data()], 3, projector=Alternating(4, 1e-9, max_sweeps=2), progress=False)
    assert [warning.filename for warning in caught if warning.category is ConvergenceWarning] == [__file__]


def collapsed() -> None:
    x, y = CLASSIFICATION.data(n=40)
    nb.ProjectedPosterior(MLP.build()).fit([(x, y)], 3, progress=False, tolerance=1e-6)


def underfitted() -> None:
    nb.LossProjectedPosterior(MLP.build(), prior_precision=1e-3).fit([CLASSIFICATION.data()], 3, progress=False)


def tuned() -> None:
    posterior = nb.ProjectedPosterior(MLP.build(), prior_precision=1.0)
    posterior.fit([CLASSIFICATION.data()], 3, progress=False)
    x = CLASSIFICATION.data(n=50)[0]
    posterior.tune(x, posterior.predict(x).probs.argmax(1))


@pytest.mark.parametrize(
    ("work", "category"), [(collapsed, CollapseWarning), (underfitted, UnderfitWarning), (tuned, NullBayesWarning)]
)
def test_other_warnings_name_this_file(work: Callable[[], Any], category: type[Warning]) -> None:
    with pytest.warns(category) as caught:
        work()
    assert {warning.filename for warning in caught} == {__file__}


def test_warnings_skip_decorators_and_end_at_the_last_frame() -> None:
    with pytest.warns(NullBayesWarning, match="^hello$") as caught:
        torch.no_grad()(warn)("hello")
    assert caught[0].filename == __file__
