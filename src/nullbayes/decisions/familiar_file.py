"""What is remembered of the training data, in the file of a posterior."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nullbayes.decisions.familiar import Familiar, Probe
from nullbayes.decisions.remembering import check_probe
from nullbayes.errors import FileError, SettingsError
from nullbayes.jacobian.batches import table_rows
from nullbayes.jacobian.features import FeatureReader
from nullbayes.jacobian.network import Network

_TABLE, _COUNT = "table.", "tables"  # names: of the tensors of rows, with a number, and how many there are
_EXACT = "exact"  # and the name of what says that checksums are of inputs as they are
_PROBE, _OUTPUTS = "probe.", "outputs"  # and a place in the inputs: names of the tensors of a probe


def to_file(familiar: Familiar | None) -> tuple[str | None, dict[str, Tensor]]:
    """Return what the header and the tensors of a file hold."""
    if familiar is None:
        return None, {}
    count = torch.tensor(len(familiar.table), dtype=torch.int64, device="cpu")
    found = {"features": familiar.features, "sums": familiar.sums, _COUNT: count}
    found |= {} if familiar.tuned is None else {"tuned": familiar.tuned}
    found |= {_EXACT: torch.ones_like(count)} if familiar.exact else {}
    found |= {} if familiar.looks is None else {"looks": familiar.looks}
    if familiar.probe is not None:
        found |= {_OUTPUTS: familiar.probe.outputs}
        found |= {f"{_PROBE}{place}": leaf for place, leaf in familiar.probe.inputs.items()}
    found |= {f"{_TABLE}{i}": tensor for i, tensor in enumerate(familiar.table)}
    return familiar.layer, {f"familiar.{name}": tensor for name, tensor in found.items()}


def from_file(
    layer: str | None, tensors: Mapping[str, Tensor], network: Network, n_data: int | None
) -> Familiar | None:
    """Return what a file holds, if it is that of so many training examples."""
    if layer is None:
        return None
    parts = ("features", "sums", "tuned", "looks", _COUNT)
    features, sums, tuned, usual, count = (tensors.get(f"familiar.{name}") for name in parts)
    names = [name for name in tensors if name.startswith(f"familiar.{_TABLE}")]
    table = [tensors.get(f"familiar.{_TABLE}{i}") for i in range(len(names))]
    start, outputs = f"familiar.{_PROBE}", tensors.get(f"familiar.{_OUTPUTS}")
    inputs = {name.removeprefix(start): leaf for name, leaf in sorted(tensors.items()) if name.startswith(start)}
    if (
        features is None or features.ndim != 2 or not features.numel() or features.dtype != network.dtype
        or not bool(torch.isfinite(features).all())
        or sums is None or sums.ndim != 1 or len(sums) != (n_data or len(sums)) or sums.dtype != torch.int64
        or count is None or count.numel() != 1 or int(count) != len(table)
        or (tuned is not None and (tuned.ndim != 1 or tuned.dtype != torch.int64))
        or (usual is not None and not _are_looks(usual))
        or any(part is None or not 1 <= part.ndim <= 2 or len(part) != len(features) for part in table)
        or (table and table_rows(table) is None)
        or (outputs is None) is not (not inputs)
        or (outputs is not None and (outputs.ndim != 2 or not outputs.numel() or outputs.dtype != network.dtype))
        or any(not leaf.ndim or outputs is None or len(leaf) != len(outputs) for leaf in inputs.values())
    ):  # fmt: skip
        msg = "The file lacks what was remembered of the training data: it was altered, fit and save again."
        raise FileError(msg)
    try:
        FeatureReader(network, layer)
    except SettingsError as error:
        msg = f"The file remembers features of a layer {layer!r}, which this model has not: fit and save again."
        raise FileError(msg) from error
    here = tuple(part.to(network.device) for part in table if part is not None)
    probe = None if outputs is None else Probe(inputs, outputs)
    if probe is not None:
        check_probe(probe, network)
    exact = f"familiar.{_EXACT}" in tensors
    return Familiar(layer, features.to(network.device), sums, here, tuned, probe, exact, usual)


def _are_looks(usual: Tensor) -> bool:
    """Whether a tensor has means and standard deviations of numbers, all of them finite."""
    shape = usual.ndim == 2 and len(usual) == 2 and usual.dtype == torch.float64
    return shape and bool(torch.isfinite(usual).all()) and bool((usual[1] > 0).all())
