"""What an experiment is given, what it is, and the folder that keeps what it has done.

An experiment is an `Experiment` in the dictionary ``EXPERIMENTS`` of a module of this package. Its work is cut into
steps, each of which returns plain numbers and strings; `Store.step` writes them down when the step is done, so that a
run that was killed goes on behind the last finished step. A page is made of the results alone.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.experiments.measuring import seeded

if TYPE_CHECKING:
    from nullbayes.page import Page

fcntl: Any = None
with contextlib.suppress(ImportError):  # Windows has none: there, processes do not share a run
    import fcntl

_Kept = TypeVar("_Kept")
_Sizes = TypeVar("_Sizes")
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
_DAMAGED = (ValueError, KeyError, TypeError, SafetensorError)  # of a file that was cut short, such as by a full disk
FAILURES = (nb.errors.NullBayesError, *_NO_MEMORY)  # of a method, after which a run goes on with the others
Results = dict[str, Any]  # numbers, strings, lists and dictionaries of them: what JSON holds


class Missing(Exception):
    """What an experiment needs is not there; the message says what to do about it."""


class Mixed(Exception):
    """Steps of other settings are there; the message says what to do about it."""


@dataclass(frozen=True)
class Store:
    """A folder of finished steps and trained weights; each is there whole or not at all.

    Several processes may share a folder: a step is done by one of them, and the lock of one that dies is free again.

    Attributes
    ----------
    folder : Path
        Where they are.
    say : callable
        Told of every step, in one line.
    finished : callable
        Called whenever something new was written.
    seconds : dict
        What each step took when it was done, in this run or an earlier one; filled as steps are asked for.
    """

    folder: Path
    say: Callable[[str], None] = print
    finished: Callable[[], None] = lambda: None
    seconds: dict[str, float] = field(default_factory=dict)
    _seen: set[Path] = field(default_factory=set)  # files that were read or made in this run

    def step(self, key: str, work: Callable[[], Results]) -> Results:
        """Return what ``work`` returns, as JSON gives it back, from the file of an earlier run if there is one.

        A failure that has ``"again": True`` (see `failure`) counts in this run alone: the next one tries the step
        again.
        """
        found = self._step(key, work, wait=True)
        assert found is not None
        return found

    def attempt(self, key: str, work: Callable[[], Results]) -> Results | None:
        """Do what `step` does, or return None where another process is at it."""
        return self._step(key, work, wait=False)

    def _step(self, key: str, work: Callable[[], Results], *, wait: bool) -> Results | None:
        def do(part: Path) -> None:
            start = time.perf_counter()
            done = work()
            kept = {"seconds": time.perf_counter() - start, "results": done}
            part.write_text(json.dumps(kept, allow_nan=False), encoding="utf-8")

        return self._kept(key, self._path(key), _read_step, do, wait=wait)

    def done(self, key: str) -> Results | None:
        """Return what a step gave in an earlier run; None if it is not done."""
        return self._finished(key, self._path(key), _read_step)

    def put(self, key: str, results: Results, seconds: float) -> bool:
        """Keep what a step gave elsewhere, and return True; False where the step is done already."""
        path = self._path(key)
        with contextlib.suppress(OSError, *_DAMAGED):
            if not _to_try_again(_read_step(path)[0]):
                return False
        text = json.dumps({"seconds": seconds, "results": results}, allow_nan=False)
        write(path, lambda part: part.write_text(text, encoding="utf-8"))
        return True

    def _path(self, key: str) -> Path:
        """Return the file of a step."""
        return self.folder / "steps" / f"{key}.json"

    def weights(self, key: str, work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors by name, from the file of an earlier run if there is one."""

        def read(path: Path) -> tuple[dict[str, Tensor], float]:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors, float((file.metadata() or {})["seconds"])

        def do(part: Path) -> None:
            start = time.perf_counter()
            found = {name: value.detach().cpu().contiguous() for name, value in work().items()}
            save_file(found, part, {"seconds": str(time.perf_counter() - start)})

        found = self._kept(key, self.folder / "weights" / f"{key}.safetensors", read, do, wait=True)
        assert found is not None
        return found

    def _kept(
        self,
        key: str,
        path: Path,
        read: Callable[[Path], tuple[_Kept, float]],
        do: Callable[[Path], None],
        *,
        wait: bool,
    ) -> _Kept | None:
        """Return what is in a file, which is made first if it is not there or damaged; None if another makes it."""
        if (found := self._finished(key, path, read)) is not None:
            return found
        with alone(self.folder / "locks" / path.relative_to(self.folder), wait=wait) as mine:
            if not mine:
                return None
            if (found := self._finished(key, path, read)) is not None:  # another process has made it
                return found
            self.say(f"{key}: {self._why(path, read)}, so this step is done again" if path.is_file() else key)
            for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):  # by a run that was killed
                left.unlink(missing_ok=True)
            write(path, do)
            found, self.seconds[key] = read(path)
            self._seen.add(path)
        self.finished()
        return found

    def _finished(self, key: str, path: Path, read: Callable[[Path], tuple[_Kept, float]]) -> _Kept | None:
        """Return what is in a file; None if it is not there, damaged, or a failure of another run to be tried again."""
        try:
            found, seconds = read(path)
        except (OSError, *_DAMAGED):
            return None
        if _to_try_again(found) and path not in self._seen:
            return None
        self.seconds[key] = seconds
        if path not in self._seen:
            self._seen.add(path)
            self.say(f"{key}: done before")
        return found

    def _why(self, path: Path, read: Callable[[Path], tuple[_Kept, float]]) -> str:
        """Say what is wrong with a file that is there and does not count as finished."""
        try:
            read(path)
        except _DAMAGED:
            return f"{path} is damaged"
        return "it failed before"


def _read_step(path: Path) -> tuple[Results, float]:
    """Return what a step gave, and its seconds."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return kept["results"], float(kept["seconds"])


def _to_try_again(found: object) -> bool:
    return isinstance(found, dict) and found.get("again") is True


def failure(error: Exception) -> Results:
    """Return the first line of one of `FAILURES` as results; memory that ran out may be there another time."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return {"failed": reason, "again": any(isinstance(each, _NO_MEMORY) for each in (error, error.__cause__))}


@contextlib.contextmanager
def alone(lock: Path, *, wait: bool, shared: bool = False) -> Iterator[bool]:
    """Hold a lock, which a process that dies gives back, and say whether it is held.

    It is not if another process holds it and this one does not ``wait``. A ``shared`` lock is held beside other
    processes that share it. The file is for nothing else, and stays: another one in its place would be another lock.
    """
    if fcntl is None:
        yield True
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w", encoding="utf-8") as file:
        held = True
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = False
        except OSError:  # a file system without locks: there, processes do not share a run
            pass
        yield held


def write(path: Path, make: Callable[[Path], Any]) -> None:
    """Let ``make`` write a file beside its place, then put it there in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        make(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class Settings:
    """What an experiment is given.

    Attributes
    ----------
    device : torch.device
        Where to compute.
    data : Path or None
        The folder with data sets.
    seed : int
        Of everything random.
    quick : bool
        Minutes on two cores instead of figures worth quoting.
    store : Store or None
        Where finished steps are kept; None keeps nothing.
    seeds : int
        How many seeds figures are averaged over, from ``seed`` on.
    methods : tuple of str
        Those that a study of many methods is to run; all where it is empty.
    earlier : mapping or None
        What ``results.json`` holds of another run of the same study, whose steps are not repeated.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: Path | None = None
    seed: int = 0
    quick: bool = False
    store: Store | None = None
    seeds: int = 3
    methods: tuple[str, ...] = ()
    earlier: Mapping[str, Any] | None = None

    def generator(self) -> torch.Generator:
        """Return a fresh generator with the seed of this run."""
        return torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers on the device, the same ones at every call."""
        return torch.randn(*shape, generator=self.generator()).to(self.device)

    def with_seed(self, seed: int) -> Settings:
        """Return the same with another seed."""
        return replace(self, seed=seed)

    def step(self, key: str, work: Callable[[], Results]) -> Results:
        """Do a step, or read what it gave in an earlier run; see `Store.step`."""
        if self.store is not None:
            return self.store.step(key, work)
        done: Results = json.loads(json.dumps(work(), allow_nan=False))
        return done

    def attempt(self, key: str, work: Callable[[], Results]) -> Results | None:
        """Do a step, or return None where another process is at it; see `Store.attempt`."""
        return self.step(key, work) if self.store is None else self.store.attempt(key, work)

    def done(self, key: str) -> Results | None:
        """Return what a step gave in an earlier run; see `Store.done`."""
        return None if self.store is None else self.store.done(key)

    def each_seed(self) -> list[Settings]:
        """Return the settings of every seed."""
        return [self.with_seed(seed) for seed in range(self.seed, self.seed + self.seeds)]

    def trained(self, key: str, build: Callable[[], nn.Module], train: Callable[[nn.Module], object]) -> nn.Module:
        """Return a trained network on the device, from its stored weights if there are any.

        ``train`` works in place, with the global generator, which is seeded.
        """

        def work() -> dict[str, Tensor]:
            with seeded(self.seed):
                model = build().to(self.device)
                train(model)
            return model.state_dict()

        with seeded(self.seed):
            model = build().to(self.device)
        model.load_state_dict(work() if self.store is None else self.store.weights(key, work))
        return model.eval()


@dataclass(frozen=True)
class Estimate:
    """What a run will take: seconds and bytes, to within a factor of two or three.

    Attributes
    ----------
    seconds : float
        Of the whole run.
    memory : int
        Bytes on the device.
    disk : int
        Bytes in the folder of the results.
    note : str
        What the estimate rests on.
    """

    seconds: float
    memory: int
    disk: int = 0
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """One experiment of the paper.

    Attributes
    ----------
    name : str
        As ``nullbayes reproduce`` takes it.
    about : str
        One sentence: what it shows.
    needs : tuple of str
        Folders of data, and packages beside those of the library.
    estimate : callable
        Says what a run with these settings will take.
    run : callable
        Does all steps and returns the results.
    page : callable
        Makes the page of the results.
    by_method : bool
        Whether it has a step per method, of which ``--methods`` may choose some.
    """

    name: str
    about: str
    needs: tuple[str, ...]
    estimate: Callable[[Settings], Estimate]
    run: Callable[[Settings], Results]
    page: Callable[[Results], Page]
    by_method: bool = False


def sized(work: Callable[[Settings, _Sizes], _Kept], full: _Sizes, quick: _Sizes) -> Callable[[Settings], _Kept]:
    """Return a function of settings that works at the sizes that they ask for."""
    return lambda settings: work(settings, quick if settings.quick else full)
