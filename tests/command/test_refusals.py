"""What is wrong is said in one line on stderr, with an exit code: 2 if it was typed wrong, 1 if it failed."""

from __future__ import annotations

import io
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import nullbayes as nb
from nullbayes.command import main
from support.user_folder import example, inside

pytestmark = pytest.mark.cpu
MODEL = ["--model", "own:build", "--weights", "own.pt"]
POSTERIOR = ["posterior.safetensors", *MODEL]
TEST, OUT = ["--data", "own:test"], ["-o", "new"]

TYPED_WRONG = {
    "no command": ([], "required: COMMAND"),
    "unknown command": (["fly"], "invalid choice: 'fly'"),
    "missing option": (["plan", "--data", "own:train"], "required: --model. nullbayes plan --help"),
    "no colon": (["plan", "--model", "own", *TEST], "--model own: write it as package.module:name or file.py:name"),
    "no module": (["plan", "--model", "nowhere.deep:build", *TEST], "no module 'nowhere.deep', neither in this folder"),
    "no file": (["plan", "--model", "nowhere.py:build", *TEST], "there is no file nowhere.py"),
    "no attribute": (["plan", "--model", "own:bulid", *TEST], "own has no 'bulid'; it has build"),
    "no model": (["plan", "--model", "own:some.__doc__", *TEST], "own:some.__doc__ is a str: it should be a torch.nn"),
    "data without module": (["plan", *MODEL, "--data", "gone:x"], "--data: there is no module 'gone'"),
    "suffix": (["predict", *POSTERIOR, *TEST, "-o", "scores.txt"], "one of .csv, .npz, .parquet"),
    "page": (["report", *POSTERIOR, *TEST, "-o", "page.pdf"], "ends with .html"),
    "folder": (["predict", *POSTERIOR, *TEST, "-o", "none/a.csv"], "There is no folder"),
    "a folder": (["fit", *MODEL, *TEST, "-o", "."], ". is a folder: name a file for the posterior"),
    "a table for the posterior": (["fit", *MODEL, *TEST, "-o", "posterior.txt"], "to a .safetensors file, not to .txt"),
    "samples": (["plan", *MODEL, *TEST, "--samples", "no"], "'no' is not a whole number above zero"),
    "device": (["plan", *MODEL, *TEST, "--device", "abacus"], "write cpu, cuda or cuda:1"),
    "strangers without label": (
        ["evaluate", *POSTERIOR, *TEST, "--strangers", "own:noise"], "a label before the name, such as noise=own"),
    "strangers twice": (
        ["evaluate", *POSTERIOR, *TEST, "--strangers", "a=own:noise", "a=own:test"], "two sets called 'a'"),
    "rows twice": (
        ["evaluate", "posterior.safetensors", *POSTERIOR, *TEST, "--strangers", "a=own:noise"], "called 'posterior'"),
    "two forms": (["evaluate", *POSTERIOR, *TEST, "--strangers", "a=own:noise", "--json", "--markdown"], "choose one"),
    "a score without held-out data": (
        ["fit", *MODEL, "--data", "own:train", "--score", "entropy", *OUT], "--score needs --held-out"),
    "experiment": (["reproduce", "mnits"], "no experiment 'mnits': there are toy, mnist"),
    "method": (["reproduce", "mnist", "--methods", "KNNN"], "no method 'KNNN': there are ProjectedPosterior"),
    "name of a module": (["reproduce", "mnist", "--methods", "swag"], "no method 'swag'"),
    "methods of one": (["reproduce", "toy", "--methods", "KNN"], "toy is no study of many methods: --methods is for"),
    "from of one": (["reproduce", "toy", "--from", "no.json"], "toy is no study of many methods: --from is for"),
    "earlier results": (["reproduce", "mnist", "--from", "no.json"], "no file no.json with results of an earlier run"),
    "data folder": (["reproduce", "toy", "--data", "nowhere"], "no folder nowhere with data sets"),
    "shell": (["completion", "tcsh"], "invalid choice: 'tcsh'"),
}  # fmt: skip
FAILED = {
    "no weights": (["plan", "--model", "own:build", "--weights", "gone.pt", *TEST], "no file gone.pt with weights"),
    "weights of another": (["plan", "--model", "own:build", "--weights", "other.pt", *TEST],
        "missing are 0.weight, 0.bias, 2.weight and 1 more; unknown are weight, bias"),
    "no posterior": (["check", "gone", *MODEL, *TEST], "gone"),
    "untrained": (["check", "posterior.safetensors", "--model", "own:build", *TEST],
        "with other parameters: pass with --weights the weights that the posterior was fitted to."),
    "alpha": (["predict", *POSTERIOR, *TEST, "-o", "a.csv", "--alpha", "1.5"], "alpha"),
    "loss of a file": (
        ["predict", "loss.safetensors", *MODEL, *TEST, "-o", "a.csv"], "cannot hold: pass --likelihood own"),
    "one output": (["plan", "--model", "bad:one", "--data", "own:train"],
        "(softmax of one logit is always 1): use --likelihood binary or regression."),
    "softmax": (["plan", "--model", "bad:softmax", "--data", "own:train"],
        "or --output-fn with the name of a function such as lambda p: p.clamp_min(1e-12).log(), whose"),
    "no targets in a loader": (["check", *POSTERIOR, "--data", "bad:inputs"],
        "say how to take it apart with --batch-fn and the name of a function such as lambda batch: (inputs, targets)."),
    "no targets to evaluate": (["evaluate", *POSTERIOR, "--data", "bad:inputs", "--strangers", "a=own:noise"],
        "nullbayes: --data: Batch 0: A training batch must be a pair (inputs, targets)"),
    "not calibrated": (
        ["evaluate", "loss.safetensors", *MODEL, *TEST, "--likelihood", "bad:loss", "--strangers", "a=own:noise",
         "--scores", "combined"],
        'not calibrated for "combined": fit with --held-out first'),
    "unknown score of a fit": (
        ["fit", *MODEL, "--data", "bad:never", "--held-out", "own:held_out", "--score", "luck", *OUT],
        "--score luck: this posterior has no such score; it has max_variance, sum_variance,"),
    "arguments": (["plan", *MODEL, "--data", "own:some"], "own:some failed when it was called without arguments"),
    "none": (["plan", *MODEL, "--data", "bad:nothing"], "bad:nothing is None"),
    "import fails": (["plan", *MODEL, "--data", "worse:x"], "cannot be imported, ZeroDivisionError: division by zero"),
    "import lacks": (["plan", *MODEL, "--data", "lacking:x"], "imported, ModuleNotFoundError: No module named"),
    "code fails": (["plan", *MODEL, "--data", "bad:fails"], "ValueError: two lines"),
    "model fails": (["plan", "--model", "bad:crash", *TEST], "bad:crash failed"),
    "held-out is training data": (
        ["fit", *MODEL, "--data", "own:held_out", "--held-out", "own:held_out", *OUT], "training data of Projected"),
    "few held out": (["fit", *MODEL, "--data", "bad:never", "--held-out", "bad:few", *OUT],
        "--held-out bad:few has 20 examples, and calibrate needs at least 40, beside those that tune, about a third of "
        "all: pass 70 or more."),
    "few to tune and calibrate": (["fit", *MODEL, "--data", "bad:never", "--held-out", "bad:fifty", *OUT],
        "bad:fifty has 50 examples. About a third of them are kept for tuning, and the 29 that are left are too few "
        "for calibrate, which needs at least 40: pass more, or --no-tune, which leaves all of them"),
    "few held out without tuning": (
        ["fit", *MODEL, "--data", "bad:never", "--held-out", "bad:few", "--no-tune", *OUT], "at least 40: pass more."),
    "memory": (["plan", *MODEL, *TEST, "--memory-limit", "much"], "--memory-limit much is not a size"),
    "no gpu": (["plan", *MODEL, *TEST, "--device", "cuda"], "no GPU that torch can use"),
    "unknown score": (
        ["evaluate", *POSTERIOR, *TEST, "--strangers", "a=own:noise", "--scores", "luck"], "choose one of them."),
}  # fmt: skip
BAD = """
import torch
import own
def nothing(): pass
def fails(): raise ValueError("two\\nlines")
def one(): return torch.nn.Linear(4, 1)
def softmax(): return torch.nn.Sequential(own.build(), torch.nn.Softmax(-1))
def loss(f, y): return torch.nn.functional.cross_entropy(f, y, reduction="none")
def inputs(): return torch.utils.data.DataLoader(own.some(20, 5)[0], batch_size=10)
def crash(): return own.some()
def few(): return own.some(20, 5)
def fifty(): return own.some(50, 5)
class never:
    def __iter__(self): raise RuntimeError("this was read before the held-out data were counted")
def stops():
    import os, signal
    os.kill(os.getpid(), signal.SIGINT)
    return own.train()
def loud():
    import warnings
    warnings.warn("a warning\\nof two lines")
    return own.train()
"""


@pytest.fixture
def folder(story: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    for name, text in (("bad", BAD), ("worse", "1 / 0"), ("lacking", "import not_there_at_all")):
        (story / f"{name}.py").write_text(text)
    torch.save(torch.nn.Linear(4, 3, device="cpu").state_dict(), story / "other.pt")
    with inside(story):
        if not Path("loss.safetensors").exists():
            words = ["--posterior", "loss-projected", "--likelihood", "bad:loss", "-o", "loss.safetensors"]
            assert main(["fit", *MODEL, "--data", "own:train", *words]) == 0
        capsys.readouterr()
        yield story


def test_only_fit_is_run_by_several_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["predict", *POSTERIOR, *TEST, "-o", "never.csv"]) == 2
    assert "start it without torchrun" in capsys.readouterr().err
    assert not (folder / "never.csv").exists()


@pytest.mark.parametrize("case", [*TYPED_WRONG, *FAILED])
def test_refusal_is_one_line_with_its_code(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if case == "no gpu" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, (arguments, told) = (2, TYPED_WRONG[case]) if case in TYPED_WRONG else (1, FAILED[case])
    before = set(folder.iterdir())
    assert main(arguments) == code
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last.startswith("nullbayes: ")
    assert told in last
    others = [line for line in printed.err.splitlines()[:-1] if not line.startswith(("warning: ", "Calibrating"))]
    assert not others
    assert not printed.out
    assert {path for path in folder.iterdir() if path.name != "__pycache__"} <= before | {folder / "__pycache__"}


@pytest.mark.parametrize(
    "words",
    [
        ["fit", *MODEL, *OUT],
        ["plan", *MODEL],
        ["check", *POSTERIOR],
        ["evaluate", *POSTERIOR, "--strangers", "a=own:noise"],
        ["report", *POSTERIOR, "-o", "page.html"],
    ],
    ids=lambda words: words[0],
)
def test_inputs_without_targets_are_refused_in_words_of_the_command(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--data", "own:noise"]) == 1
    told = "--data own:noise is inputs without targets: it should be a pair (x, y), or a dataset or loader of pairs."
    assert capsys.readouterr().err == f"nullbayes: {told}\n"


def test_names_that_were_typed_are_repeated_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What messages of the library call in_data is --data; a file of this name is not."""
    assert main(["plan", *MODEL, "--data", "in_data:train"]) == 2
    assert "--data: there is no module 'in_data'" in capsys.readouterr().err


def test_held_out_inputs_without_targets_cannot_tune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", *MODEL, "--data", "bad:never", "--held-out", "own:noise", *OUT]
    assert main(words) == 1
    told = "--held-out own:noise is inputs without targets, which tuning needs: pass a pair (x, y), or --no-tune, which"
    assert told in capsys.readouterr().err


def test_the_way_to_an_error_is_shown_on_demand(folder: Path) -> None:
    with pytest.raises(nb.errors.SettingsError):
        main(["plan", *MODEL, *TEST, "--memory-limit", "much", "--debug"])


def test_ctrl_c_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)  # a process in the background may ignore it
    assert main(["plan", *MODEL, "--data", "bad:stops"]) == 130
    assert capsys.readouterr().err == "nullbayes: interrupted.\n"
    assert signal.getsignal(signal.SIGINT) is before


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_has_gone_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "stdout", Gone())
    assert main(["plan", *MODEL, *TEST]) == 141
    assert not stderr.getvalue()


def test_forgotten_weights_are_asked_for_by_their_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["fit", "--model", "own:build", "--data", "own:train", "-o", "untrained.safetensors"]) == 0
    said = capsys.readouterr().err
    assert "A posterior around it says nothing. Is --weights the file of the trained weights?" in said
    assert "load_state_dict" not in said


def test_warnings_are_one_line_each_and_no_result(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # pytest makes errors of them
        assert main(["plan", *MODEL, "--data", "bad:loud"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "warning: a warning of two lines\n"
    assert "warning" not in printed.out


def test_help_of_each_command_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fit", "check", "predict", "evaluate", "report", "plan", "reproduce", "demo"):
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        description, told = " ".join(text.split("\n\n")[1].split()), f"example:\n  nullbayes {name}"
        assert description.count(". ") == 1
        assert description.endswith(".")
        assert told in text
        assert "--json" in text
        assert example(name)[0] == name
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nullbayes {nb.__version__}\n"
