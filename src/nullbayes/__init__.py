"""nullbayes: know when not to trust a trained network, without paying for it in accuracy.

Posteriors (``fit``, ``predict``, ``ood_score``, ``save``)
    ``ProjectedPosterior``        predictions on the training data cannot change
    ``LossProjectedPosterior``    the loss of each training example cannot change, to first order
    ``load``                      read a saved one
    ``baselines``                 the methods that the paper compares with, used the same way

Rows (matrices that multiply)
    ``OutputJacobian``, ``LossJacobian``     of a network on its training data
    ``DenseRows``, ``MatrixFreeRows``        of your own: no network needed

Projectors (noise in, kernel directions out)
    ``projectors``                ExactDual, ExactPrimal, Alternating, Krylov, Lanczos
    ``plan``                      which one a fit would take, and why

Around them
    ``as_module``                 a plain function of a dict of parameters, as a model
    ``evaluation_loader``         of a loader made for training: the same examples, each once and in order
    ``likelihoods``               classification, binary, multilabel, regression, a loss of your own
    ``metrics``                   of classes: accuracy, confidence, nll, brier, ece, mce;
                                  of numbers: rmse, gaussian_nll, crps, interval_coverage, interval_width;
                                  of scores: auroc, aupr, fpr95, aurc
    ``errors``                    what can go wrong, by name
"""

from nullbayes import baselines as baselines
from nullbayes import errors as errors
from nullbayes import likelihoods as likelihoods
from nullbayes import metrics as metrics
from nullbayes import projectors as projectors
from nullbayes.jacobian.jacobians import LossJacobian as LossJacobian
from nullbayes.jacobian.jacobians import OutputJacobian as OutputJacobian
from nullbayes.jacobian.loaders import evaluation_loader as evaluation_loader
from nullbayes.jacobian.modules import as_module as as_module
from nullbayes.linalg.dense import DenseRows as DenseRows
from nullbayes.linalg.matrix_free import MatrixFreeRows as MatrixFreeRows
from nullbayes.linalg.rows import Rows as Rows
from nullbayes.posteriors import FitCheck as FitCheck
from nullbayes.posteriors import FitReport as FitReport
from nullbayes.posteriors import LossProjectedPosterior as LossProjectedPosterior
from nullbayes.posteriors import ProjectedPosterior as ProjectedPosterior
from nullbayes.posteriors import load as load
from nullbayes.posteriors.plan import plan as plan
from nullbayes.predictive import Prediction as Prediction
from nullbayes.projectors import Plan as Plan

__version__ = "0.1.0"
