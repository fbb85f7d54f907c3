"""A callback for the Trainer of Hugging Face that fits a posterior when training has ended."""

from __future__ import annotations

from typing import Any

import nullbayes as nb

try:
    from transformers import TrainerCallback
except ImportError:  # the module can be imported; a callback cannot be made

    class TrainerCallback:  # type: ignore[no-redef]
        """Says what to install."""

        def __init__(self) -> None:
            msg = "The callback needs transformers and accelerate: pip install 'nullbayes[transformers]'."
            raise ImportError(msg)


class PosteriorCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Fits a posterior to the trained model and its training data; ``callback.posterior`` is the result.

    The data are those of the Trainer's loader, each example once and in a fixed order. All of them must have one
    length: pad with ``padding="max_length"``, or pass ``data``.

    Parameters
    ----------
    likelihood : str, Likelihood or callable
        What the outputs mean, as for ``nb.ProjectedPosterior``.
    kind : type
        The class of the posterior, ``nb.ProjectedPosterior`` or another with its interface.
    data : loader, optional
        The data to fit to, in a fixed order, instead of those of the Trainer.
    held_out : loader, optional
        Data that the model was not trained on, to calibrate decisions with.
    posterior_options, fit_options : dict, optional
        Other arguments of the posterior, such as ``{"parameters": "classifier.*"}``, and of its ``fit``, such as
        ``{"n_samples": 50}``.

    Attributes
    ----------
    posterior : posterior or None
        None before the end of the training.

    Examples
    --------
    >>> callback = PosteriorCallback(posterior_options={"parameters": "classifier.*"})         # doctest: +SKIP
    >>> Trainer(model, arguments, train_dataset=dataset, callbacks=[callback]).train()         # doctest: +SKIP
    >>> callback.posterior.ood_score({"input_ids": ids, "attention_mask": mask})               # doctest: +SKIP
    """

    def __init__(
        self,
        likelihood: Any = "classification",
        *,
        kind: Any = nb.ProjectedPosterior,
        data: Any = None,
        held_out: Any = None,
        posterior_options: dict[str, Any] | None = None,
        fit_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.posterior: Any = None
        self._likelihood, self._kind, self._data, self._held_out = likelihood, kind, data, held_out
        self._posterior_options, self._fit_options = posterior_options or {}, fit_options or {}

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Fit the posterior, and calibrate it if there are held-out data."""
        if not state.is_world_process_zero:
            return
        data = nb.evaluation_loader(given["train_dataloader"]) if self._data is None else self._data
        made = self._kind(given["model"], self._likelihood, **self._posterior_options).fit(data, **self._fit_options)
        self.posterior = made if self._held_out is None else made.calibrate(self._held_out)
