"""Measure what this machine does per second, for the cost model of ``nullbayes/projectors/auto.py``.

    python -m benchmarks.rates [--device cuda] [--threads 1]

prints the fields of its ``Rates``. Their ratios decide between methods, and the seconds of a plan follow from them.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import nullbayes as nb
from benchmarks.measure import median_seconds


def measure(device: torch.device, size: int, repeats: int = 5) -> dict[str, float]:
    """Return the rates of a device, by products of square matrices of that size and rows of a small network."""

    def product(dtype: torch.dtype) -> float:
        matrix = torch.randn(size, size, device=device).to(dtype)
        return 2.0 * size**3 / median_seconds(lambda: matrix @ matrix, device, repeats)

    single = torch.randn(16 * size**2, device=device)
    host = torch.empty(16 * size**2, pin_memory=device.type == "cuda")
    n_bytes = 4.0 * single.numel()
    model = nn.Sequential(nn.Conv2d(1, 8, 5), nn.Tanh(), nn.Flatten(), nn.Linear(4608, 10)).to(device)

    def forming(n: int) -> tuple[float, int]:
        x = torch.randn(n, 1, 28, 28, device=device)
        rows = nb.OutputJacobian(model, [(x, model(x).argmax(1))])  # a network that knew nothing would cause a warning
        return median_seconds(rows.dense, device, repeats), rows.n_rows * rows.n_columns

    (few, _), (many, entries) = forming(1), forming(256)
    return {
        "single": product(torch.float32),
        "double": product(torch.float64),
        "narrow": product(torch.float16) if device.type == "cuda" else product(torch.float32),
        "bandwidth": 2.0 * n_bytes / median_seconds(single.clone, device, repeats),
        "transfer": n_bytes / median_seconds(lambda: host.to(device, copy=True), device, repeats),
        "formed": entries / max(many - few, 1e-9),
        "chunk": few,
    }


def main() -> None:
    """Print the rates of a device."""
    parser = argparse.ArgumentParser(description="Measure the rates of the cost model.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    for name, value in measure(device, 8192 if device.type == "cuda" else 1024).items():
        print(f"{name:10} {value:.2g}")


if __name__ == "__main__":
    main()
