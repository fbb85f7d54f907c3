"""A wrapper says how a model is run, not what it is: names, files and answers are those of the model inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import nullbayes as nb
from support.models import CLASSIFICATION, MLP

pytestmark = pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning")

X_NEW = MLP.inputs(4, torch.Generator().manual_seed(11))
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "over devices": nn.DataParallel,
    "over processes": nn.parallel.DistributedDataParallel,
    "compiled over processes": lambda model: torch.compile(
        nn.parallel.DistributedDataParallel(model), backend="eager"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """This process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.cpu  # gloo is for its memory
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_is_the_model_inside(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    def fit(model: nn.Module) -> nb.ProjectedPosterior:
        generator = torch.Generator().manual_seed(0)
        return nb.ProjectedPosterior(model, parameters="2.*").fit(
            [CLASSIFICATION.data()], 4, generator=generator, progress=False
        )

    model = MLP.build()
    plain, wrapped = fit(model), fit(wrap(MLP.build()))
    assert wrapped.sample().keys() == plain.sample().keys() == {"2.weight", "2.bias"}
    expected = plain.predict(X_NEW).samples
    torch.testing.assert_close(wrapped.predict(X_NEW).samples, expected)
    wrapped.save(tmp_path / "wrapped")
    plain.save(tmp_path / "plain")
    torch.testing.assert_close(nb.load(tmp_path / "wrapped", model).predict(X_NEW).samples, expected)
    torch.testing.assert_close(nb.load(tmp_path / "plain", wrap(MLP.build())).predict(X_NEW).samples, expected)
