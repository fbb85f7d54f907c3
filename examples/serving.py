"""Save a calibrated posterior, load it elsewhere, and decide about one input at a time.

Run: python examples/serving.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import nullbayes as nb


def network() -> nn.Module:
    """Return the network; whoever loads the posterior builds the same and loads its weights."""
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))


def milliseconds(call: Callable[[], object], times: int) -> float:
    """Return the median time of a call."""
    call()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return 1000 * median(taken)


def main(n: int = 600, times: int = 50) -> dict[str, float]:
    """Fit, calibrate and save, then load and serve."""
    torch.manual_seed(0)
    data = load_digits()
    order = torch.randperm(len(data.target))  # the digits are sorted by who wrote them: mix them before they are split
    x, y = (torch.tensor(data.images, dtype=torch.float32)[:, None] / 16)[order], torch.tensor(data.target)[order]
    held_out, new = slice(n, n + 600), slice(n + 600, None)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:n]), y[:n]).backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        posterior = nb.LossProjectedPosterior(model).fit(x[:n], y[:n], progress=False)
        posterior.calibrate(x[held_out], y[held_out])
        posterior.save(Path(folder) / "digits.safetensors")
        torch.save(model.state_dict(), Path(folder) / "model.pt")

        # elsewhere
        served = network()
        served.load_state_dict(torch.load(Path(folder) / "model.pt", weights_only=True))
        loaded = nb.load(Path(folder) / "digits.safetensors", served)

    def answer(image: Tensor) -> tuple[int, bool]:
        """Return the digit, and whether the image is too strange to trust it."""
        one = image[None]
        return int(loaded.predict(one).probs.argmax()), bool(loaded.is_ood(one, alpha=0.01))

    noise = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    alarms, flagged = (float(loaded.is_ood(images, alpha=0.01).double().mean()) for images in (x[new], noise))
    print(f"a digit: {answer(x[new][0])}, noise: {answer(noise[0])}  (answer, strange or not)")
    print(f"flagged at a false-alarm rate of 1 %: {alarms:.1%} of new digits, {flagged:.1%} of images of noise")
    with torch.no_grad():
        plain = milliseconds(lambda: served(x[:1]), times)
    whole, decision = (milliseconds(lambda f=f: f(x[:1]), times) for f in (loaded.predict, loaded.is_ood))
    print(f"one input: the network {plain:.2f} ms, with its posterior {whole:.2f} ms, the decision {decision:.2f} ms")
    single = torch.cat([loaded.predict(image[None]).variance for image in x[n : n + 5]])
    together = posterior.predict(x[n : n + 5]).variance
    return {
        "error": float((single - together).abs().max() / together.max()),
        "false alarms": alarms, "flagged noise": flagged, "plain": plain, "whole": whole, "decision": decision,
    }  # fmt: skip


if __name__ == "__main__":
    main()
