"""A posterior that several processes fit together is the one that a single process fits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from support.joint_fits import CASES, N, data, fits, loaders, posterior
from support.together import together

pytestmark = pytest.mark.cpu


@cache
def alone(parallel: str | None) -> dict[str, dict[str, Any]]:
    return fits(0, parallel)


@cache
def several(n: int, parallel: str) -> list[Any]:
    return together(fits, n, parallel)


def check_bits(n: int) -> None:
    for found in several(n, "samples"):
        for name, expected in alone("samples").items():
            for what, value in expected.items():
                same = torch.equal(found[name][what], value) if torch.is_tensor(value) else found[name][what] == value
                assert same, f"{name}: {what}"


def check_close(n: int) -> None:
    for found in several(n, "data"):
        for name in CASES:
            one, other = alone(None)[name], found[name]
            assert one["data"] == other["data"]
            for what in ("directions", "features", "sums", "variance"):
                torch.testing.assert_close(other[what], one[what], rtol=1e-5, atol=1e-6, msg=f"{name}: {what}")
            for what in ("n_data", "n_rows", "output_std", "prior_precision", "train_std", "kernel_dimension"):
                assert other["report"][what] == pytest.approx(one["report"][what], rel=1e-5, abs=1e-8), (
                    f"{name}: {what}"
                )
        assert all(torch.equal(found[name]["directions"], several(n, "data")[0][name]["directions"]) for name in CASES)


def test_samples_of_two_processes_are_the_same_bits() -> None:
    check_bits(2)


def test_samples_that_are_shared_are_those_that_are_not() -> None:
    for name in CASES:
        shared, plain = (alone(parallel)[name]["directions"] for parallel in ("samples", None))
        torch.testing.assert_close(shared, plain, rtol=1e-5, atol=1e-6)


def test_two_processes_with_half_of_the_data_fit_the_same_posterior() -> None:
    check_close(2)


@pytest.mark.slow
def test_four_processes_fit_the_same_posterior() -> None:
    check_bits(4)
    check_close(4)


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
        assert "repeats examples" in found["repeats"]
        assert "without a DistributedSampler" in found["repeats"]
        assert "shuffles" in found["shuffles"]
        assert "1 examples for 2 processes" in found["too few"]
