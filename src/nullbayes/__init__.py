"""nullbayes: know when not to trust a trained network, without paying for it in accuracy.

Posteriors (``fit``, ``predict``, ``ood_score``, ``tune``, ``save``; and after ``calibrate(held_out)``: ``is_ood``,
``p_value``, ``predict_set``, ``predict_interval``)
    ``ProjectedPosterior``        keeps the predictions on the training data
    ``LossProjectedPosterior``    keeps the loss of each training example, to first order
    ``load``                      read a saved posterior
    ``baselines``                 the methods that the paper compares with, with the same interface
    ``detectors``                 post-hoc out-of-distribution scores, with the same interface
    ``Prediction``                what ``predict`` returns
    ``FitReport``, ``FitCheck``   what ``posterior.report`` and ``posterior.check_fit`` return
    ``posterior.calibration``     what ``calibrate`` has found: a score with its weights, and how many were ranked
    ``evaluate``, ``Evaluation``  compare methods on your own data, familiar and strange, in one table

Rows (matrices that are known by their products)
    ``Rows``                      the interface
    ``OutputJacobian``, ``LossJacobian``     of a network on its training data
    ``DenseRows``, ``MatrixFreeRows``        of your own: no network needed

Projectors (from noise to directions in the null space of rows)
    ``projectors``                ExactDual, ExactPrimal, Alternating, Krylov, Sketched, Lanczos
    ``plan``, ``Plan``            which projector a fit would use, why, and at what cost

Other names
    ``as_module``                 make a module from a function of a dictionary of parameters
    ``evaluation_loader``         from a training loader: the same examples, each once and in order
    ``likelihoods``               classification, binary, multilabel, regression, your own loss
    ``metrics``                   for classes: accuracy, confidence, nll, brier, ece, mce;
                                  for numbers: rmse, gaussian_nll, crps, interval_coverage, interval_width;
                                  for scores: auroc, aupr, fpr95, aurc
    ``distributed``               several processes that fit one posterior together, with ``fit(parallel=...)``
    ``in_parallel``               one answer per input, each process works out a part of them
    ``errors``                    errors and warnings
"""

from nullbayes import baselines as baselines
from nullbayes import detectors as detectors
from nullbayes import distributed as distributed
from nullbayes import errors as errors
from nullbayes import likelihoods as likelihoods
from nullbayes import metrics as metrics
from nullbayes import projectors as projectors
from nullbayes.evaluation import Evaluation as Evaluation
from nullbayes.evaluation import evaluate as evaluate
from nullbayes.jacobian.functions import as_module as as_module
from nullbayes.jacobian.jacobians import LossJacobian as LossJacobian
from nullbayes.jacobian.jacobians import OutputJacobian as OutputJacobian
from nullbayes.jacobian.loaders import evaluation_loader as evaluation_loader
from nullbayes.linalg.held import DenseRows as DenseRows
from nullbayes.linalg.matrix_free import MatrixFreeRows as MatrixFreeRows
from nullbayes.linalg.rows import Rows as Rows
from nullbayes.posteriors import FitCheck as FitCheck
from nullbayes.posteriors import FitReport as FitReport
from nullbayes.posteriors import LossProjectedPosterior as LossProjectedPosterior
from nullbayes.posteriors import ProjectedPosterior as ProjectedPosterior
from nullbayes.posteriors import load as load
from nullbayes.posteriors.preview import plan as plan
from nullbayes.predictive import Prediction as Prediction
from nullbayes.predictive import in_parallel as in_parallel
from nullbayes.projectors import Plan as Plan

__version__ = "0.1.0"
