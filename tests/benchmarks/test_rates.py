"""The rates of the cost model can be measured on any machine."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from benchmarks.rates import measure

from nullbayes.limits import Rates


@pytest.mark.slow
def test_every_rate_of_the_cost_model_is_measured() -> None:
    found = measure(torch.device("cpu"), size=16, repeats=1)
    assert found.keys() == {field.name for field in dataclasses.fields(Rates)}
    assert all(value > 0 for value in found.values())
