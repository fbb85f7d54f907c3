"""Estimators for scikit-learn: a plain torch module, trained and given a posterior by ``fit``.

They work in pipelines, in grid searches, with ``clone`` and with ``pickle``. Everything is computed in float64 on the
CPU: the estimators are for tables, and for networks that train in seconds. For anything larger, train your network
yourself and use ``nb.ProjectedPosterior``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

import nullbayes as nb
from nullbayes.errors import ModelError, NotFittedError, SettingsError

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:  # the module can be imported; estimators cannot be made

    class BaseEstimator:  # type: ignore[no-redef]
        """Says what to install."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            msg = "The estimators need scikit-learn 1.6 or later: pip install 'nullbayes[sklearn]'."
            raise ImportError(msg)

    class ClassifierMixin:  # type: ignore[no-redef]
        """Stands for that of scikit-learn."""

    class MultiOutputMixin:  # type: ignore[no-redef]
        """Stands for that of scikit-learn."""

    class RegressorMixin:  # type: ignore[no-redef]
        """Stands for that of scikit-learn."""


Build = Callable[[int, int], nn.Module]  # (n_features, n_outputs) -> module

_POSTERIORS = {"projected": nb.ProjectedPosterior, "loss-projected": nb.LossProjectedPosterior}
_LEAST_HELD_OUT = 40  # that a calibration takes


def small_network(n_features: int, n_outputs: int) -> nn.Module:
    """Return the default network: one hidden layer of 64 units with tanh."""
    return nn.Sequential(nn.Linear(n_features, 64), nn.Tanh(), nn.Linear(64, n_outputs))


class _Estimator(BaseEstimator):  # type: ignore[misc, unused-ignore]
    """What both estimators do: train a network, fit its posterior, calibrate it, and ask it."""

    _likelihood = ""

    def __init__(
        self,
        module: Build | None = None,
        *,
        epochs: int = 100,
        lr: float = 0.01,
        batch_size: int = 64,
        posterior: str = "projected",
        n_samples: int = 30,
        calibration_fraction: float = 0.2,
        random_state: Any = None,
    ) -> None:
        if BaseEstimator.__module__ == __name__:
            super().__init__()
        self.module = module
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.posterior = posterior
        self.n_samples = n_samples
        self.calibration_fraction = calibration_fraction
        self.random_state = random_state

    def _train(self, x: np.ndarray, y: Tensor, n_outputs: int) -> Self:
        """Train the network and fit its posterior; calibrate it, if there are enough examples to hold some out."""
        if self.posterior not in _POSTERIORS:
            msg = f"posterior must be one of {', '.join(map(repr, _POSTERIORS))}, not {self.posterior!r}."
            raise SettingsError(msg)
        if not 0.0 <= self.calibration_fraction < 1.0:
            msg = f"calibration_fraction must be at least 0 and less than 1, not {self.calibration_fraction!r}."
            raise SettingsError(msg)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        generator = torch.Generator().manual_seed(seed)
        inputs, order = torch.tensor(x, dtype=torch.float64), torch.randperm(len(x), generator=generator)
        n_held = int(self.calibration_fraction * len(x))
        n_held = n_held if n_held >= _LEAST_HELD_OUT else 0
        held, trained = order[:n_held], order[n_held:]
        with torch.random.fork_rng(devices=[]):  # a module draws its first parameters from torch's own generator
            torch.manual_seed(seed)
            network = (self.module or small_network)(x.shape[1], n_outputs).double()
            self._descend(network, inputs[trained], y[trained], generator)
        self.module_ = network.eval()
        made = _POSTERIORS[self.posterior](network, self._likelihood)
        made.fit(inputs[trained], y[trained], self.n_samples, generator=generator, progress=False)
        self.posterior_ = made if n_held == 0 else made.calibrate(inputs[held], y[held])
        return self

    def _descend(self, network: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> None:
        loss = nn.CrossEntropyLoss() if self._likelihood == "classification" else nn.MSELoss()
        optimizer = torch.optim.Adam(network.parameters(), lr=self.lr)
        network.train()
        for _ in range(self.epochs):
            for batch in torch.randperm(len(x), generator=generator).split(self.batch_size):
                optimizer.zero_grad()
                outputs, targets = network(x[batch]), y[batch]
                loss(outputs.view_as(targets) if outputs.ndim == 1 else outputs, targets).backward()
                optimizer.step()
        if not all(bool(torch.isfinite(p).all()) for p in network.parameters()):
            msg = "The training diverged: scale the features (StandardScaler in a pipeline), or use a smaller lr."
            raise ModelError(msg)

    def _inputs(self, X: Any) -> Tensor:
        check_is_fitted(self, "posterior_")
        return torch.tensor(validate_data(self, X, reset=False, dtype=np.float64))

    def _calibrated(self) -> nb.ProjectedPosterior | nb.LossProjectedPosterior:
        found: nb.ProjectedPosterior | nb.LossProjectedPosterior = self.posterior_
        if found.calibration is None:
            msg = (
                f"The posterior is not calibrated, which takes {_LEAST_HELD_OUT} held-out examples: use a larger "
                "calibration_fraction, or more data, or call estimator.posterior_.calibrate(x, y) with other data."
            )
            raise NotFittedError(msg)
        return found

    def ood_score(self, X: Any, kind: str | None = None) -> np.ndarray:
        """Return one score per input; higher means that the input is less like the training data.

        Parameters
        ----------
        X : array (N, n_features)
            The inputs.
        kind : str, optional
            As for ``posterior.ood_score``: by default the calibrated score.

        Returns
        -------
        array (N,)
            The scores.
        """
        x = self._inputs(X)
        return np.asarray(self.posterior_.ood_score(x, kind))

    def is_ood(self, X: Any, alpha: float = 0.05) -> np.ndarray:
        """Say whether inputs are out of distribution.

        Parameters
        ----------
        X : array (N, n_features)
            The inputs.
        alpha : float
            The false-alarm rate: an input like the training data is flagged with at most this probability.

        Returns
        -------
        array (N,) of bool
            True for strange inputs.

        Raises
        ------
        NotFittedError
            If there were too few data to hold some out.
        """
        x = self._inputs(X)
        return np.asarray(self._calibrated().is_ood(x, alpha))


class NullBayesClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc, unused-ignore]
    """A network for classification, with probabilities that are averaged over its posterior.

    Parameters
    ----------
    module : callable (n_features, n_outputs) -> nn.Module, optional
        Makes the network; by default one hidden layer of 64 units. It is trained in float64. For ``pickle`` it must be
        a function that can be imported, not a lambda.
    epochs, lr, batch_size : int, float, int
        How the network is trained, with Adam.
    posterior : "projected" or "loss-projected"
        ``nb.ProjectedPosterior`` or ``nb.LossProjectedPosterior``.
    n_samples : int
        Samples of the posterior.
    calibration_fraction : float
        The share of the data that is held out from training to calibrate decisions. If that is fewer than 40 examples,
        all are used for training, and there is no calibration.
    random_state : int, numpy.random.RandomState or None
        Makes a fit repeatable.

    Attributes
    ----------
    module_ : nn.Module
        The trained network, without the posterior.
    posterior_ : ProjectedPosterior or LossProjectedPosterior
        The posterior, with everything that it can do.
    classes_ : array
        The classes, in the order of the columns of ``predict_proba``.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = NullBayesClassifier(epochs=20, calibration_fraction=0.3, random_state=0)
    >>> model = make_pipeline(StandardScaler(), classifier).fit(X, y)
    >>> model.score(X, y) > 0.9, model.predict_proba(X).shape
    (True, (150, 3))
    >>> classifier.is_ood([[0.0, 9.0, -9.0, 9.0]])
    array([ True])
    """

    _likelihood = "classification"

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network, and fit and calibrate its posterior.

        Parameters
        ----------
        X : array (N, n_features)
            The inputs.
        y : array (N,)
            The classes: numbers or strings.

        Returns
        -------
        NullBayesClassifier
            The estimator itself.
        """
        from sklearn.utils.multiclass import check_classification_targets

        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            msg = f"The data hold one class only ({self.classes_[0]!r}): a classifier needs two classes or more."
            raise ValueError(msg)
        return self._train(X, torch.tensor(labels), len(self.classes_))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each input, (N,): that of the network itself."""
        probs = self.predict_proba(X)
        return np.asarray(self.classes_[probs.argmax(1)])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities (N, n_classes), averaged over the posterior."""
        x = self._inputs(X)
        return np.asarray(self.posterior_.predict(x).probs)

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the logits of the network (N, n_classes); for two classes, the difference of both (N,)."""
        x = self._inputs(X)
        logits = np.asarray(self.posterior_.predict(x).mean)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def predict_std(self, X: Any) -> np.ndarray:
        """Return the standard deviation of each logit under the posterior, (N, n_classes)."""
        x = self._inputs(X)
        return np.asarray(self.posterior_.predict(x).std)

    def predict_set(self, X: Any, alpha: float = 0.1) -> np.ndarray:
        """Return the classes that cannot be excluded, as bool (N, n_classes), in the order of ``classes_``.

        For an input like the training data, the right class is missing with a probability of at most ``alpha``.
        """
        x = self._inputs(X)
        return np.asarray(self._calibrated().predict_set(x, alpha))


class NullBayesRegressor(RegressorMixin, MultiOutputMixin, _Estimator):  # type: ignore[misc, unused-ignore]
    """A network for regression, with standard deviations and intervals from its posterior.

    Parameters
    ----------
    module, epochs, lr, batch_size, posterior, n_samples, calibration_fraction, random_state
        As for :class:`NullBayesClassifier`.

    Attributes
    ----------
    module_ : nn.Module
        The trained network, without the posterior. It predicts targets that are standardized.
    posterior_ : ProjectedPosterior or LossProjectedPosterior
        The posterior, with everything that it can do, for standardized targets.

    Notes
    -----
    Targets are standardized for training, so that ``lr`` does not depend on their units. All answers of the estimator
    are in the units of the targets.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-2, 2, (300, 1))
    >>> y = np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=300)
    >>> regressor = NullBayesRegressor(epochs=60, random_state=0).fit(X, y)
    >>> mean, std = regressor.predict([[0.0], [6.0]], return_std=True)
    >>> bool(std[1] > 3 * std[0])                               # far from the data
    True
    >>> lower, upper = regressor.predict_interval(X, alpha=0.1)
    >>> lower.shape, bool((lower < upper).all())
    ((300,), True)
    """

    _likelihood = "regression"

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network, and fit and calibrate its posterior.

        Parameters
        ----------
        X : array (N, n_features)
            The inputs.
        y : array (N,) or (N, n_outputs)
            The targets.

        Returns
        -------
        NullBayesRegressor
            The estimator itself.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, multi_output=True, y_numeric=True)
        self._single = y.ndim == 1
        targets = torch.tensor(np.asarray(y, dtype=np.float64)).reshape(len(X), -1)
        self._offset, spread = targets.mean(0), targets.std(0, unbiased=False)
        self._scale = torch.where(spread > 0, spread, 1.0)
        return self._train(X, (targets - self._offset) / self._scale, targets.shape[1])

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictions, and their standard deviations if asked for, in the shape of the targets.

        The standard deviation does not include the noise of the targets; ``predict_interval`` does.
        """
        x = self._inputs(X)
        prediction = self.posterior_.predict(x)
        mean, std = (values.reshape(len(x), -1) for values in (prediction.mean, prediction.std))
        mean = self._shaped(mean * self._scale + self._offset)
        return (mean, self._shaped(std * self._scale)) if return_std else mean

    def predict_std(self, X: Any) -> np.ndarray:
        """Return the standard deviation of each prediction under the posterior, without the noise of the targets."""
        return np.asarray(self.predict(X, return_std=True)[1])

    def predict_interval(self, X: Any, alpha: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds of intervals for new targets, noise included, in the shape of the targets.

        Parameters
        ----------
        X : array (N, n_features)
            The inputs.
        alpha : float
            The target of an input like the training data is outside with at most this probability, on average over
            the held-out examples: with few of them, the coverage of a single fit varies. Without a calibration there is
            no guarantee, and the bounds follow from the estimated noise.

        Returns
        -------
        lower, upper : array (N,) or (N, n_outputs)
            The bounds.
        """
        x = self._inputs(X)
        calibrated = self.posterior_.calibration is not None
        bounds = self.posterior_.predict_interval(x, alpha) if calibrated else None
        bounds = bounds or self.posterior_.predict(x).interval(1.0 - alpha)
        lower, upper = (bound.reshape(len(x), -1) for bound in bounds)
        return self._shaped(lower * self._scale + self._offset), self._shaped(upper * self._scale + self._offset)

    def _shaped(self, values: Tensor) -> np.ndarray:  # (N, O)
        return np.asarray(values[:, 0] if self._single else values)
