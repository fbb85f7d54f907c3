"""Run a function in several processes at once, joined by torch.distributed over gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")  # which imports torch once for all processes
_CONTEXT.set_forkserver_preload(["torch", "nullbayes", "support.together", "support.projector_table"])
_LIMIT = 100.0  # seconds, after which a process that hangs is killed
DIED = "died"  # the outcome of a process that left nothing


def together(work: Callable[..., Any], n: int, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returns in each of n processes: a value, an exception as its text, or DIED."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(target=_run, args=(work, rank, n, folder, arguments), daemon=True) for rank in range(n)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + _LIMIT
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
            if process.is_alive():
                process.kill()
        return [_left(Path(folder) / str(rank)) for rank in range(n)]


def _left(path: Path) -> Any:
    return torch.load(path, weights_only=False) if path.exists() else DIED


def _run(work: Callable[..., Any], rank: int, n: int, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=n)
    try:
        found = work(rank, *arguments)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        Path(folder, f"{rank}.trace").write_text(traceback.format_exc())
        if os.environ.get("SHOW_TRACES"):
            traceback.print_exc()
    torch.save(found, Path(folder) / f"{rank}.part")
    os.replace(Path(folder) / f"{rank}.part", Path(folder) / str(rank))
    os._exit(0)  # processes that failed have nobody to say goodbye to
