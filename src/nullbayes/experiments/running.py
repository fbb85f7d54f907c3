"""Runs an experiment by its name: what it will take, its steps, ``results.json`` and the page."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nullbayes as nb
from nullbayes.experiments import find
from nullbayes.experiments.frame import Estimate, Experiment, Mixed, Settings, Store, alone, write
from nullbayes.experiments.measuring import environment
from nullbayes.page import Page, render

HEAD = 1 << 20  # bytes at the start of a data file by which it is known, with its size
MOST_FILES = 2000  # of which so much is read; of further ones the size alone counts
_LONG = 3600.0  # seconds beyond which a quick run is worth a thought
_LOCK = "lock"  # of the whole folder, which the processes at work in it share
KEPT = ("locks", "steps", "weights", "settings.json", "clock.json", "results.json", "index.html")


def reproduce(
    experiment: str | Experiment,
    folder: Path,
    *,
    data: Path | None,
    device: torch.device,
    quick: bool = False,
    seeds: int = 3,
    methods: tuple[str, ...] = (),
    earlier: Path | None = None,
    fresh: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Run an experiment of the paper and write its figures and its page.

    A run that was killed goes on behind the last finished step when it is started again.

    Parameters
    ----------
    experiment : str or Experiment
        One of `nullbayes.experiments.names`, or an experiment of your own.
    folder : Path
        Where the folder of the run is made: ``folder/NAME``, or ``folder/NAME-quick``.
    data : Path or None
        The folder with data sets.
    device : torch.device
        Where to compute.
    quick : bool
        Minutes on two cores instead of figures worth quoting.
    seeds : int
        How many seeds the figures are averaged over.
    methods : tuple of str
        Those that a study of many methods is to run; all where it is empty. A later run does the others.
    earlier : Path or None
        The ``results.json`` of another run of a study of many methods, such as one on another machine: its steps are
        not repeated, so that this run does those that it lacks.
    fresh : bool
        Discards what an earlier run left in the folder.
    say : callable
        Told what happens, line by line.

    Returns
    -------
    Path
        The folder of the run, with ``results.json`` and the page ``index.html``.

    Raises
    ------
    KeyError
        For a name that no experiment has.
    Missing
        If data or a package is not there.
    Mixed
        If the folder has steps of other settings, or the earlier run had others.
    """
    experiment = find(experiment) if isinstance(experiment, str) else experiment
    if seeds < 1:
        msg = f"seeds must be 1 or more, not {seeds}."
        raise ValueError(msg)
    where, found = folder / (f"{experiment.name}-quick" if quick else experiment.name), _read(earlier, experiment.name)
    if fresh:
        if earlier is not None and where.resolve() in earlier.resolve().parents:
            msg = f"{earlier} is in {where}, which is to be discarded: move it elsewhere first, or leave out --fresh."
            raise Mixed(msg)
        with alone(where / _LOCK, wait=False) as mine:
            if not mine:
                msg = f"Another process is at work in {where}: stop it before you discard what it has done."
                raise Mixed(msg)
            _discard(where)
    with alone(where / _LOCK, wait=True, shared=True):
        asked = Settings(device=device, data=data, quick=quick, seeds=seeds, methods=methods, earlier=found)
        return _run(experiment, where, asked, say)


def _read(earlier: Path | None, name: str) -> Mapping[str, Any] | None:
    """Return what an earlier run of the same experiment found."""
    if earlier is None:
        return None
    try:
        found: Any = json.loads(earlier.read_text(encoding="utf-8"))
    except ValueError:  # it is no JSON, or no text at all
        found = None
    if not isinstance(found, dict):
        msg = f"{earlier} has no results of {name}: pass the results.json of an earlier run."
        raise Mixed(msg)
    if found.get("name") != name:
        msg = f"{earlier} has no results of {name}: it is of {found.get('name', 'no experiment')}."
        raise Mixed(msg)
    return found


def _run(experiment: Experiment, where: Path, asked: Settings, say: Callable[[str], None]) -> Path:
    """Do all steps, and write what came out."""
    data, device, quick, seeds = asked.data, asked.device, asked.quick, asked.seeds
    record = environment(device, _checkout())
    with alone(where / "locks" / "settings", wait=True):
        _same_settings(where, _identity(experiment, data, record, quick, seeds))
    clock = _RunClock(where)
    store = Store(where, say, clock.note)
    settings = replace(asked, store=store)
    say(_announcement(experiment, experiment.estimate(settings), settings))
    say(_whereabouts(where))

    found = experiment.run(settings)

    clock.note()
    results = {
        "name": experiment.name,
        "about": experiment.about,
        "quick": quick,
        "seeds": seeds,
        "command": _command(experiment, data, device, quick, seeds),
        "environment": record,
        "seconds": {"total": clock.total(), "steps": dict(store.seconds)},
        "results": found,
    }
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    write(where / "results.json", lambda part: part.write_text(text, encoding="utf-8"))
    shown = render(page(experiment, results))
    write(where / "index.html", lambda part: part.write_text(shown, encoding="utf-8"))
    return where


def page(experiment: Experiment, results: dict[str, Any]) -> Page:
    """Return the page of what ``results.json`` holds, with how it was run."""
    record, made = results["environment"], experiment.page(results["results"])
    versions = ", ".join(f"{name} {record[name]}" for name in ("nullbayes", "torch", "numpy"))
    facts = {
        "Command": results["command"],
        "Commit": record["commit"] or "not a checkout",
        "Versions": f"{versions}, Python {record['python']}",
        "Device": record["device_name"],
        "Seconds": f"{results['seconds']['total']:.0f}, over all starts of the run",
        "Seeds": str(results["seeds"]),
        "Date": record["date"],
    }
    return replace(made, facts={**facts, **made.facts})


# --- what is said and written -----------------------------------------------------------------------------------------


def _announcement(experiment: Experiment, estimate: Estimate, settings: Settings) -> str:
    disk = f" and {_size(estimate.disk)} of disk" if estimate.disk else ""
    note = f"\nBehind this estimate: {estimate.note}." if estimate.note else ""
    quick = " For a first look: --quick." if estimate.seconds > _LONG and not settings.quick else ""
    return (
        f"{experiment.name}: {experiment.about} On this device ({settings.device.type}) it takes about "
        f"{_duration(estimate.seconds)}, {_size(estimate.memory)} of memory{disk}.{quick}{note}"
    )


def _whereabouts(folder: Path) -> str:
    """Return where results go, and what is there already."""
    done = sum(1 for kind in ("steps/**/*.json", "weights/**/*.safetensors") for _ in folder.glob(kind))
    before = f" {done} steps of an earlier run are there and are not repeated; --fresh discards them." if done else ""
    return f"Results go to {folder}.{before} If the run is stopped, the same command continues it."


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} seconds"


def _size(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{max(1.0, n / 1e6):.0f} MB"


def _command(experiment: Experiment, data: Path | None, device: torch.device, quick: bool, seeds: int) -> str:
    """Return how to repeat the run; the folder of the data is another one elsewhere."""
    parts = ["nullbayes", "reproduce", experiment.name, "--seeds", str(seeds), "--device", device.type]
    return " ".join(
        [*parts, *(["--quick"] if quick else []), *(["--data", "FOLDER"] if data and experiment.needs else [])]
    )


class _RunClock:
    """Seconds since the start of this run and those of earlier runs, each up to its last finished step."""

    def __init__(self, folder: Path) -> None:
        self._path, self._start = folder / "clock.json", time.perf_counter()
        try:
            self._before = [float(seconds) for seconds in json.loads(self._path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, TypeError):  # a first run, or a file that was cut short
            self._before = []

    def _runs(self) -> list[float]:
        return [*self._before, time.perf_counter() - self._start]

    def note(self) -> None:
        """Write down how long the run has taken so far."""
        write(self._path, lambda part: part.write_text(json.dumps(self._runs()), encoding="utf-8"))

    def total(self) -> float:
        """Return the seconds of all runs."""
        return sum(self._runs())


# --- steps of other settings are not mixed ----------------------------------------------------------------------------


def _checkout() -> Path:
    """Return the folder of the checkout that runs; one that is none for an installed library."""
    root = Path(nb.__file__).parents[2]
    return root if (root / ".git").exists() and (root / "pyproject.toml").is_file() else Path(nb.__file__)


def _identity(
    experiment: Experiment, data: Path | None, record: dict[str, Any], quick: bool, seeds: int
) -> dict[str, Any]:
    """Return all that the figures depend on."""
    return {
        "name": experiment.name,
        "quick": quick,
        "seeds": seeds,
        "data": _data_identity(data, experiment.needs),
        **{key: record[key] for key in ("nullbayes", "commit", "torch", "device")},
    }


def _data_identity(data: Path | None, needs: tuple[str, ...]) -> str | None:
    """Return a hash of the names, sizes and heads of the data files that an experiment needs."""
    if data is None:
        return None
    roots = [path for need in needs for pattern in (need, f"{need}-*") for path in data.glob(pattern)]
    files = [file for root in roots for file in ([root] if root.is_file() else root.rglob("*")) if file.is_file()]
    digest = hashlib.sha256()
    for i, file in enumerate(sorted(set(files))):
        digest.update(f"{file.relative_to(data)} {file.stat().st_size}\n".encode())
        if i < MOST_FILES:
            with file.open("rb") as opened:
                digest.update(opened.read(HEAD))
    return digest.hexdigest()


def _same_settings(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse a folder with steps of other settings; write down those of this run."""
    path = folder / "settings.json"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or cut short: then it is not known whose the steps are
        before = {}
    if before == identity:
        return
    if any((folder / name).exists() for name in ("steps", "weights")):
        differing = [key for key in identity if before.get(key) != identity[key]] if before else []
        named = "; ".join(f"{key}: {before.get(key)} there, {identity[key]} now" for key in differing)
        msg = (
            f"{folder} has steps of a run with other settings ({named or 'unknown ones'}). Choose another folder, or "
            f"discard them with --fresh."
        )
        raise Mixed(msg)
    write(path, lambda part: part.write_text(json.dumps(identity, indent=1), encoding="utf-8"))


def _discard(folder: Path) -> None:
    """Remove what a run writes, and nothing else."""
    for name in KEPT:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
