"""Low-rank methods converge to the dense eigendecomposition as their memory budget grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from nullbayes import io
from nullbayes.baselines import SCOD, LanczosLaplace, LinearizedLaplace, LocalEnsemble, SketchedLanczos, method
from nullbayes.baselines.method import FitContext
from nullbayes.errors import FileError, SettingsError
from nullbayes.jacobian.data import Examples
from nullbayes.jacobian.jacobians import OutputJacobian
from nullbayes.jacobian.network import Network
from nullbayes.jacobian.rows import JacobianRows
from nullbayes.linalg.held import HeldRows
from support.drawing import randn
from support.models import BINARY, CLASSIFICATION, MLP, MULTILABEL, REGRESSION, Task
from support.slow_answers import gauss_newton, jacobian

X_NEW = MLP.inputs(6, torch.Generator().manual_seed(11))
N, ALPHA = 20, 0.3  # 60 rows over 51 parameters

each_task = pytest.mark.parametrize(
    "task", [CLASSIFICATION, BINARY, MULTILABEL, REGRESSION], ids=lambda task: task.name
)


def fit(kind: type, task: Task = CLASSIFICATION, n: int = N, memory_limit: Any = None, **settings: Any) -> Any:
    posterior = kind(MLP.build(task.outputs), task.likelihood, **settings)
    generator = torch.Generator().manual_seed(0)
    return posterior.fit([task.data(n=n)], 5, generator=generator, memory_limit=memory_limit, progress=False)


def dense(task: Task = CLASSIFICATION, n: int = N) -> tuple[Tensor, Tensor]:
    """The Gauss-Newton matrix, and the rows of new inputs."""
    model, (x, y) = MLP.build(task.outputs), task.data(n=n)
    return gauss_newton(model, x, y, task), jacobian(model, X_NEW)


def inverse(matrix: Tensor, alpha: float) -> Tensor:
    return torch.linalg.inv(matrix + alpha * torch.eye(len(matrix), dtype=torch.float64))


def fisher_score(task: Task, matrix: Tensor, rows: Tensor) -> Tensor:
    """The trace of the input's own Fisher information times the inverse, written out."""
    outputs = MLP.build(task.outputs)(X_NEW).detach()
    target = 0 if task is CLASSIFICATION else torch.zeros(task.outputs, dtype=torch.float64)  # no Hessian asks for it
    hessians = [torch.autograd.functional.hessian(lambda f: task.loss(f, target), f) for f in outputs]
    sigma = inverse(matrix, ALPHA)
    return torch.stack([(h @ j @ sigma @ j.T).trace() for h, j in zip(hessians, rows, strict=True)])


@each_task
def test_with_all_vectors_lanczos_is_linearized_laplace(task: Task) -> None:
    matrix, rows = dense(task)
    posterior = fit(LanczosLaplace, task, prior_precision=ALPHA)
    wanted = torch.einsum("nop,pq,noq->no", rows, inverse(matrix, ALPHA), rows)
    torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True), wanted, rtol=1e-6, atol=1e-8)
    exact = fit(LinearizedLaplace, task, prior_precision=ALPHA)
    torch.testing.assert_close(posterior.functional_variance(X_NEW, exact=True),
                               exact.functional_variance(X_NEW, exact=True), rtol=1e-6, atol=1e-8)  # fmt: skip


@each_task
def test_with_all_vectors_scod_matches_its_dense_formula(task: Task) -> None:
    posterior = fit(SCOD, task, prior_precision=ALPHA)
    wanted = fisher_score(task, *dense(task))
    torch.testing.assert_close(posterior.ood_score(X_NEW), wanted, rtol=1e-5, atol=1e-8)
    posterior.prior_precision = 3.0
    assert bool((posterior.ood_score(X_NEW) < wanted).all())


@pytest.mark.parametrize("kind", [LanczosLaplace, SCOD])
def test_variances_come_closer_as_the_budget_grows(kind: type) -> None:
    """The largest eigenvalues are found first; what is not found counts as open, so variances only fall."""
    matrix, rows = dense()
    wanted = torch.einsum("nop,pq,noq->no", rows, inverse(matrix, ALPHA), rows)
    errors = []
    for budget in (4, 16, 32, 51):
        posterior = fit(kind, memory_budget=budget, prior_precision=ALPHA)
        assert posterior.report.rank <= budget
        errors.append(float((posterior.functional_variance(X_NEW, exact=True) - wanted).norm() / wanted.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5


@pytest.mark.parametrize("budget", [5, 20, 51])
def test_the_local_ensemble_score_is_the_norm_outside_the_leading_eigenvectors(budget: int) -> None:
    matrix, rows = dense()
    posterior = fit(LocalEnsemble, memory_budget=budget)
    pairs = posterior.curvature
    torch.testing.assert_close(pairs.basis @ pairs.basis.T, torch.eye(pairs.rank, dtype=torch.float64))
    largest = torch.linalg.eigvalsh(matrix).flip(0)
    assert float(pairs.values[0]) == pytest.approx(float(largest[0]), rel=0.05)
    assert bool((pairs.values <= largest[: pairs.rank] * (1 + 1e-9)).all())
    left = torch.eye(len(matrix), dtype=torch.float64) - pairs.basis.T @ pairs.basis
    torch.testing.assert_close(
        posterior.ood_score(X_NEW), (rows @ left).square().sum((1, 2)).sqrt(), rtol=1e-8, atol=1e-9
    )


@pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")  # what the Hessian does not see is open
def test_a_local_ensemble_of_all_vectors_is_the_projected_posterior() -> None:
    n = 5  # 15 rows, of which the Hessian of the softmax leaves 10
    posterior = fit(LocalEnsemble, n=n)
    projected = nb.ProjectedPosterior(MLP.build(), hessian=True, prior_precision=1.0)
    projected.fit([CLASSIFICATION.data(n=n)], 5, projector=nb.projectors.ExactDual(), progress=False)
    wanted = projected.functional_variance(X_NEW, exact=True).sum(1).sqrt()
    assert posterior.report.rank == 10
    torch.testing.assert_close(posterior.ood_score(X_NEW), wanted, rtol=1e-6, atol=1e-8)


def test_the_sketched_score_comes_to_the_unsketched_one() -> None:
    """Averaged over maps; with a sketch of full size, and as many vectors as the rows have rank, it is the same."""
    n = 5
    wanted = fit(LocalEnsemble, n=n).ood_score(X_NEW).square()
    rows = dense(n=n)[1].square().sum((1, 2))
    errors = []
    for size in (16, 32, 64):
        found = []
        for seed in range(6):
            posterior = SketchedLanczos(MLP.build(), rank=15, sketch_size=size)
            posterior.fit([CLASSIFICATION.data(n=n)], generator=torch.Generator().manual_seed(seed), progress=False)
            found.append(posterior.ood_score(X_NEW))
        errors.append(float(((torch.stack(found) - wanted) / rows).square().mean().sqrt()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4


def test_a_few_sketched_vectors_capture_the_largest_curvature() -> None:
    """Far fewer vectors than the rank: the span is the Krylov space, whether it was sketched or not."""
    posterior = fit(SketchedLanczos, rank=8, sketch_size=64)
    scores = posterior.ood_score(X_NEW)
    lengths = dense()[1].square().sum((1, 2))
    assert bool((scores < lengths).all())
    assert bool((scores > fit(SketchedLanczos, rank=50, sketch_size=64).ood_score(X_NEW)).all())


def test_rank_and_sketch_stay_within_the_budget() -> None:
    """The paper's proportions: ten thirds of the budget in vectors, three tenths of the parameters in numbers."""
    posterior = fit(SketchedLanczos, memory_budget=4)
    assert posterior._fitted.state.basis.shape == (13, 4 * 51 // 13)
    for settings, advice in (
        ({"rank": 10, "sketch_size": 60, "memory_budget": 4}, "smaller rank or sketch_size"),
        ({"rank": 30, "sketch_size": 20}, "cannot tell 30 vectors apart"),
        ({"rank": 5, "sketch_size": 65}, "between 1 and 64"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"sketch_size": -1}, "sketch_size must be at least 1"),
    ):
        with pytest.raises(SettingsError, match=advice):
            fit(SketchedLanczos, **settings)


@pytest.mark.parametrize("kind", [LanczosLaplace, SCOD, LocalEnsemble, SketchedLanczos])
def test_a_budget_larger_than_the_memory_limit_is_refused(kind: type) -> None:
    with pytest.raises(SettingsError, match="lower memory_budget, or raise memory_limit"):
        fit(kind, memory_budget=51, memory_limit=20_000)
    assert fit(kind, memory_budget=5, memory_limit=40_000).report.rank <= 17
    with pytest.raises(SettingsError, match="memory_budget must be at least 1"):
        kind(MLP.build(), memory_budget=0)


def test_samples_of_lanczos_are_those_of_its_eigenpairs() -> None:
    """Sample by sample: noise, shrunk along the eigenvectors."""
    few, many = (fit(LanczosLaplace, memory_budget=budget, prior_precision=1e8) for budget in (3, 51))
    torch.testing.assert_close(few.directions, many.directions, rtol=1e-3, atol=1e-3)  # the prior is all there is
    few.prior_precision = many.prior_precision = ALPHA
    matrix, _ = dense()
    values, vectors = torch.linalg.eigh(matrix)
    root = vectors @ torch.diag((values.clamp_min(0) + ALPHA).rsqrt()) @ vectors.T
    many.prior_precision = 1e16
    noise = many._deviations() * 1e8
    many.prior_precision = ALPHA
    torch.testing.assert_close(many._deviations(), noise @ root, rtol=1e-5, atol=1e-6)


def test_vectors_of_another_length_are_refused(tmp_path: Path) -> None:
    """A file whose hash is right, and whose vectors go together, but not with the model."""
    fit(LocalEnsemble).save(path := tmp_path / "posterior")
    tensors, header = io.read(path)
    side = next(i for i, size in enumerate(tensors["basis"].shape) if size == 51)
    io.save(path, {**tensors, "basis": tensors["basis"].narrow(side, 0, 50)}, header)
    with pytest.raises(FileError, match=r"fit and save again .*vectors of 50 numbers"):
        nb.load(path, MLP.build())


class Words(torch.nn.Module):
    """Twelve outputs of four positions: rows are entries, because layers see several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.head = torch.nn.Linear(3, 5), torch.nn.Linear(5, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.seen(x))).mean(1)


@pytest.mark.parametrize("kind", [LanczosLaplace, LocalEnsemble, SketchedLanczos, SCOD])
def test_products_without_rows_find_the_same_as_products_with_rows(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = randn(9, 4, 3, generator=generator, dtype=torch.float64)
    y, chosen = torch.arange(9), list[str]()
    stored = JacobianRows.stored
    monkeypatch.setattr(JacobianRows, "stored", lambda rows, how: (chosen.append(how), stored(rows, how))[1])

    def score(need_rows: bool) -> Tensor:
        monkeypatch.setattr(method, "rows_are_less_work", lambda n_outputs, n_vectors: need_rows)
        torch.manual_seed(0)
        posterior = kind(Words().double().eval(), memory_budget=4)
        posterior.fit([(x, y)], 5, generator=torch.Generator().manual_seed(0), progress=False)
        scores: Tensor = posterior.ood_score(x)
        return scores

    torch.testing.assert_close(score(need_rows=False), score(need_rows=True), rtol=1e-6, atol=1e-9)
    assert chosen == ["matrix_free"] + (["device"] if kind is not SCOD else [])  # which reads the rows once


def test_rows_are_formed_where_that_is_less_work_than_the_products() -> None:
    model, x = Words().double().eval(), torch.randn(9, 4, 3, dtype=torch.float64)
    network = Network(model)
    rows = OutputJacobian(
        network, Examples([(x, torch.arange(9))], None, network.device), nb.likelihoods.Classification()
    )

    def storage(available: int, at_a_time: int, in_all: float) -> str:
        found = FitContext("", rows, 5, 0, available).multiplied(0, at_a_time, in_all)
        return "held" if isinstance(found, HeldRows) else found.storage

    much, little = 10**9, 1000
    assert storage(much, 4, 17) == "matrix_free"  # 12 outputs take as long as 18 vectors
    assert storage(much, 4, 18) == "held"
    assert storage(little, 17, 100) == "matrix_free"  # what does not fit would be formed for every product
    assert storage(little, 18, 100) == "recompute"
    network.forward_mode = False
    assert storage(much, 4, 17) == "held"
    assert storage(little, 4, 17) == "recompute"


def test_rows_that_do_not_fit_are_formed_as_many_at_a_time_as_memory_holds() -> None:
    """For a Gram matrix they are formed once for each part before them: few large parts take far less time."""
    generator = torch.Generator().manual_seed(0)
    network, x = Network(Words().double().eval()), randn(40, 4, 3, generator=generator, dtype=torch.float64)
    examples = Examples([(x, torch.arange(40) % 12)], None, network.device)
    rows = OutputJacobian(network, examples, nb.likelihoods.Classification())
    rows.working_bytes, needed = rows.costs().held_bytes // 10, rows.costs().held_bytes
    found = FitContext("", rows, 5, 0, needed + 100).held(100)
    assert found.working_bytes == needed // 8 * 7 > rows.working_bytes
    block = found.block(0, found.n_rows)
    assert len(block.parts) < len(rows.block(0, rows.n_rows).parts)
    torch.testing.assert_close(block.gram(torch.float64), rows.dense() @ rows.dense().T)
    assert FitContext("", rows, 5, 0, 200).held(100).working_bytes == rows.working_bytes  # it never gets smaller


@pytest.mark.parametrize(("rank", "wanted"), [(8, "matrix_free"), (9, "device")])
def test_sketched_lanczos_counts_two_products_for_each_vector(
    rank: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, chosen = JacobianRows.stored, list[str]()
    monkeypatch.setattr(JacobianRows, "stored", lambda rows, how: (chosen.append(how), stored(rows, how))[1])
    x = randn(9, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    posterior = SketchedLanczos(Words().double().eval(), memory_budget=20, rank=rank)
    posterior.fit([(x, torch.arange(9))], 5, progress=False)
    assert chosen == [wanted]  # 12 outputs take as long as 18 vectors
