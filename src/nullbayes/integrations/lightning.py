"""A callback for Lightning that fits a posterior when training has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nullbayes as nb
from nullbayes.errors import SettingsError

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback  # type: ignore[assignment, unused-ignore]
    except ImportError:  # the module can be imported; a callback cannot be made

        class Callback:  # type: ignore[no-redef]
            """Says what to install."""

            def __init__(self) -> None:
                msg = "The callback needs Lightning: pip install 'nullbayes[lightning]'."
                raise ImportError(msg)


class PosteriorCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Fits a posterior to the trained module and its training data; ``callback.posterior`` is the result.

    The data are those of the trainer's loader, each example once and in a fixed order. In a training on several
    devices, the main process alone fits.

    Parameters
    ----------
    likelihood : str, Likelihood or callable
        What the outputs mean, as for ``nb.ProjectedPosterior``.
    kind : type
        The class of the posterior, ``nb.ProjectedPosterior`` or another with its interface.
    network : callable (LightningModule) -> nn.Module, optional
        Takes the network out of the module, such as ``lambda module: module.net``; by default the module itself, whose
        ``forward`` must return the outputs.
    data : loader, optional
        The data to fit to, in a fixed order, if those of the trainer are augmented, for example.
    calibrate : bool
        Whether to calibrate decisions with the trainer's validation data.
    posterior_options, fit_options : dict, optional
        Other arguments of the posterior, such as ``{"batch_fn": ...}``, and of its ``fit``, such as
        ``{"n_samples": 50}``.

    Attributes
    ----------
    posterior : posterior or None
        None before the end of the training.

    Examples
    --------
    >>> callback = PosteriorCallback("classification", calibrate=True)          # doctest: +SKIP
    >>> Trainer(max_epochs=10, callbacks=[callback]).fit(module, train, val)    # doctest: +SKIP
    >>> callback.posterior.is_ood(x)                                            # doctest: +SKIP
    """

    def __init__(
        self,
        likelihood: Any = "classification",
        *,
        kind: Any = nb.ProjectedPosterior,
        network: Callable[[Any], Any] | None = None,
        data: Any = None,
        calibrate: bool = False,
        posterior_options: dict[str, Any] | None = None,
        fit_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.posterior: Any = None
        self._likelihood, self._kind, self._network = likelihood, kind, network
        self._data, self._calibrate = data, calibrate
        self._posterior_options, self._fit_options = posterior_options or {}, fit_options or {}

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit the posterior, and calibrate it if that was asked for."""
        if not trainer.is_global_zero:
            return
        network = pl_module if self._network is None else self._network(pl_module)
        data = nb.evaluation_loader(trainer.train_dataloader) if self._data is None else self._data
        made = self._kind(network, self._likelihood, **self._posterior_options).fit(data, **self._fit_options)
        if self._calibrate:
            held_out = trainer.val_dataloaders
            if held_out is None:
                msg = "calibrate=True needs validation data: trainer.fit(module, train, val), or calibrate=False."
                raise SettingsError(msg)
            made.calibrate(held_out[0] if isinstance(held_out, list) else held_out)
        self.posterior = made
