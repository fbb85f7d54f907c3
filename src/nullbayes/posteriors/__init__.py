"""Posteriors: a network, samples around its parameters, and what they say about predictions."""

from nullbayes.posteriors.base import SamplePosterior as SamplePosterior
from nullbayes.posteriors.files import load as load
from nullbayes.posteriors.held_out import FitCheck as FitCheck
from nullbayes.posteriors.projected import LossProjectedPosterior as LossProjectedPosterior
from nullbayes.posteriors.projected import ProjectedPosterior as ProjectedPosterior
from nullbayes.posteriors.report import FitReport as FitReport
