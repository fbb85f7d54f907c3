"""The checkpoint of another fit, a damaged one and what is none are refused, and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from models import CLASSIFICATION, MLP, batches
from nullbayes import io
from nullbayes.errors import FileError
from nullbayes.posteriors.checkpoint import Checkpoint
from nullbayes.projectors import Alternating, ExactDual, Krylov
from posteriors.checkpoints import KRYLOV, fit, interrupted, left, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore::nullbayes.errors.UnderfitWarning"),
    pytest.mark.usefixtures("at_every_sweep"),
]


# --- not the same fit -------------------------------------------------------------------------------------------------


def other_model() -> Any:
    model = MLP.build()
    model.state_dict()["2.bias"][0] += 1e-12
    return model


def other_data() -> list[tuple[Tensor, Tensor]]:
    x, y = CLASSIFICATION.data(n=12)
    x[7, 2] += 1e-12
    return [(x, y)]


def other_targets() -> list[tuple[Tensor, Tensor]]:
    x, y = CLASSIFICATION.data(n=12)
    return [(x, y.roll(1))]


def scaled(n: int, generator: torch.Generator) -> Tensor:
    return 2 * torch.randn(n, 51, generator=generator, dtype=torch.float64, device="cpu")


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "samples": (lambda: {"n_samples": 5}, "n_samples was 4 and is 5"),
    "tolerance": (lambda: {"tolerance": 0.5}, "tolerance was 0.01 and is 0.5"),
    "blocks": (lambda: {"projector": Krylov(Alternating(block_rows=6), rtol=1e-4)}, "projector was .*block_rows=6"),
    "projector": (lambda: {"projector": ExactDual()}, "projector was 'Krylov.* and is 'ExactDual"),
    "model": (lambda: {"model": other_model()}, "another model"),
    "data": (lambda: {"data": other_data()}, "another data"),
    "targets": (lambda: {"data": other_targets()}, "another data"),
    "fewer data": (lambda: {"data": [CLASSIFICATION.data(n=11)]}, "another data"),
    "hessian": (lambda: {"hessian": True}, "hessian was False and is True"),
    "rows": (lambda: {"kind": nb.LossProjectedPosterior}, "rows was 'OutputJacobian' and is 'LossJacobian'"),
    "parameters": (lambda: {"parameters": "2.*"}, "parameters was "),
    "limit": (lambda: {"memory_limit": "1GB"}, "memory_limit was None and is '1GB'"),
    "base": (lambda: {"base": scaled}, "another noise"),
    "seed": (lambda: {"generator": seeded(5)}, "generator had another seed"),
}


@pytest.mark.parametrize(("change", "fragment"), OTHERS.values(), ids=OTHERS)
def test_the_checkpoint_of_another_fit_is_refused_and_kept(
    change: Callable[[], dict[str, Any]], fragment: str, tmp_path: Path
) -> None:
    interrupted(tmp_path / "fit")
    before = (tmp_path / "fit").read_bytes()
    with pytest.raises(FileError, match=f"belongs to another fit: .*{fragment}.*delete the file, or pass another path"):
        fit(**change(), checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before
    assert left(tmp_path) == ["fit"]


def test_a_base_distribution_is_known_again(tmp_path: Path) -> None:
    interrupted(tmp_path / "fit", base=scaled)
    before = (tmp_path / "fit").read_bytes()
    with pytest.raises(FileError, match="another noise"):
        fit(base=lambda n, generator: 2 * scaled(n, generator), checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == before
    resumed = fit(base=scaled, checkpoint=tmp_path / "fit")
    assert torch.equal(resumed.directions, fit(base=scaled, generator=seeded()).directions)


def test_another_loss_of_ones_own_is_seen_in_the_rows(tmp_path: Path) -> None:
    def fit_loss(power: float) -> Any:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.abs().pow(power).sum(1) + targets

        posterior = nb.LossProjectedPosterior(MLP.build(), loss, prior_precision=1.0)
        data, projector = [CLASSIFICATION.data(n=12)], Alternating(block_rows=2, rtol=1e-3)
        return posterior.fit(data, 4, projector=projector, checkpoint=tmp_path / "fit", progress=False)

    def stop(self: Checkpoint, state: Any, **options: Any) -> None:
        save(self, state, **options)
        if state["counts"][0] == 3:
            raise RuntimeError("enough")

    save = Checkpoint.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "save", stop)
        with pytest.raises(RuntimeError, match="enough"):
            fit_loss(2.0)
    with pytest.raises(FileError, match="rows or its noise are other numbers"):
        fit_loss(3.0)
    assert left(tmp_path) == ["fit"]
    fit_loss(2.0)
    assert left(tmp_path) == []


def test_the_batches_that_the_data_come_in_do_not_matter(tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    fit(data=batches(*CLASSIFICATION.data(n=12), (5, 5, 2)), checkpoint=tmp_path / "fit", generator=seeded())
    assert left(tmp_path) == []


# --- not a checkpoint -------------------------------------------------------------------------------------------------


def test_a_posterior_is_not_overwritten(tmp_path: Path) -> None:
    posterior = fit()
    posterior.save(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    for projector in (KRYLOV, ExactDual(), "auto"):
        with pytest.raises(FileError, match="holds a posterior, not a checkpoint: pass another path"):
            fit(projector, checkpoint=tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == before
    assert torch.equal(nb.load(tmp_path / "file", MLP.build()).directions, posterior.directions)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 0.3, 0.9, -1])
def test_a_truncated_checkpoint_is_refused_and_kept(keep: float, tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    whole = (tmp_path / "fit").read_bytes()
    cut = whole[: int(keep * len(whole)) if isinstance(keep, float) else keep % len(whole)]
    (tmp_path / "fit").write_bytes(cut)
    with pytest.raises(FileError, match=r"not a checkpoint file, or it is truncated.*delete it, or pass another path"):
        fit(checkpoint=tmp_path / "fit")
    assert (tmp_path / "fit").read_bytes() == cut


@pytest.mark.parametrize("share", [0.4, 0.7, 0.999])
def test_a_single_bit_is_seen(share: float, tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    contents = bytearray((tmp_path / "fit").read_bytes())
    contents[int(share * len(contents))] ^= 1
    (tmp_path / "fit").write_bytes(contents)
    with pytest.raises(FileError, match=r"altered.*delete it, or pass another path"):
        fit(checkpoint=tmp_path / "fit")


@pytest.mark.parametrize("key", ["kind", "problem", "seed", "memory"])
def test_a_header_that_lacks_something_is_refused(key: str, tmp_path: Path) -> None:
    interrupted(tmp_path / "fit")
    tensors, header = io.read(tmp_path / "fit")
    del header[key]
    io.save(tmp_path / "fit", tensors, header)
    with pytest.raises(FileError, match=r"altered|not a checkpoint"):
        fit(checkpoint=tmp_path / "fit")
