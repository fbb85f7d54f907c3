"""Processes that divide the parameters fit the posterior that one process fits, and predict with it together."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.distributed import Group
from nullbayes.jacobian.division import divide
from nullbayes.posteriors.arguments import Noise, normal
from nullbayes.testing import kernel_projector
from support.divided_fits import (
    DUAL,
    FINE,
    FITS,
    MATRICES,
    NEW,
    based,
    divided,
    everything,
    fits,
    noise,
    planned,
    story,
)
from support.joint_fits import data, network, posterior
from support.joint_work import noise_for
from support.projector_table import CASES
from support.together import together

pytestmark = pytest.mark.cpu
QUICK = ("outputs", "losses in blocks")
DIRECT, KRYLOV = ("direct", "one block"), ("direct", "blocks", "one block")
OTHERS = tuple(name for name in FITS if name not in QUICK)


@cache
def done(n: int, kinds: tuple[str, ...], names: tuple[str, ...]) -> list[Any]:
    return together(everything, n, kinds, names)


def check_rows(several: list[dict[str, Any]], kinds: tuple[str, ...]) -> None:
    for found in several:
        for name in MATRICES:
            a = CASES[name].matrix
            vectors = noise_for(a)
            expected = {
                "mv": vectors @ a.T,
                "rmv": vectors @ a.T @ a,
                "norms": (vectors @ a.T).norm(dim=1),
                "lengths": a.norm(dim=1),
                "gram": a @ a.T,
                "dense": a,
                "vectors": vectors.norm(dim=1),
            }
            for what, dense in expected.items():
                torch.testing.assert_close(found[f"{name} {what}"], dense, msg=f"{name} {what}")
            assert found[f"{name} frobenius"] == pytest.approx(nb.DenseRows(a).frobenius(), rel=1e-12)
            assert found[f"{name} passes"] == [2, 1], "as many rows as the process with most columns can"
            projected, rank = vectors @ kernel_projector(a), int(torch.linalg.matrix_rank(a))
            for kind in kinds:
                if f"{name}: {kind}" not in found:
                    continue
                directions, info = found[f"{name}: {kind}"]
                assert info.converged.all(), f"{name}: {kind}"
                torch.testing.assert_close(directions, projected, rtol=0.0, atol=1e-6, msg=f"{name}: {kind}")
                traces = a.shape[1] * (vectors * projected).sum(1) / vectors.square().sum(1)
                torch.testing.assert_close(info.traces, traces, rtol=1e-6, atol=1e-6, msg=f"{name}: {kind}")
                assert info.rank in (None, rank)
                assert info.rank is None or info.kernel_dimension == a.shape[1] - rank


def test_columns_of_two_processes_multiply_and_are_projected_on_as_one_matrix() -> None:
    check_rows([rows for rows, _ in done(2, DIRECT, QUICK)], DIRECT)


@pytest.mark.slow
def test_columns_of_four_processes_are_projected_on_by_all_projectors_that_use_gram_matrices() -> None:
    check_rows(together(divided, 2, tuple(DUAL)), tuple(DUAL))
    check_rows(together(divided, 4, KRYLOV), KRYLOV)


@cache
def alone(names: tuple[str, ...]) -> dict[str, Any]:
    return fits(0, None, names)


def check_fits(several: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    assert sum(found[names[0]]["own"] for found in several) == sum(p.numel() for p in network().parameters())
    for found in several:
        for name in names:
            close(found[name], alone(names)[name], name)
            same(found[name], several[0][name], name)


def close(found: Any, expected: Any, name: str) -> None:
    """Compare what a fit leaves behind, except for what depends on the number of processes."""
    for what in ("directions", "sampled", "features"):
        torch.testing.assert_close(found[what], expected[what], rtol=1e-5, atol=1e-6, msg=f"{name}: {what}")
    for what in ("mean", "variance", "probs", "samples"):
        one, other = (getattr(answers["prediction"], what) for answers in (expected, found))
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7, msg=f"{name}: {what}")
    for what in ("parameters", "scores"):
        assert list(found[what]) == list(expected[what])
        for key, value in expected[what].items():
            torch.testing.assert_close(found[what][key], value, rtol=1e-4, atol=1e-6, msg=f"{name}: {key}")
    for what, value in expected["check"].items():
        other = found["check"][what]
        assert other is value or other == pytest.approx(value, rel=1e-4, abs=1e-6), f"{name}: {what}"
    exact = ("n_data", "n_rows", "n_parameters", "n_samples", "rank", "converged", "tolerance", "collapsed")
    for what in exact:
        assert found["report"][what] == expected["report"][what], f"{name}: {what}"
    for what in ("kernel_dimension", "kernel_dimension_stderr", "prior_precision", "train_std", "output_std"):
        assert found["report"][what] == pytest.approx(expected["report"][what], rel=1e-5, abs=1e-8), f"{name}: {what}"


def same(found: Any, first: Any, name: str) -> None:
    """Compare two processes, whose answers are the same bits."""
    assert torch.equal(found["prediction"].samples, first["prediction"].samples), name
    assert found["report"] == first["report"], name
    assert found["check"] == first["check"], name


def test_two_processes_fit_the_posterior_of_one_and_predict_as_it_does() -> None:
    check_fits([fits for _, fits in done(2, DIRECT, QUICK)], QUICK)


@pytest.mark.slow
def test_two_processes_fit_other_kinds_of_posteriors() -> None:
    check_fits(together(fits, 2, "parameters", OTHERS), OTHERS)


@pytest.mark.slow
def test_four_processes_fit_the_posterior_of_one() -> None:
    some = ("losses in blocks", "regression", "formed again")
    check_fits(together(fits, 4, "parameters", some), some)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_noise_is_the_same_bits_for_any_number_of_processes(n: int) -> None:
    whole = nb.OutputJacobian(network(), [data()]).network
    for plain, other in together(noise, n):
        assert torch.equal(plain, Noise(None, 5).draw(whole, 3, 4))
        assert torch.equal(other, Noise(based, 5).draw(whole, 3, 4))


@pytest.mark.slow
def test_samples_are_the_dense_projection_of_the_noise() -> None:
    rows = nb.OutputJacobian(network(), [data()])
    seed = posterior("outputs", n_samples=2, projector=FINE)._need_measured().seed
    expected = normal(rows.network, seed, 0, 18) @ kernel_projector(rows.dense())
    for found in together(fits, 2, "parameters", ("outputs in blocks",)):
        torch.testing.assert_close(found["outputs in blocks"]["directions"], expected, rtol=0.0, atol=1e-6)


def check_story(n: int, folder: Path) -> None:
    path = str(folder / "posterior.safetensors")
    several = together(story, n, path)
    one = posterior("outputs", n_samples=14, projector=FINE)
    loaded = nb.load(path, network())
    torch.testing.assert_close(loaded.directions, one.directions, rtol=1e-5, atol=1e-6)
    assert loaded.report.n_parameters == one.report.n_parameters
    longer, exact = posterior("outputs", n_samples=16, projector=FINE), one.functional_variance(NEW[:2], exact=True)
    held_out = torch.randn(60, 5, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    one.calibrate(held_out, (held_out[:, 0] > 0).long())
    p_values, sampled, samples = one.p_value(NEW), one.predict(NEW, pred_type="sampled"), one.predict(NEW).samples
    one.tune(held_out, (held_out[:, 0] > 0).long())
    few = posterior("outputs", n_samples=4, projector=FINE).predict(NEW).samples
    for rank, found in enumerate(several):
        torch.testing.assert_close(found["prediction"].samples, samples, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(found["prediction"].samples, loaded.predict(NEW).samples)
        assert found["repr"] == repr(one)
        torch.testing.assert_close(found["p-values"], p_values)
        torch.testing.assert_close(found["in the model"], sampled.samples[1], rtol=1e-5, atol=1e-8)
        assert found["tuned"] == pytest.approx((one.prior_precision, one.temperature), rel=1e-4)
        assert found["memory"]["calls"] == {"build": 2, "predict": 3}, "again with half of the blocks and of the inputs"
        assert "memory ran out" in found["memory"]["notes"][0]
        torch.testing.assert_close(found["memory"]["samples"], few, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(found["exact"], exact, rtol=1e-5, atol=1e-10)
        torch.testing.assert_close(found["loaded"], longer.directions, rtol=1e-5, atol=1e-6)
        check_refusals(found, rank)


def check_refusals(found: dict[str, str], rank: int) -> None:
    assert "call posterior.predict(x) itself" in found["apart"]
    for what in ("copied", "pickled", "exported"):
        assert "posterior.save(path) in all of them" in found[what], what
    assert 'prepare(..., parallel="parameters")' in found["alone"]
    assert "holds NaN or Inf in its inputs" in found["nan"]
    assert "inputs hold NaN or Inf" in found["nan later"]
    assert ("Process 1: " in found["nan"]) == ("Process 1: " in found["nan later"]) == (rank != 1)
    assert "takes one part in 2 of the examples" in found["part of the data"]
    assert "different data" in found["other data"]
    assert "different networks" in found["other network"]
    assert "1 tensors, which 2 processes cannot divide" in found["few tensors"]
    assert "leave it out" in found["checkpoint"]
    for what in ("primal", "Lanczos", "Sketched", "coarse"):
        assert "needs all columns in one process" in found[what], what
    assert "DTensor" in found["DTensor"]
    assert "get_model_state_dict" in found["DTensor"]
    assert found["after"] == "no error", "the processes still understand each other"


@pytest.mark.slow
def test_a_divided_posterior_is_extended_saved_loaded_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    check_story(2, tmp_path)


@pytest.mark.slow
def test_a_plan_says_what_a_fit_does_and_counts_all_rows() -> None:
    for before, after, uneven in together(planned, 2):
        assert before == after
        assert "Gram matrices are summed" in after
        assert uneven.startswith("57 rows and 363 parameters")


def test_parts_are_whole_tensors_in_order_and_about_equal() -> None:
    sizes = (200, 40, 120, 3)
    assert divide(sizes, Group(0, 2)).sizes == [200, 163]
    assert divide(sizes, Group(0, 3)).sizes == [200, 160, 3]
    assert divide((1, 1, 1, 50), Group(0, 4)).sizes == [1, 1, 1, 50]
    assert divide((5, 1, 1, 1), Group(0, 4)).sizes == [5, 1, 1, 1]
    assert divide((1, 2, 3, 4, 5, 6, 7, 8, 9), Group(0, 3)).sizes == [15, 13, 17]
    last = divide(sizes, Group(1, 2))
    assert (last.tensors, last.columns) == ((1, 4), slice(200, 363))


def test_a_plan_for_divided_parameters_says_what_each_process_holds() -> None:
    one = nb.plan(network(), data(), 18, memory_limit=2**30)
    plan = nb.plan(network(), data(), 18, memory_limit=2**30, processes=2, parallel="parameters")
    assert (plan.n_rows, plan.n_parameters, plan.processes, plan.parameters_each) == (60, 363, 2, 200)
    assert "of at most 200 parameters in each process" in str(plan)
    assert plan.peak_bytes < one.peak_bytes
    for times, projector in ((7, nb.projectors.ExactDual), (10, nb.projectors.Alternating)):  # more rows than columns
        many = tuple(part.repeat(times, *(1,) * (part.ndim - 1)) for part in data())
        tall = nb.plan(network(), many, 18, processes=2, parallel="parameters")
        assert isinstance(tall.projector, projector)
        assert "A⊤A is never formed" in tall.reason
    with pytest.raises(nb.errors.SettingsError, match='must be "data" or "parameters"'):
        nb.plan(network(), data(), parallel="samples")


def test_a_process_by_itself_divides_nothing() -> None:
    made = posterior("outputs", n_samples=2, projector=FINE, parallel="parameters")
    assert made.directions.shape == (2, 363)
    assert made._network.division is None
