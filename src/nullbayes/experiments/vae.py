"""A variational autoencoder whose decoder is sampled from the loss-projected posterior.

The encoder stays as it is. The training data of the decoder are the means that the encoder gives for the training
images, and the images themselves; the loss of an example is its reconstruction loss, the cross-entropy of the pixels
that the autoencoder was trained with, passed to the library as a loss function. A number for what the paper shows as
pictures: the mean standard deviation of pixels at edges, divided by that in flat regions. Noise that was not projected,
of the same size in the logits, says how much of it a decoder shows anyway.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, conv2d, pad

import nullbayes as nb
from nullbayes.experiments.datasets import digits, read_images, there
from nullbayes.experiments.frame import Estimate, Experiment, Results, Settings, sized
from nullbayes.experiments.summary import as_asked, brief, mean, row
from nullbayes.page import Column, Gallery, Page, Picture, Section, Table

NAMES = ("mnist", "fashion-mnist")
LATENT = 8
POSTERIOR, CLOSED, CONTROL = "loss-projected", "loss-projected, closed form of the precision", "noise as it is"
WHERE = {"latent": "images decoded from the latent space", "test": "reconstructions of test images"}


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes
    ----------
    n : int
        Training images, all of which are rows.
    epochs : int
        Of training.
    hidden : int
        Units of the hidden layer on each side; 64 give about 100,000 parameters.
    samples : int
        Decoders; the paper has 20.
    judged : int
        Images that the number is a mean over.
    shown : int
        Of these, as pictures.
    """

    n: int = 60_000
    epochs: int = 30
    hidden: int = 64
    samples: int = 20
    judged: int = 500
    shown: int = 8


FULL, QUICK = Sizes(), Sizes(n=2000, epochs=30, judged=200)


def estimate(settings: Settings, sizes: Sizes) -> Estimate:
    """Say what a run takes."""
    cuda, names = settings.device.type == "cuda", _names(settings)
    rows = float(sizes.n) * 784 * sizes.hidden * (6e-12 if cuda else 3e-9) * sizes.samples
    seconds = len(names) * settings.seeds * (sizes.n * sizes.epochs * (3e-6 if cuda else 3e-5) + rows + 5.0)
    memory = sizes.n * (784 * 8 + 1000) + 4 * min(sizes.n, 20_000) * 785 * sizes.hidden
    return Estimate(seconds, int(memory) + 200 * 2**20, note=f"{sizes.n:,} rows a decoder")


# --- data and network -------------------------------------------------------------------------------------------------


def _names(settings: Settings) -> list[str]:
    return there(settings.data, *NAMES) or ["digits"]


def _images(settings: Settings, name: str, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Return training and test images, flat."""
    if name == "digits":
        x = digits()[0]
        x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
        n = min(sizes.n, 3 * len(x) // 4)
        known, new = x[:n], x[n:]
    else:
        known, new = (read_images(settings.data, name, split)[0] for split in ("train", "t10k"))
    return known[: sizes.n].flatten(1).to(settings.device), new[: sizes.judged].flatten(1).to(settings.device)


class VAE(nn.Module):
    """An encoder and a decoder with one hidden layer each.

    Parameters
    ----------
    pixels, hidden : int
        Their sizes.
    """

    def __init__(self, pixels: int, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, hidden), nn.Tanh(), nn.Linear(hidden, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, hidden), nn.Tanh(), nn.Linear(hidden, pixels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of each image, with one draw from the code: minus the evidence lower bound."""
        center, log_variance = self.encoder(x).chunk(2, 1)
        code = center + (0.5 * log_variance).exp() * torch.randn_like(center)
        divergence = 0.5 * (center.square() + log_variance.exp() - log_variance - 1.0).sum(1)
        loss: Tensor = reconstruction_loss(self.decoder(code), x) + divergence
        return loss


def reconstruction_loss(logits: Tensor, x: Tensor) -> Tensor:
    """Return the cross-entropy of each image, summed over its pixels."""
    return binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)


def _train(model: nn.Module, x: Tensor, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).to(x.device).split(64):
            optimizer.zero_grad()
            model(x[batch]).mean().backward()
            optimizer.step()


# --- the run ----------------------------------------------------------------------------------------------------------


def run(settings: Settings, sizes: Sizes) -> Results:
    """Train and sample on every data set, with every seed."""
    found: dict[str, Any] = {}
    for name in _names(settings):
        known, new = _images(settings, name, sizes)
        found[name] = {}
        for each in settings.each_seed():
            build = partial(VAE, known.shape[1], sizes.hidden)
            fit = partial(_train, x=known, epochs=sizes.epochs)
            model = each.trained(f"{name}/network, seed {each.seed}", build, fit)
            shown = sizes.shown if each.seed == settings.seed else 0
            work = partial(measure, each, model, known, new, sizes, shown)
            found[name][str(each.seed)] = each.step(f"{name}/seed {each.seed}", work)
    return {"data": found}


def measure(settings: Settings, model: Any, known: Tensor, new: Tensor, sizes: Sizes, shown: int) -> Results:
    """Fit the decoder's posterior; return its numbers, and pictures of the first images."""
    decoder: nn.Module = model.decoder
    with torch.no_grad():
        known_codes, new_codes = (model.encoder(x)[:, :LATENT] for x in (known, new))
    posterior = nb.LossProjectedPosterior(decoder, reconstruction_loss)
    with as_asked():
        posterior.fit(known_codes, known, sizes.samples, generator=settings.generator(), progress=False)
    precision = posterior.report.prior_precision
    posterior.prior_precision = "optimal"
    closed = posterior.report.prior_precision
    codes = {"latent": settings.normal(sizes.judged, LATENT), "test": new_codes}
    noise = settings.normal(sizes.samples, sum(p.numel() for p in decoder.parameters()))
    side = int(known.shape[1] ** 0.5)
    with torch.no_grad():
        network_loss = float(reconstruction_loss(decoder(new_codes), new).mean())
    found: Results = {
        "network loss": network_loss,
        "n parameters": sum(p.numel() for p in model.parameters()),
        "prior precision": precision,
        "closed form": closed,
        "null space": posterior.report.kernel_dimension / posterior.report.n_parameters,
        "pictures": [],
    }
    for where, z in codes.items():
        far = posterior.predict(z).samples.double()
        with torch.no_grad():
            center = decoder(z).double()
        logits = center + (far - center) * (closed / precision) ** 0.5  # samples scale with the precision
        plain = straight(decoder, noise, z)
        plain_logits = center + (plain - plain.mean(0)) * (logits.std(0).mean() / plain.std(0).mean())
        truth = new if where == "test" else None
        found[where] = {
            name: judge(samples.sigmoid(), side, truth)
            for name, samples in ((POSTERIOR, logits), (CLOSED, far), (CONTROL, plain_logits))
        }
        if where == "latent" and shown:
            pixels = logits[:, :shown].sigmoid()
            found["pictures"] = [
                {
                    "mean": _bytes(middle, 1.0, side),
                    "std": _bytes(std, float(std.max()), side),
                    "most": float(std.max()),
                }
                for middle, std in zip(pixels.mean(0), pixels.std(0), strict=True)
            ]
    return found


@torch.no_grad()
def straight(decoder: nn.Module, noise: Tensor, z: Tensor) -> Tensor:  # (S, P), (n, LATENT) -> (S, n, pixels)
    """Return how logits change along directions of the parameters, to first order: differences in double precision."""
    moved, step = copy.deepcopy(decoder).double(), 1e-4
    start = torch.nn.utils.parameters_to_vector(moved.parameters())
    changes = []
    for direction in noise.double():
        ends = []
        for sign in (1.0, -1.0):
            torch.nn.utils.vector_to_parameters(start + sign * step * direction, moved.parameters())
            ends.append(moved(z.double()))
        changes.append((ends[0] - ends[1]) / (2.0 * step))
    return torch.stack(changes)


def judge(pixels: Tensor, side: int, truth: Tensor | None) -> Results:
    """Return the mean standard deviation at edges and in flat regions, and how it goes with the error."""
    middle, std = pixels.mean(0), pixels.std(0)
    slope = sobel(middle.reshape(-1, 1, side, side)).flatten(1)
    edge = (slope > slope.quantile(0.9, dim=1, keepdim=True)).to(std)
    flat = (slope <= slope.median(dim=1, keepdim=True).values).to(std)
    at_edges, in_flat = ((std * part).sum(1) / part.sum(1).clamp_min(1.0) for part in (edge, flat))
    found = {
        "edge": float(at_edges.mean()),
        "flat": float(in_flat.mean()),
        "ratio": float(at_edges.mean() / in_flat.mean().clamp_min(1e-12)),
        "std": float(std.mean()),
    }
    if truth is not None:
        errors = (truth.to(middle) - middle).abs()
        inside = middle.clamp(1e-12, 1 - 1e-12)  # a saturated pixel would have an infinite loss
        found["loss"] = float(reconstruction_loss(inside.logit(), truth.to(middle)).mean())
        found["with error"] = float(torch.corrcoef(torch.stack([std.flatten(), errors.flatten()]))[0, 1])
    return found


def sobel(images: Tensor) -> Tensor:  # (n, 1, H, W) -> (n, 1, H, W)
    """Return the length of the gradient of brightness by Sobel's two filters."""
    across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]).to(images)
    filters = torch.stack([across, across.T])[:, None]
    return conv2d(pad(images, (1, 1, 1, 1), mode="replicate"), filters).square().sum(1, keepdim=True).sqrt()


def _bytes(values: Tensor, most: float, side: int) -> list[list[int]]:
    scaled = values / most if most > 0 else values
    rows: list[list[int]] = (255 * scaled).round().clamp(0, 255).int().reshape(side, side).tolist()
    return rows


# --- the page ---------------------------------------------------------------------------------------------------------


def page(results: Results) -> Page:
    """Return the page: pictures of means and standard deviations, and the number for each data set."""
    sections = [_section(name, list(seeds.values())) for name, seeds in results["data"].items()]
    parts = [
        f"{brief(_ratios(list(seeds.values()), 'latent', POSTERIOR), 1)} times on {name}"
        for name, seeds in results["data"].items()
    ]
    lead = (
        f"With sampled decoders, pixels at edges vary {' and '.join(parts)} as much as pixels in flat regions "
        f"(standard deviation; images decoded from the latent space)."
    )
    return Page("Sampled decoders of a variational autoencoder", lead, sections)


def _ratios(runs: list[Results], where: str, method: str) -> list[float]:
    return [run[where][method]["ratio"] for run in runs]


def _section(name: str, runs: list[Results]) -> Section:
    pictures = [
        Picture(found[kind], f"{label}{extra}", f"{label} of decoded image {i + 1}")
        for i, found in enumerate(runs[0]["pictures"])
        for kind, label, extra in (("mean", "mean", ""), ("std", "std", f", at most {found['most']:.2g}"))
    ]
    caption = f"{name}: means of decoded images and standard deviations of their pixels, white where they are largest"
    return Section(name, _found(runs), [Gallery(caption, pictures), _table(name, runs)])


def _found(runs: list[Results]) -> list[str]:
    """Say what the paper claims, and what the numbers say of it."""
    ours, control = (_ratios(runs, "latent", method) for method in (POSTERIOR, CONTROL))
    found = "is found" if min(ours) > 1.0 else "is not found with every seed"
    gain = mean(ours) / mean(control)
    if gain > 1.1:
        reason = f"The projection adds to what the decoder shows anyway: the ratio is {gain:.1f} times as large."
    elif gain < 0.9:
        reason = f"The edges are not the work of the projection: it makes the ratio smaller, by a factor of {gain:.2f}."
    else:
        reason = (
            f"The edges are not the work of the projection: with it the ratio is {gain:.2f} times that without. A "
            "pixel near one half varies most under any noise in the logits, and such pixels are at edges."
        )
    fit = [[run["test"][method]["with error"] for run in runs] for method in (POSTERIOR, CONTROL)]
    lost = {
        method: [run["test"][method]["loss"] - run["network loss"] for run in runs] for method in (POSTERIOR, CLOSED)
    }
    return [
        "The paper says that the standard deviations of pixels highlight features such as edges and contours, and "
        f"shows pictures. In numbers, the claim {found}: the mean standard deviation at edges (where Sobel's gradient "
        f"of the mean image is above its 90th percentile) is {brief(ours, 2)} times that in flat regions (below its "
        "median), for images decoded from the latent space.",
        f"Noise in the same parameters that was not projected, scaled to the same standard deviation in the logits, "
        f"gives {brief(control, 2)}. {reason}",
        f"On test images, the standard deviation of a pixel correlates with its error by {brief(fit[0], 2)}, that of "
        f"noise as it is by {brief(fit[1], 2)}.",
        f"The autoencoder has {runs[0]['n parameters']:,} parameters. The null space has "
        f"{mean([run['null space'] for run in runs]):.0%} of the decoder's. The prior precision of the library's "
        f"defaults, which keep the loss on training images, is {mean([run['prior precision'] for run in runs]):.3g}: "
        f"the mean image of the samples has a loss {mean(lost[POSTERIOR]):+.3f} nats from that of the decoder itself "
        f"(test images). With the closed form, {mean([run['closed form'] for run in runs]):.3g}, samples differ more: "
        f"the loss changes by {mean(lost[CLOSED]):+.1f} nats, and the ratio is "
        f"{brief(_ratios(runs, 'latent', CLOSED), 2)}.",
    ]


def _table(name: str, runs: list[Results]) -> Table:
    columns = [
        Column("samples"),
        Column("edge / flat", "Mean standard deviation at edges, divided by that in flat regions.", "high", 2),
        Column("at edges", "Mean standard deviation of pixels at edges.", digits=4),
        Column("flat", "Mean standard deviation of pixels in flat regions.", digits=4),
        Column("loss", "Cross-entropy of test images under the mean of the samples, in nats an image.", "low", 1),
        Column("with error", "Correlation of standard deviation and absolute error over test pixels.", "high", 2),
    ]
    rows = [
        row(f"{method}, {about}", [run[where][method] for run in runs], ("ratio", "edge", "flat", "loss", "with error"))
        for where, about in WHERE.items()
        for method in (POSTERIOR, CLOSED, CONTROL)
    ]
    return Table(f"{name}: pixels at edges and in flat regions", columns, rows)


EXPERIMENTS = {
    "vae": Experiment(
        "vae",
        "A variational autoencoder whose decoder is sampled: which pixels are uncertain.",
        NAMES,
        sized(estimate, FULL, QUICK),
        sized(run, FULL, QUICK),
        page,
    ),
}
