"""Posteriors: a network, directions around its parameters, and what they say."""

from __future__ import annotations

import os

from torch import nn

from nullbayes import io
from nullbayes.errors import FileError, NullBayesError
from nullbayes.jacobian.data import BatchFn
from nullbayes.likelihoods import Likelihood, LossFn
from nullbayes.posteriors.base import SamplePosterior as SamplePosterior
from nullbayes.posteriors.checkpoint import KIND as _CHECKPOINT
from nullbayes.posteriors.loss_projected import LossProjectedPosterior as LossProjectedPosterior
from nullbayes.posteriors.projected import ProjectedPosterior as ProjectedPosterior
from nullbayes.posteriors.report import FitCheck as FitCheck
from nullbayes.posteriors.report import FitReport as FitReport

_KINDS = {kind.__name__: kind for kind in (ProjectedPosterior, LossProjectedPosterior)}


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    likelihood: str | Likelihood | LossFn | None = None,
    batch_fn: BatchFn | None = None,
) -> SamplePosterior:
    """Read a posterior that was saved for this model.

    Parameters
    ----------
    path : path
        The file.
    model : nn.Module
        With the parameters that the posterior was fitted to, on any device; a fingerprint is compared.
    likelihood : optional
        Only for a loss of one's own, which a file cannot hold.
    batch_fn : callable, optional
        As when it was fitted.
    """
    tensors, header = io.read(path)
    if header.get("kind") == _CHECKPOINT:
        msg = f"{path} is the checkpoint of a fit that has not finished: fit(..., checkpoint=path) goes on with it."
        raise FileError(msg)
    try:
        kind = _KINDS[header["kind"]]
        return kind._from_file(tensors, header, model, likelihood, batch_fn)
    except NullBayesError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        msg = f"{path} is not a posterior file of this version, or it was altered ({type(error).__name__}: {error})."
        raise FileError(msg) from error
