"""Claim: on 2,000 images the projected posterior costs no accuracy, and tells other data apart, within three minutes.

LeNet (tanh, 44,426 parameters) is trained on the first images of Fashion-MNIST, both posteriors are fitted with their
defaults, and scored on the whole test set and, as strange data, on MNIST's. The folder given by ``--data`` (or
``NULLBAYES_DATA``) holds ``fashion-mnist`` and ``mnist`` with the original idx files, gzipped.

    .venv/bin/python benchmarks/lenet_fashion_mnist.py --data path/to/data
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb


def read_idx(path: Path) -> Tensor:
    """Read a gzipped idx file of bytes."""
    raw = gzip.decompress(path.read_bytes())
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8).reshape(shape)


def read_images(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 28, 28) between 0 and 1, and labels."""
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
    return images[:, None].float() / 255, read_idx(folder / f"{split}-labels-idx1-ubyte.gz").long()


def lenet(pool: type[nn.Module]) -> nn.Module:
    """Return the paper's network; which pooling it has the paper does not say."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), pool(2), nn.Conv2d(6, 16, 5), nn.Tanh(), pool(2), nn.Flatten(),
        nn.Linear(256, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Train with Adam at 1e-3, as the paper does."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def quality(probs: Tensor, targets: Tensor, inside: Tensor, outside: Tensor) -> dict[str, float]:
    """Return the scores of a method."""
    m = nb.metrics
    return {
        "accuracy": m.accuracy(probs, targets),
        "nll": m.nll(probs, targets),
        "ece": m.ece(probs, targets),
        "auroc": m.auroc(inside, outside),
        "fpr95": m.fpr95(inside, outside),
    }


def main() -> None:
    """Run the benchmark and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("NULLBAYES_DATA"), help="folder with the data sets")
    parser.add_argument("--n", type=int, default=2000, help="training images")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", choices=["max", "avg"], default="max")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parser.parse_args()
    if options.data is None:
        parser.error("say where the data are: --data, or NULLBAYES_DATA")
    x, y = (part[: options.n] for part in read_images(options.data / "fashion-mnist", "train"))
    x_test, y_test = read_images(options.data / "fashion-mnist", "t10k")
    x_other, _ = read_images(options.data / "mnist", "t10k")
    begin = time.perf_counter()
    torch.manual_seed(options.seed)
    model = lenet(nn.MaxPool2d if options.pool == "max" else nn.AvgPool2d)
    train(model, x, y, options.epochs)
    print(f"trained in {time.perf_counter() - begin:.1f} s")
    with torch.no_grad():
        own, other = model.eval()(x_test).softmax(1), model(x_other).softmax(1)
    results: dict[str, dict[str, float]] = {"network": quality(own, y_test, -own.amax(1), -other.amax(1))}
    loader = DataLoader(TensorDataset(x, y), batch_size=128)
    for kind in (nb.ProjectedPosterior, nb.LossProjectedPosterior):
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            posterior = kind(model).fit(loader, generator=torch.Generator().manual_seed(options.seed))
        fitted = time.perf_counter()
        prediction = posterior.predict(x_test)
        assert prediction.probs is not None
        strange = posterior.ood_score(x_other)
        done = time.perf_counter()
        scores = quality(prediction.probs, y_test, prediction.variance.amax(1), strange)
        results[kind.__name__] = {**scores, "fit_seconds": fitted - start, "predict_seconds": done - fitted}
        print(f"\n{kind.__name__}\n{posterior.report}")
    print(f"\n{'':<24}" + "".join(f"{name:>10}" for name in results["network"]) + f"{'fit s':>9}{'predict s':>11}")
    for name, line in results.items():
        print(f"{name:<24}" + "".join(f"{v:>10.1f}" if "seconds" in k else f"{v:>10.4f}" for k, v in line.items()))
    print(f"\nall of it: {time.perf_counter() - begin:.0f} s on {torch.get_num_threads()} threads")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
