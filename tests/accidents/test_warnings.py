"""Nothing the library does on good data warns, not even under ``python -W error``."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import python

SCRIPT = """
import itertools
import sys
import torch
from torch import nn
import nullbayes as nb


class Words(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 6), nn.Linear(6, outputs)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1).tanh())


class Attention(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.mix = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, x):
        return self.head(self.mix(x).mean(1))


NETWORKS = {
    "linear": (lambda o: nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, o)), lambda n: torch.randn(n, 5)),
    "convolution": (
        lambda o: nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, o)),
        lambda n: torch.randn(n, 1, 8, 8),
    ),
    "attention": (Attention, lambda n: torch.randn(n, 4, 8)),
    "embedding": (Words, lambda n: torch.randint(11, (n, 7))),
}
TASKS = {
    "classification": (3, lambda n: torch.randint(3, (n,))),
    "regression": (2, lambda n: torch.randn(n, 2)),
}

torch.manual_seed(0)
torch.set_num_threads(1)
for (network, (make, inputs)), (task, (outputs, targets)) in itertools.product(NETWORKS.items(), TASKS.items()):
    print(network, task)
    model, x, y = make(outputs).eval(), inputs(12), targets(12)
    data = [(x[:8], y[:8]), (x[8:], y[8:])]
    for kind in (nb.ProjectedPosterior, nb.LossProjectedPosterior):
        print(nb.plan(model, data, likelihood=task, loss=kind is nb.LossProjectedPosterior))
        posterior = kind(model, task, prior_precision=1e4).fit(data, 6)
        print(posterior.report)
        posterior.predict(x), posterior.predict(data, pred_type="sampled")
        posterior.ood_score(x), posterior.functional_variance(x, exact=True)
        print(posterior.check_fit(data))
        posterior.extend(2)
        posterior.sample(2)
        posterior.save(f"{sys.argv[1]}/posterior")
        loaded = nb.load(f"{sys.argv[1]}/posterior", model)
        assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
        loaded.prepare(data).extend(2)
print("clean")
"""


@pytest.mark.slow
def test_nothing_warns_under_w_error(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SCRIPT)
    assert python("-W", "error", script, tmp_path, cwd=tmp_path).endswith("clean\n")
