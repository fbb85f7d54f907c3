"""What an experiment is given, what it is, and the folder that keeps what it has done.

An experiment is a module of this package with one value ``EXPERIMENT``. Its work is cut into steps, each of which
returns plain numbers and strings; `Store.step` writes them down when the step is done, so that a run that was killed
goes on behind the last finished step. A page is made of the results alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nullbayes.experiments.measuring import seeded

if TYPE_CHECKING:
    from nullbayes.page import Page

Results = dict[str, Any]  # numbers, strings, lists and dictionaries of them: what JSON holds


class Missing(Exception):
    """What an experiment needs is not there; the message says what to do about it."""


@dataclass(frozen=True)
class Store:
    """A folder of finished steps and trained weights; each is there whole or not at all.

    Attributes
    ----------
    folder : Path
        Where they are.
    say : callable
        Told of every step, in one line.
    """

    folder: Path
    say: Callable[[str], None] = print

    def step(self, key: str, work: Callable[[], Results]) -> Results:
        """Return what ``work`` returns, from the file of an earlier run if there is one.

        Parameters
        ----------
        key : str
            The name of the step, such as "seed 0/KNN".
        work : callable
            Returns what JSON can hold.
        """
        path = self.folder / "steps" / f"{key}.json"
        if path.is_file():
            self.say(f"{key}: done before")
            found: Results = json.loads(path.read_text(encoding="utf-8"))
            return found
        self.say(key)
        done = work()
        self._write(path, lambda part: part.write_text(json.dumps(done, allow_nan=False), encoding="utf-8"))
        return done

    def weights(self, key: str, work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return tensors by name, from the file of an earlier run if there is one."""
        path = self.folder / "weights" / f"{key}.safetensors"
        if not path.is_file():
            self.say(key)
            found = {name: value.detach().cpu().contiguous() for name, value in work().items()}
            self._write(path, lambda part: save_file(found, part))
        return load_file(path)

    @staticmethod
    def _write(path: Path, write: Callable[[Path], Any]) -> None:
        """Write a file beside its place, then put it there in one move."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        write(part)
        os.replace(part, path)


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
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    data: Path | None = None
    seed: int = 0
    quick: bool = False
    store: Store | None = None

    def generator(self) -> torch.Generator:
        """Return a fresh generator with the seed of this run."""
        return torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal numbers on the device, the same ones at every call."""
        return torch.randn(*shape, generator=self.generator()).to(self.device)

    def with_seed(self, seed: int) -> Settings:
        """Return the same with another seed."""
        return replace(self, seed=seed)

    def trained(self, key: str, build: Callable[[], nn.Module], train: Callable[[nn.Module], object]) -> nn.Module:
        """Return a trained network on the device, from its stored weights if there are any.

        Parameters
        ----------
        key : str
            A name for the weights, such as "seed 0/network".
        build : callable
            Makes the network.
        train : callable
            Trains it in place, with the global generator, which is seeded.
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
    """

    name: str
    about: str
    needs: tuple[str, ...]
    estimate: Callable[[Settings], Estimate]
    run: Callable[[Settings], Results]
    page: Callable[[Results], Page]
