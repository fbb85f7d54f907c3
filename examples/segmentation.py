"""A U-Net that marks discs in noisy images: one decision per image, one score per pixel.

Run: python examples/segmentation.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nullbayes as nb

SIZE = 16


class UNet(nn.Module):
    """Down, up, and a connection between: (n, 1, 16, 16) to logits (n, 2, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 12, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.head = nn.Conv2d(12, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return two logits per pixel."""
        wide = self.down(x)
        return self.head(torch.cat([wide, self.up(self.deep(wide))], dim=1))


def discs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images with a bright disc each, and which pixels are in it; the border is labelled -100, "do not mind"."""
    generator = torch.Generator().manual_seed(seed)
    centre = 4 + 8 * torch.rand(n, 2, 1, 1, generator=generator)
    radius = 2 + 2 * torch.rand(n, 1, 1, generator=generator)
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
    distance = (grid - centre).square().sum(1).sqrt() - radius
    labels = (distance < 0).long().masked_fill(distance.abs() < 0.3, -100)
    return (distance < 0).float()[:, None] + 0.3 * torch.randn(n, 1, SIZE, SIZE, generator=generator), labels


def main(n: int = 40, epochs: int = 120) -> dict[str, float]:
    """Train, fit, and find an image, and a part of an image, that are unlike the others."""
    torch.manual_seed(0)
    x, y = discs(n, 0)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    posterior = nb.LossProjectedPosterior(model).fit(x, y, progress=False)
    test, labels = discs(20, 1)
    check = posterior.check_fit((test, labels))
    print(check)

    # every pixel counts in new images: mask="all" says so
    strange = test + 3 * torch.rand(20, 1, 1, 1, generator=torch.Generator().manual_seed(2)) + 1
    auroc = nb.metrics.auroc(*(posterior.ood_score(x, "max_variance", mask="all") for x in (test, strange)))
    posterior.calibrate(*discs(100, 3), mask="all")
    alarms, flagged = (float(posterior.is_ood(x, mask="all").double().mean()) for x in (test, strange))
    print(f"AUROC of images that are too bright: {auroc:.3f}; flagged: {flagged:.0%}, of familiar ones {alarms:.0%}")
    patched = test.clone()
    patched[:, :, :4, :4] = 6.0
    kind, pixels = "mutual_information", posterior.ood_score(patched, "max_variance", per="position")
    inside, outside = pixels[:, :4, :4].mean(), pixels[:, 6:, 6:].mean()
    print(f"variance in a corner that is too bright {inside:.3g}, elsewhere {outside:.3g}; by {kind}: "
          f"{posterior.ood_score(patched, kind, mask='all').mean():.3g}")  # fmt: skip
    return {"accuracy": check.accuracy_posterior or 0.0, "accuracy of the network": check.accuracy_model or 0.0,
            "auroc": auroc, "inside": float(inside), "outside": float(outside),
            "flagged": flagged, "alarms": alarms}  # fmt: skip


if __name__ == "__main__":
    main()
