"""Shared by all tests."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from support.no_torchvision import hide_broken_torchvision
from support.thinned import mark_slow

hide_broken_torchvision()  # before a test imports what looks for it
torch.set_num_threads(1)  # the matrices are tiny: threads that wait for each other take longer than the work


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where models and data lie, such as cuda (default: cpu)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu: about the CPU or its memory; left out on another --device")
    if config.getoption("--device") != "cpu":
        torch.set_default_device(config.getoption("--device"))  # before any test makes its data
        with warnings.catch_warnings():  # the first product in torch's backward thread warns about its own set-up
            warnings.simplefilter("ignore")
            one = torch.ones(2, 2, requires_grad=True)
            torch.autograd.grad((one @ one).sum(), one)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow(items)
    device = config.getoption("--device")
    if device == "cpu":
        return
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.skip(reason=f"what doctests print is for the CPU, not for {device}"))
        elif item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason=f"about the CPU, not about {device}"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What is drawn without a generator is the same in every run, whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def ordinary_default() -> Iterator[None]:
    """Experiments and benchmarks are told their device; where tensors lie by default is another matter."""
    before = torch.get_default_device()
    if before.type == "cpu":
        yield  # a default that is set costs time at every call of torch
        return
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(before)
