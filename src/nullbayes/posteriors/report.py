"""The report of a fit: what it measured, at the prior precision in use, as a table and as warnings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from nullbayes.errors import CollapseWarning, UnderfitWarning, optional, warn
from nullbayes.likelihoods import Likelihood, Regression
from nullbayes.posteriors import plot
from nullbayes.posteriors.measured import Measured
from nullbayes.posteriors.promise import NATS, Promise

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_NO_NULL_SPACE = (
    "there are at least as many rows as parameters, so no null space in the strict sense: how much variance is left "
    "depends on the tolerance, and the size of a variance means nothing by itself"
)
_MUCH = 0.25  # of the spread of the outputs, for a standard deviation on training data


@dataclass(frozen=True, kw_only=True)
class FitReport(Measured):
    """What a fit measured, at the prior precision in use; prints as a short table.

    Attributes
    ----------
    projector, reason, route : str
        The projector that was used and why, and how the rows were formed.
    n_data, n_rows, n_counted : int
        Training examples, their rows, and the rows without those of ignored positions, which are zero.
    data, seed, based : str, int, bool
        Fingerprint of the training data, the seed of the samples, and whether they have a base distribution.
    output_std : float
        The spread of the network's own training outputs.
    residual, tolerance : tuple of float, float
        ``|A v| / |A noise|`` per sample, as in :class:`Info <nullbayes.projectors.Info>`, and the largest allowed.
    converged, sweeps, sweeps_per_sample : bool, int, tuple of int
        Whether every sample reached the tolerance, and the number of passes over the rows, in all and per sample.
    settings : str
        The projector with its settings; empty if the samples were drawn by several.
    rank, traces : int or None, tuple of float
        The rank of the rows, where the projector decides one; estimates of the dimension of their null space.
    train_std : float
        Root mean square standard deviation that remains on the training outputs, in their own units, at the prior
        precision in use, as are the next two.
    worst_ratio : float or None
        The largest ratio of the standard deviation of an output to its spread; None for one output, or for classes.
    train_loss_std : float or None
        Root mean square change of the training losses to first order, in nats; None for rows of outputs.
    seconds, peak_memory : dict, int or None
        Time per phase, and bytes beyond what the process held when the fit began.
    promise : Promise or None
        The measurements that the precision was chosen by; None unless the rule is "auto".
    notes : tuple of str
        What else happened: that memory ran out, for example, and how the fit continued.
    n_parameters, n_samples : int
        Parameters that vary, and samples.
    kernel_dimension, kernel_dimension_stderr : float
        Effective dimension of the null space of the rows, with its standard error.
    collapsed : bool
        Whether next to nothing is left of the noise.
    prior_precision, temperature : float
        In use now.
    sigma_noise : float, tuple of float or None
        The noise of a regression in use now, one standard deviation or one per output; None for other likelihoods.
    precision_rule : str
        "auto", "optimal" or "paper"; empty where the precision is a number.
    weights : dict
        The weight of each statistic in the combined score that ``calibrate`` has learned; empty without it.

    Examples
    --------
    >>> import torch
    >>> import nullbayes as nb
    >>> model, x = torch.nn.Linear(4, 1, bias=False), torch.eye(4)
    >>> posterior = nb.ProjectedPosterior(model, "regression", prior_precision=1.0).fit(x[:2], torch.ones(2, 1))
    >>> report = posterior.report
    >>> report.projector, report.n_rows, report.rank, report.kernel_dimension, report.converged
    ('ExactDual', 2, 2, 2.0, True)
    """

    n_parameters: int
    n_samples: int
    kernel_dimension: float
    kernel_dimension_stderr: float
    collapsed: bool
    prior_precision: float
    temperature: float
    sigma_noise: float | tuple[float, ...] | None
    precision_rule: str
    weights: dict[str, float]

    @classmethod
    def of(
        cls,
        measured: Measured,
        n_parameters: int,
        alpha: float,
        likelihood: Likelihood,
        rule: str | float,
        weights: dict[str, float],
    ) -> Self:
        """Make the report for a prior precision ``alpha`` that is a number or follows from a rule."""
        size, stderr = measured.dimension(n_parameters)
        scaled = {name: getattr(measured, name) for name in ("train_std", "worst_ratio", "train_loss_std")}
        values = vars(measured) | {name: None if std is None else std / alpha**0.5 for name, std in scaled.items()}
        return cls(
            **{**values, "promise": measured.promise if rule == "auto" else None},
            n_parameters=n_parameters,
            n_samples=len(measured.residual),
            kernel_dimension=size,
            kernel_dimension_stderr=stderr,
            collapsed=size <= max(1.0, 1e-4 * n_parameters),
            prior_precision=alpha,
            temperature=likelihood.temperature,
            sigma_noise=likelihood.sigma_noise if isinstance(likelihood, Regression) else None,
            precision_rule=rule if isinstance(rule, str) else "",
            weights=weights,
        )

    def __str__(self) -> str:
        """Lay the report out as a table."""
        share = self.kernel_dimension / self.n_parameters
        ignored = "" if self.n_counted == self.n_rows else f" ({self.n_counted:,} count, the rest is ignored)"
        within = "reached" if self.converged else "NOT reached"
        size = f"{self.kernel_dimension:,.1f} ± {self.kernel_dimension_stderr:.1f} dimensions"
        lines = {
            "projector": f"{self.projector}: {self.reason}",
            "rows": f"{self.n_rows:,} of {self.n_data:,} examples{ignored}, {self.route}",
            "parameters": f"{self.n_parameters:,}",
            "samples": f"{self.n_samples}",
            "null space": f"{size} ({share:.1%} of the parameters)" + (", COLLAPSED" if self.collapsed else ""),
            "residual": f"{max(self.residual):.1e} at worst, tolerance {self.tolerance:.1e} {within}, "
            f"{self.sweeps} sweep{'s' * (self.sweeps != 1)}",
            "prior precision": f"{self.prior_precision:.4g}{self._why()}",
            "temperature": "" if self.temperature == 1.0 else f"{self.temperature:.3g}",
            "noise": "" if self.sigma_noise is None else self._noise(self.sigma_noise),
            "combined score": ", ".join(f"{name} {weight:.2f}" for name, weight in self.weights.items() if weight > 0),
            "promise": "" if self.promise is None else self._kept(self.promise),
            "std on training": f"{self.train_std:.3g} (the outputs themselves spread by {self.output_std:.3g})"
            + ("" if self.worst_ratio is None else f", of one output by {self.worst_ratio:.2g} of its spread")
            + ("" if self.train_loss_std is None else f", losses {self.train_loss_std:.2g} nats"),
            "how to read it": _NO_NULL_SPACE if self.sized_by_tolerance else "",
            "time": ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items()),
            "memory": "unknown"
            if self.peak_memory is None
            else f"{self.peak_memory / 2**30:.2f} GiB at the peak, beside what there was",
        }
        table = [(name, value) for name, value in lines.items() if value] + [("note", note) for note in self.notes]
        return "\n".join(f"{name:<17} {value}" for name, value in table)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the seconds of each phase and the residual of each sample; save the figure if there is a ``path``."""
        figure = plot.draw(self)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def to_pandas(self) -> pd.DataFrame:
        """Return a table with one row per sample: its residual and its sweeps; the rest is in :meth:`to_dict`."""
        with optional("to_pandas()"):
            import pandas as pd

        index = pd.RangeIndex(self.n_samples, name="sample")
        return pd.DataFrame({"residual": self.residual, "sweeps": self.sweeps_per_sample}, index=index)

    @property
    def sized_by_tolerance(self) -> bool:
        """Whether as many rows count as there are parameters: the tolerance then sets the size of variances."""
        return self.n_counted >= self.n_parameters

    def _why(self) -> str:
        """Say how the precision was chosen."""
        if self.promise is None:
            return f", {self.precision_rule}" if self.precision_rule else ""
        if self.prior_precision > self.promise.needed:
            return ", auto: the closed form, which keeps the promise as it is"
        what = "accuracy" if self.promise.decided_by == "accuracy" else f"NLL within {NATS:g} nats"
        where = "kept apart" if self.promise.needed_apart >= self.promise.needed_inside else "in the rows"
        return f", auto: raised to keep the {what} on training examples {where}"

    def _noise(self, sigma: float | tuple[float, ...]) -> str:
        """Say how far targets lie from outputs."""
        each = sigma if isinstance(sigma, tuple) else (sigma,)
        size = f"{each[0]:.3g}" if len(each) == 1 else f"{min(each):.3g} to {max(each):.3g}, one per output"
        return f"{size} (sigma_noise: standard deviation of targets around outputs)"

    def _kept(self, promise: Promise) -> str:
        """Say what became of the predictions on training data."""
        nll = f"NLL {promise.nll_network:.4f} -> {promise.nll_posterior:.4f} on training examples"
        if promise.accuracy_network is not None and promise.accuracy_posterior is not None:
            nll += f", accuracy {promise.accuracy_network:.4f} -> {promise.accuracy_posterior:.4f}"
        apart = promise.apart_std / self.prior_precision**0.5
        return f"{nll}; rms std {apart:.3g} on some that a trial fit left out"


def warn_of(report: FitReport, underfit_advice: str) -> None:
    """Warn of a posterior that has collapsed, or that varies too much on the training data."""
    promise, alpha = report.promise, report.prior_precision
    if report.collapsed:
        message = (
            f"The posterior has collapsed on the trained network: of {report.n_parameters:,} parameters the "
            f"{report.n_rows:,} rows leave an effective null space of {report.kernel_dimension:.1f} dimensions. "
            "Use a larger tolerance, the loss-projected posterior (one row per example), or fewer examples."
        )
        return warn(message, CollapseWarning)
    if promise is None:
        if (report.worst_ratio or 0.0) > _MUCH:
            found = f"one of the outputs varies by {report.worst_ratio:.2g} times its own spread (standard deviation)"
        elif report.train_std > _MUCH * report.output_std > 0:
            found = (
                f"the outputs vary by {report.train_std:.2g} (standard deviation), not small beside their own spread "
                f"of {report.output_std:.2g}"
            )
        else:
            return None
        return warn(f"On the training data {found}. {underfit_advice}", UnderfitWarning)
    if not promise.kept:
        message = (
            f"The posterior does not keep its promise: on training examples the negative log-likelihood goes from "
            f"{promise.nll_network:.4g} to {promise.nll_posterior:.4g}. Use a larger prior_precision."
        )
        return warn(message, UnderfitWarning)
    if alpha <= promise.needed and not promise.visible(alpha, report.output_std):
        message = (
            f"To predict as well as the network does, the posterior keeps a standard deviation of only "
            f"{promise.apart_std / alpha**0.5:.2g} on inputs like the training data, whose outputs spread by "
            f"{report.output_std:.2g}: it is next to nothing. Scores still rank inputs. For a variance to read, pass "
            "held-out data, fit(loader, held_out=...)."
        )
        return warn(message, CollapseWarning)
    return None
