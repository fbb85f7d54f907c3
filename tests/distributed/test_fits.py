"""A posterior that several processes fit together is the one that a single process fits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from support.joint_fits import CASES, QUICK, N, data, extended, fits, loaders, posterior
from support.together import together

pytestmark = pytest.mark.cpu
OTHERS = tuple(name for name in CASES if name not in QUICK)


@cache
def alone(parallel: str | None, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return fits(0, parallel, names)


def check_bits(n: int, names: tuple[str, ...]) -> None:
    for found in together(fits, n, "samples", names):
        for name, expected in alone("samples", names).items():
            for what, value in expected.items():
                same = torch.equal(found[name][what], value) if torch.is_tensor(value) else found[name][what] == value
                assert same, f"{name}: {what}"


def check_close(n: int, names: tuple[str, ...]) -> None:
    several = together(fits, n, "data", names)
    for found in several:
        for name in names:
            one, other = alone(None, names)[name], found[name]
            assert one["data"] == other["data"]
            for what in ("directions", "features", "sums", "answers", "variance"):
                torch.testing.assert_close(other[what], one[what], rtol=1e-5, atol=1e-6, msg=f"{name}: {what}")
            for what in ("n_data", "n_rows", "output_std", "prior_precision", "train_std", "kernel_dimension"):
                assert other["report"][what] == pytest.approx(one["report"][what], rel=1e-5, abs=1e-8), (
                    f"{name}: {what}"
                )
            assert torch.equal(other["directions"], several[0][name]["directions"]), "processes differ"


def test_samples_of_two_processes_are_the_same_bits() -> None:
    check_bits(2, QUICK)


def test_samples_that_are_shared_are_those_that_are_not() -> None:
    for name in QUICK:
        shared, plain = (alone(parallel, QUICK)[name]["directions"] for parallel in ("samples", None))
        torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-6)


def test_two_processes_with_half_of_the_data_fit_the_same_posterior() -> None:
    check_close(2, QUICK)


@pytest.mark.slow
def test_two_processes_fit_other_kinds_of_posteriors() -> None:
    check_bits(2, OTHERS)
    check_close(2, OTHERS)


@pytest.mark.slow
def test_four_processes_fit_the_same_posterior() -> None:
    check_bits(4, tuple(CASES))
    check_close(4, tuple(CASES))


@pytest.mark.slow
def test_more_samples_and_exact_variances_of_two_processes_are_those_of_one() -> None:
    for parallel in ("samples", "data"):
        one = extended(0, parallel)
        for found in together(extended, 2, parallel):
            for what, expected in one.items():
                torch.testing.assert_close(found[what], expected, rtol=1e-5, atol=1e-6, msg=f"{parallel}: {what}")
            assert parallel == "data" or torch.equal(found["directions"], one["directions"])


@pytest.mark.slow
def test_loaders_are_divided_and_predictions_come_in_order() -> None:
    one = posterior("outputs").directions
    answers = posterior("outputs").predict(data()[0])
    every = together(loaders, 2)
    assert sorted(i for found in every for i in found["read"]) == list(range(N)), "each example is read by one process"
    for found in every:
        for kind in ("DataLoader", "divided", "list", "one batch", "stream"):
            torch.testing.assert_close(found[kind], one, rtol=1e-5, atol=1e-6, msg=kind)
        torch.testing.assert_close(found["answers"].mean, answers.mean)
        torch.testing.assert_close(found["answers"].samples, answers.samples, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*found["arrays"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(*found["of arrays"])
        expected, of_tensor, of_list = found["scores"]
        torch.testing.assert_close(of_tensor, expected)
        torch.testing.assert_close(of_list, expected)
        planned, chosen = found["plans"]
        assert planned == chosen
        assert "blocks of 30 rows" in chosen
        assert "repeats examples" in found["repeats"]
        assert "without a DistributedSampler" in found["repeats"]
        assert "shuffles" in found["shuffles"]
        assert "1 examples for 2 processes" in found["too few"]
