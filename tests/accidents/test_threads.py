"""Threads share a posterior, and a fit disturbs no training beside it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nullbayes as nb
from support.models import ATTENTION, CLASSIFICATION, CNN, MLP, Model, Slow

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

SLOW = Model("slow", lambda outputs: Slow(), MLP.inputs, "layers")
KINDS = (nb.ProjectedPosterior, nb.LossProjectedPosterior)


def fitted(kind: Any, model: nn.Module, data: tuple[Any, Tensor], n_samples: int = 4) -> Any:
    generator = torch.Generator().manual_seed(0)
    return kind(model).fit([data], n_samples, projector=nb.projectors.Krylov(), generator=generator, progress=False)


@pytest.mark.parametrize("case", [SLOW, CNN, ATTENTION], ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, of the first product in a thread
def test_threads_that_share_a_posterior_get_the_answers_of_a_single_thread(case: Model) -> None:
    """Predictions put parameters and hooks into one module, each at its own precision of the prior."""
    x, y = CLASSIFICATION.data(case)
    posterior = fitted(nb.ProjectedPosterior, case.build(), (x, y))
    asked = (
        lambda: posterior.predict(x).samples,
        lambda: posterior.predict(x, pred_type="sampled").samples,
        lambda: posterior.predict(x, n_samples=2).samples,
        lambda: posterior.ood_score(x, "entropy"),
        lambda: posterior.functional_variance(x, exact=True),
    )
    alone = [ask() for ask in asked]
    with ThreadPoolExecutor(5) as threads:
        for _ in range(4):
            for answer, expected in zip(threads.map(lambda ask: ask(), asked), alone, strict=True):
                # whether attention is fused is one switch for all threads, and rounds in its own way
                torch.testing.assert_close(answer, expected, rtol=0, atol=0 if case is SLOW else 1e-12)


def training(case: Model, start: threading.Event) -> list[Tensor]:
    """Train a network with dropout by the process's own random numbers; return its parameters."""
    model, (x, y) = nn.Sequential(case.build(), nn.Dropout(0.3)).train(), CLASSIFICATION.data(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start.set()
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        assert loss.requires_grad
        loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.cpu  # bit by bit, which other devices do not promise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [MLP, CNN], ids=lambda case: case.name)
def test_a_fit_and_a_training_beside_it_do_not_disturb_each_other(case: Model, kind: Any) -> None:
    model, data = case.build(), CLASSIFICATION.data(case)
    torch.manual_seed(3)
    trained = training(case, threading.Event())
    directions = fitted(kind, model, data, 10).directions
    torch.manual_seed(3)
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(training, case, start := threading.Event())
        assert start.wait(60)
        rounds = 0
        while not beside.done():
            assert torch.equal(fitted(kind, model, data, 10).directions, directions)
            rounds += 1
        torch.testing.assert_close(beside.result(), trained, rtol=0, atol=0)
    assert rounds > 0


def test_switches_of_torch_are_as_before_once_all_threads_are_done() -> None:
    def switches() -> tuple[Any, ...]:
        cuda = torch.backends.cuda
        return (
            torch.backends.mha.get_fastpath_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(),
            torch.get_float32_matmul_precision(), torch.is_grad_enabled(),
        )  # fmt: skip

    before, (x, y) = switches(), CLASSIFICATION.data(ATTENTION)
    posterior = fitted(nb.ProjectedPosterior, ATTENTION.build(), (x, y))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: posterior.predict(x), range(12)))
        assert set(threads.map(lambda _: switches(), range(4))) == {before}
    assert switches() == before
