"""An experiment is run to the end whatever interrupts it, and steps of different settings never meet."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nullbayes.experiments import find, frame, toy
from nullbayes.experiments.frame import Estimate, Experiment, Mixed, Results, Settings, Store, write
from nullbayes.experiments.running import page, reproduce
from nullbayes.page import Page, Section
from support.processes import ENVIRONMENT

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
TINY = toy.Sizes(n=12, steps=40, samples=8, points=9)
SMALL = replace(find("toy"), run=partial(toy.run, sizes=TINY), estimate=partial(toy.estimate, sizes=TINY))
CHILD = """
import sys, time
from pathlib import Path
import torch
from functools import partial
from dataclasses import replace
from nullbayes.experiments import find, toy
from nullbayes.experiments.running import reproduce

torch.set_num_threads(1)

def say(line):
    print(line, flush=True)
    if line == "seed 0/loss-projected":
        time.sleep(600)  # here it is killed

sizes = toy.Sizes(n=12, steps=40, samples=8, points=9)
small = replace(find("toy"), run=partial(toy.run, sizes=sizes), estimate=partial(toy.estimate, sizes=sizes))
reproduce(small, Path(sys.argv[1]), data=None, device=torch.device("cpu"), seeds=1, say=say)
"""


def run_toy(folder: Path) -> tuple[Results, list[str]]:
    said: list[str] = []
    where = reproduce(SMALL, folder, data=None, device=CPU, seeds=1, say=said.append)
    return json.loads((where / "results.json").read_text()), said


def test_a_killed_run_goes_on_behind_its_last_finished_step(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], env=ENVIRONMENT, stdout=subprocess.PIPE)
    try:
        steps, deadline = tmp_path / "toy" / "steps" / "seed 0", time.monotonic() + 120
        assert child.stdout is not None
        while b"loss-projected" not in child.stdout.readline():
            assert child.poll() is None
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]
    assert [path.name for path in steps.glob("*.json")] == ["projected.json"]
    assert not (tmp_path / "toy" / "results.json").exists()
    left = steps / "loss-projected.json.1.part"
    left.write_text('{"seconds": 1.0, "resu')
    written = (steps / "projected.json").stat().st_mtime_ns

    resumed, said = run_toy(tmp_path)
    whole, _ = run_toy(tmp_path / "other")

    assert {"network/seed 0: done before", "seed 0/projected: done before", "seed 0/loss-projected"} <= set(said)
    assert said[1].startswith(f"Results go to {tmp_path / 'toy'}. 2 steps of an earlier run are there")
    assert (steps / "projected.json").stat().st_mtime_ns == written
    assert sorted(path.suffix for path in steps.iterdir()) == [".json"] * 6  # nothing of the killed run is left
    assert resumed["results"] == whole["results"]
    assert resumed["seconds"]["steps"].keys() == whole["seconds"]["steps"].keys()
    earlier = json.loads((tmp_path / "toy" / "clock.json").read_text())
    assert len(earlier) == 2  # two starts, both of which count
    assert resumed["seconds"]["total"] >= sum(earlier)


# --- several processes in one folder ----------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from nullbayes.experiments.frame import Store

def work():
    print("at it", flush=True)
    sys.stdin.readline()
    return {"by": "another"}

Store(Path(sys.argv[1]), say=lambda line: None).step("one", work)
"""


@pytest.fixture
def another(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that is at the step "one" until it gets a line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], env=ENVIRONMENT, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"at it\n"
        yield child
        child.kill()


def own() -> Results:
    return {"by": "this one"}


def test_a_step_that_another_process_is_at_is_waited_for(tmp_path: Path, another: subprocess.Popen[bytes]) -> None:
    said = list[str]()
    store = Store(tmp_path, said.append)
    assert store.attempt("one", own) is None
    assert store.attempt("two", own) == {"by": "this one"}
    assert another.stdin is not None
    threading.Timer(0.3, lambda: (another.stdin.write(b"\n"), another.stdin.flush())).start()
    assert store.step("one", own) == {"by": "another"}
    assert said == ["two", "one: done before"]
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["one.json", "two.json"]


def test_a_step_of_a_process_that_died_is_free(tmp_path: Path, another: subprocess.Popen[bytes]) -> None:
    store = Store(tmp_path, say=lambda line: None)
    assert store.attempt("one", own) is None
    another.kill()
    another.wait()
    assert store.attempt("one", own) == {"by": "this one"}
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["one.json"]


def test_a_lock_is_held_by_one_process_also_after_its_holder_failed(tmp_path: Path) -> None:
    lock, order = tmp_path / "locks" / "one", list[str]()

    def wait_for_it() -> None:
        with frame.alone(lock, wait=True):
            order.append("second")
            with frame.alone(lock, wait=False) as third:
                order.append(f"third: {third}")

    def fail() -> None:
        with frame.alone(lock, wait=True):
            waiting.start()
            time.sleep(0.2)
            order.append("first")
            raise KeyboardInterrupt

    waiting = threading.Thread(target=wait_for_it)  # locks are of open files: threads are like processes
    with pytest.raises(KeyboardInterrupt):
        fail()
    waiting.join()
    assert order == ["first", "second", "third: False"]


def test_a_key_of_a_step_may_be_one_of_weights(tmp_path: Path) -> None:
    store = Store(tmp_path, say=lambda line: None)
    assert store.weights("one", lambda: {"w": torch.ones(2)})["w"].tolist() == [1.0, 1.0]
    assert store.step("one", own) == store.step("one", own) == {"by": "this one"}


def test_a_step_that_failed_or_is_damaged_here_is_taken_from_elsewhere(tmp_path: Path) -> None:
    earlier = Store(tmp_path, say=lambda line: None)
    earlier.step("failed", lambda: {"failed": "out of memory", "again": True})
    earlier.step("done", lambda: {"by": "this one"})
    (tmp_path / "steps" / "damaged.json").write_text("{")
    store = Store(tmp_path, say=lambda line: None)
    taken = {key: store.put(key, {"by": "another"}, 1.0) for key in ("failed", "damaged", "done", "new")}
    assert taken == {"failed": True, "damaged": True, "done": False, "new": True}
    for key, was_taken in taken.items():
        assert store.done(key) == {"by": "another" if was_taken else "this one"}


def test_a_step_whose_file_was_removed_is_done_again(tmp_path: Path) -> None:
    store = Store(tmp_path, say=lambda line: None)
    store.step("one", own)
    (tmp_path / "steps" / "one.json").unlink()
    assert store.step("one", lambda: {"by": "again"}) == {"by": "again"}


def test_one_of_several_processes_cannot_discard_what_the_others_did(tmp_path: Path) -> None:
    run_toy(tmp_path)
    with frame.alone(tmp_path / "toy" / "lock", wait=True, shared=True):
        run_toy(tmp_path)  # beside another one
        with pytest.raises(Mixed, match="Another process is at work"):
            reproduce(SMALL, tmp_path, data=None, device=CPU, seeds=1, fresh=True, say=lambda line: None)
    assert (tmp_path / "toy" / "results.json").is_file()


@pytest.mark.parametrize("without", ["locks", "module"])
def test_a_folder_without_locks_is_used_by_one_process(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    if without == "module":
        monkeypatch.setattr(frame, "fcntl", None)
    else:
        monkeypatch.setattr(frame.fcntl, "flock", refuse)
    store = Store(tmp_path, say=lambda line: None)
    assert store.attempt("one", own) == store.step("two", own) == {"by": "this one"}
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["one.json", "two.json"]


# --- an experiment of two steps and a network, which notes what it does -----------------------------------------------


class Noted:
    """An experiment, with a list of the work that it did."""

    def __init__(self, needs: tuple[str, ...] = ()) -> None:
        self.done: list[str] = []
        self.experiment = Experiment(
            "mine", "It shows something.", needs, lambda settings: Estimate(7200.0 * settings.seeds, 3 * 10**9),
            self.run, lambda results: Page("Mine", f"Sum {results['sum']}.", [Section("One")]),
        )  # fmt: skip

    def work(self, key: str, result: Any) -> Results:
        self.done.append(key)
        return {"value": result}

    def run(self, settings: Settings) -> Results:
        found = [settings.step(f"{key}/step", lambda key=key: self.work(key, (len(key), 1.5))) for key in ("a", "bb")]
        model = settings.trained("net/work", lambda: torch.nn.Linear(2, 1), lambda model: self.work("net", None))
        return {"sum": sum(each["value"][0] for each in found), "found": found, "bias": model.bias.tolist()}

    def __call__(self, folder: Path, data: Path | None = None, **options: Any) -> tuple[Results, list[str]]:
        self.done, said = [], list[str]()
        where = reproduce(self.experiment, folder, data=data, device=CPU, say=said.append, **options)
        return json.loads((where / "results.json").read_text()), said


def test_results_say_how_they_were_made(tmp_path: Path) -> None:
    mine = Noted(("uci",))
    results, said = mine(tmp_path, tmp_path, quick=True, seeds=2)
    assert (tmp_path / "mine-quick" / "results.json").is_file()
    assert "4 hours" in said[0]
    assert "3.0 GB of memory" in said[0]
    assert "--quick" not in said[0]
    assert said[1].startswith(f"Results go to {tmp_path / 'mine-quick'}. If the run is stopped")
    _, said = mine(tmp_path, tmp_path, seeds=40)
    assert "3 days" in said[0]
    assert said[0].endswith("For a first look: --quick.")
    assert (results["name"], results["quick"], results["seeds"]) == ("mine", True, 2)
    assert results["command"] == "nullbayes reproduce mine --seeds 2 --device cpu --quick --data FOLDER"
    assert set(results["seconds"]["steps"]) == {"a/step", "bb/step", "net/work"}
    assert 0.0 <= sum(results["seconds"]["steps"].values()) <= results["seconds"]["total"]
    assert results["results"]["found"] == [{"value": [1, 1.5]}, {"value": [2, 1.5]}]  # as JSON has it, at once
    facts = page(mine.experiment, results).facts
    assert facts["Command"] == results["command"]
    assert torch.__version__ in facts["Versions"]
    if importlib.util.find_spec("nullbayes.page.html"):
        assert "Sum 3." in (tmp_path / "mine-quick" / "index.html").read_text()


def test_finished_steps_are_not_done_again_and_damaged_ones_are(tmp_path: Path) -> None:
    mine = Noted()
    first, _ = mine(tmp_path)
    assert mine.done == ["a", "bb", "net"]
    again, _ = mine(tmp_path)
    assert mine.done == []
    assert again["results"] == first["results"]
    assert again["seconds"]["steps"] == first["seconds"]["steps"]
    for damaged, redone in (("steps/bb/step.json", "bb"), ("weights/net/work.safetensors", "net")):
        path = tmp_path / "mine" / damaged
        path.write_bytes(path.read_bytes()[:-5])  # what a full disk leaves
        third, said = mine(tmp_path)
        assert mine.done == [redone]
        assert any("is damaged, so this step is done again" in line for line in said)
        assert third["results"] == first["results"]
    (tmp_path / "mine" / "clock.json").write_text("[1.0, ")
    assert mine(tmp_path)[0]["results"] == first["results"]


def test_steps_of_other_settings_are_refused_until_they_are_discarded(tmp_path: Path) -> None:
    (tmp_path / "data" / "uci").mkdir(parents=True)
    table = tmp_path / "data" / "uci" / "data.txt"
    table.write_text("1 2 3")
    mine = Noted(("uci",))
    mine(tmp_path, tmp_path / "data")
    with pytest.raises(Mixed, match=r"seeds: 3 there, 2 now.*another folder.*--fresh"):
        mine(tmp_path, tmp_path / "data", seeds=2)
    table.write_text("1 2 4")  # of the same size
    with pytest.raises(Mixed, match=r"\(data: "):
        mine(tmp_path, tmp_path / "data")
    assert mine.done == []
    note = tmp_path / "mine" / "note.txt"
    note.write_text("not ours")
    mine(tmp_path, tmp_path / "data", seeds=2, fresh=True)
    assert mine.done == ["a", "bb", "net"]
    assert note.read_text() == "not ours"


def test_a_step_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    mine = Noted()
    work, mine.work = mine.work, lambda key, result: {"value": float("nan")}  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not JSON compliant"):
        mine(tmp_path)
    assert not list((tmp_path / "mine" / "steps").rglob("step*.json*"))
    mine.work = work  # type: ignore[method-assign]
    assert mine(tmp_path)[0]["results"]["sum"] == 3


def test_a_full_disk_leaves_the_old_file_and_no_part_of_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")

    def make(part: Path) -> None:
        part.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write(path, make)
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "old"


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="toy"):
        reproduce("tyo", tmp_path, data=None, device=CPU)
    with pytest.raises(ValueError, match="1 or more"):
        reproduce("toy", tmp_path, data=None, device=CPU, seeds=0)
    other = tmp_path / "results.json"
    other.write_text('{"name": "mnist"}')
    with pytest.raises(Mixed, match="no results of svhn: it is of mnist"):
        reproduce("svhn", tmp_path, data=None, device=CPU, earlier=other)
    for text in (b"no JSON", b"\xff\x00", b"[1]"):
        other.write_bytes(text)
        with pytest.raises(Mixed, match=r"no results of svhn: pass the results\.json"):
            reproduce("svhn", tmp_path, data=None, device=CPU, earlier=other)


def test_a_fresh_run_does_not_discard_what_it_is_to_continue_from(tmp_path: Path) -> None:
    old = tmp_path / "svhn" / "results.json"
    write(old, lambda part: part.write_text('{"name": "svhn"}'))
    with pytest.raises(Mixed, match="which is to be discarded: move it elsewhere first"):
        reproduce("svhn", tmp_path, data=None, device=CPU, earlier=old, fresh=True)
    other = tmp_path / "other.json"
    other.write_text('{"name": "mnist"}')
    with pytest.raises(Mixed, match="it is of mnist"):
        reproduce("svhn", tmp_path, data=None, device=CPU, earlier=other, fresh=True)
    assert old.read_text() == '{"name": "svhn"}'
