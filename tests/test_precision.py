"""Full precision while it lasts, and every switch as it was afterwards, whoever set it and by whichever API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nullbayes as nb
from models import CLASSIFICATION, MLP
from nullbayes.precision import full_precision, tensor_float32
from nullbayes.projectors import Projection, Projector

SWITCHES = {
    "fp32_precision": lambda: torch.backends.fp32_precision,
    "cudnn.fp32_precision": lambda: torch.backends.cudnn.fp32_precision,
    "cudnn.conv.fp32_precision": lambda: torch.backends.cudnn.conv.fp32_precision,
    "cuda.matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "mkldnn.fp32_precision": lambda: torch.backends.mkldnn.fp32_precision,
    "mkldnn.matmul.fp32_precision": lambda: torch.backends.mkldnn.matmul.fp32_precision,
    "mkldnn.conv.fp32_precision": lambda: torch.backends.mkldnn.conv.fp32_precision,
    "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "float32_matmul_precision": torch.get_float32_matmul_precision,
    "fp16": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "fp16 split": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k,
    "bf16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "fp16 accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
}

# what a user may have said before; each in a process of its own, since not all of it can be taken back
SETTINGS = {
    "nothing": "",
    "high": "torch.set_float32_matmul_precision('high')",
    "medium": "torch.set_float32_matmul_precision('medium')",
    "old matmul": "torch.backends.cuda.matmul.allow_tf32 = True",
    "old cudnn": "torch.backends.cudnn.allow_tf32 = False",
    "old both": "torch.backends.cudnn.allow_tf32 = False; torch.backends.cuda.matmul.allow_tf32 = True",
    "half": "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)",
    "all tf32": "torch.backends.fp32_precision = 'tf32'",
    "all ieee": "torch.backends.fp32_precision = 'ieee'",
    "all bf16": "torch.backends.fp32_precision = 'bf16'",
    "new cudnn": "torch.backends.cudnn.fp32_precision = 'tf32'",
    "new matmul": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "new conv": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "new CPU": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "all but one": "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'",
    "all and one": "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "old, then new": ("torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'"),
    "new, then old": ("torch.backends.cuda.matmul.fp32_precision = 'ieee'; torch.set_float32_matmul_precision('high')"),
}

# cudnn.conv is told apart by torch itself: never set, it is tf32; the older switch cannot put that back
FOLLOWING = ("cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision")


def switches() -> dict[str, object]:
    """What every switch says, or that it refuses to say anything."""
    said: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the older ones deprecated
        for name, read in SWITCHES.items():
            try:
                said[name] = read()
            except (RuntimeError, AttributeError) as error:
                said[name] = type(error).__name__
    return said


def is_full(said: dict[str, object]) -> bool:
    fine = {"ieee", "highest", False, "RuntimeError", "AttributeError"}
    return all(value in fine for name, value in said.items() if name != "fp16 split")


def nested(error: type[Exception] | None = None) -> None:
    """Enter both, one in the other, and see what is said inside."""
    with full_precision():
        assert is_full(switches()), switches()
        outer = switches()
        with tensor_float32():
            said = switches()
            assert said["cuda.matmul.fp32_precision"] == "tf32"
            assert said["cuda.matmul.allow_tf32"] in (True, "RuntimeError")
            assert said["mkldnn.matmul.fp32_precision"] == "ieee"
            with full_precision():
                assert is_full(switches()), switches()
            assert switches() == said
        assert switches() == outer
        if error is not None:
            raise error


def outcome(setting: str, *, entered: bool) -> list[str]:
    """In a process of its own: say what a user may say, enter and leave, and tell what can be told apart later."""
    exec(setting)
    before = switches()
    if entered:
        nested()
        assert switches() == before, f"{before} became {switches()}"
        with pytest.raises(KeyError):
            nested(KeyError)
        assert switches() == before, f"{before} became {switches()} after an error"
    torch.backends.fp32_precision = "bf16"  # what followed its parent still has to
    torch.backends.cudnn.fp32_precision = "ieee"
    said = switches()
    return [f"{name}: {said[name]}" for name in FOLLOWING]


def forked() -> None:
    """Print the outcome of every setting, each in a fork, with and without the blocks in between."""
    result = {}
    for name, setting in SETTINGS.items():
        for entered in (False, True):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    told = outcome(setting, entered=entered)
                except BaseException as error:
                    told = [f"{type(error).__name__}: {error}"]
                os.write(writer, json.dumps(told).encode())
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as pipe:
                result.setdefault(name, []).append(json.loads(pipe.read()))
            os.waitpid(child, 0)
    print(json.dumps(result))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[list[str]]]:
    paths = [str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {paths!r}; import test_precision; test_precision.forked()"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("setting", SETTINGS)
def test_switches_are_full_inside_and_as_they_were_afterwards(
    setting: str, outcomes: dict[str, list[list[str]]]
) -> None:
    untouched, entered = outcomes[setting]
    assert entered == untouched


def test_older_switches_can_be_read_inside() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            with torch.backends.cudnn.flags(enabled=False):  # reads them all
                pass
    finally:
        torch.set_float32_matmul_precision(before)


def matmul_on_gpu() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def test_tensor_float32_is_off_after_two_overlapping_users() -> None:
    with full_precision():
        first, second = tensor_float32(), tensor_float32()
        first.__enter__()
        second.__enter__()
        assert matmul_on_gpu() == "tf32"
        first.__exit__(None, None, None)
        assert matmul_on_gpu() == "tf32"
        second.__exit__(None, None, None)
        assert matmul_on_gpu() == "ieee"


def test_tensor_float32_of_one_thread_does_not_reach_another_in_full_precision() -> None:
    inside, leave = threading.Event(), threading.Event()

    def relaxed() -> None:
        with full_precision(), tensor_float32():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=relaxed)
    with full_precision():
        thread.start()
        assert inside.wait(60)
        assert matmul_on_gpu() == "ieee"
        with tensor_float32():  # now both allow it
            assert matmul_on_gpu() == "tf32"
        assert matmul_on_gpu() == "ieee"
        leave.set()
        thread.join()
        assert matmul_on_gpu() == "ieee"


class Watching(Projector):
    """A projector of one's own that looks at the switches."""

    rtol, atol = 1e-2, 0.0

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def _prepare(self, rows: nb.DenseRows) -> nb.DenseRows:
        self.seen.append(is_full(switches()) and not torch.is_autocast_enabled("cpu"))
        return rows

    def _apply(self, state: nb.DenseRows, noise: Tensor, *_: object) -> Projection:
        self.seen.append(is_full(switches()) and not torch.is_autocast_enabled("cpu"))
        return nb.projectors.ExactDual().apply(nb.projectors.ExactDual().prepare(state), noise)


def test_every_projector_computes_in_full_precision() -> None:
    watching = Watching()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu"):
            watching.apply(watching.prepare(nb.DenseRows(torch.eye(2, 5))), torch.ones(1, 5))
    finally:
        torch.set_float32_matmul_precision(before)
    assert watching.seen == [True, True]


@pytest.mark.parametrize("kind", [nb.ProjectedPosterior, nb.LossProjectedPosterior])
def test_autocast_around_a_posterior_changes_nothing(kind: type) -> None:
    model, (x, y) = MLP.build().float(), CLASSIFICATION.data(n=6)
    x = x.float()
    device = x.device.type

    def results() -> list[object]:
        posterior = kind(model).fit([(x, y)], 6, generator=torch.Generator().manual_seed(0), progress=False)
        prediction = posterior.predict(x)
        return [
            posterior.directions, prediction.mean, prediction.samples, posterior.ood_score(x, "entropy"),
            posterior.functional_variance(x, exact=True), posterior.check_fit([(x, y)]).nll_posterior,
            *(posterior.optimize_prior_precision([(x, y)], method=method) for method in ("closed_form", "marglik")),
            posterior.predict(x, pred_type="sampled").mean, posterior.report.train_std,
            nb.OutputJacobian(model, [(x, y)]).dense(), nb.LossJacobian(model, [(x, y)]).keep().dense(),
        ]  # fmt: skip

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nb.errors.NullBayesWarning)
        plain = results()
        with torch.autocast(device, dtype=torch.bfloat16):
            cast = results()
    for a, b in zip(plain, cast, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
