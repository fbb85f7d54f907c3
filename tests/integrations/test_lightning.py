"""A Lightning callback fits the posterior of the trained module to its training data, after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nullbayes as nb
from nullbayes.errors import SettingsError

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install 'nullbayes[lightning]'")
pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # Lightning warns of its own defaults

from nullbayes.integrations.lightning import PosteriorCallback  # noqa: E402 - after the package is known to be there

X = torch.randn(120, 4, generator=torch.Generator().manual_seed(0), device="cpu")
Y = X[:, :3].argmax(1)


class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def trained(callback: PosteriorCallback, folder: Path, *loaders: Any) -> Module:
    torch.manual_seed(0)
    module = Module()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[callback],
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, *loaders)
    return module


def loader(start: int, stop: int, *, shuffle: bool) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X[start:stop], Y[start:stop]), batch_size=16, shuffle=shuffle, drop_last=shuffle)


def test_posterior_is_that_of_the_trained_module_on_all_training_data(tmp_path: Path) -> None:
    options = {"n_samples": 4, "progress": False}
    seeded = options | {"generator": torch.Generator().manual_seed(1)}
    callback = PosteriorCallback(calibrate=True, fit_options=seeded)
    assert callback.posterior is None
    module = trained(callback, tmp_path, loader(0, 60, shuffle=True), loader(60, 120, shuffle=False))
    again = nb.ProjectedPosterior(module.net)
    again.fit(X[:60], Y[:60], **options, generator=torch.Generator().manual_seed(1))
    assert callback.posterior.report.n_data == 60  # also those that the training loader drops
    assert torch.allclose(callback.posterior.directions, again.directions, atol=1e-5)
    assert callback.posterior.calibration is not None
    assert callback.posterior.is_ood(100 * X[:2]).shape == (2,)
    assert torch.equal(callback.posterior.predict(X).mean, module.eval()(X))


def test_network_kind_and_data_can_be_chosen(tmp_path: Path) -> None:
    callback = PosteriorCallback(
        kind=nb.LossProjectedPosterior,
        network=lambda module: module.net,
        data=[(X[:30], Y[:30])],
        posterior_options={"parameters": "3.*"},
        fit_options={"n_samples": 2, "progress": False},
    )
    trained(callback, tmp_path, loader(0, 60, shuffle=True))
    assert isinstance(callback.posterior, nb.LossProjectedPosterior)
    assert callback.posterior.report.n_data == 30
    assert set(callback.posterior.sample(1)) == {"3.weight", "3.bias"}


def test_a_calibration_without_validation_data_is_refused(tmp_path: Path) -> None:
    callback = PosteriorCallback(calibrate=True, fit_options={"n_samples": 2, "progress": False})
    with pytest.raises(SettingsError, match=r"needs validation data: trainer\.fit"):
        trained(callback, tmp_path, loader(0, 60, shuffle=True))
