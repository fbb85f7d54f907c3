r"""Baselines: the methods that the paper compares with, behind the methods of the projected posteriors.

A handful of ideas carries all of them:

1. **One predictive.** A method is a network and deviations around its parameters; predictions, scores, checks and files
   are those of every posterior (``SamplePosterior``). Where a method is a score in closed form, ``ood_score`` is that.
2. **One fit** (``Baseline``): data are opened and checked, the method learns, a report says what it took.
3. **The same rows.** :math:`A` with :math:`A^\top A` the generalized Gauss-Newton matrix is the output Jacobian, scaled
   by a root of the likelihood's Hessian. A Laplace approximation is :math:`\mathcal N(\theta, (C + \alpha I)^{-1})`
   where the **curvature** :math:`C` is :math:`A^\top A` in some form (``linalg.curvature``), and :math:`\alpha` can
   change without a new fit. What differs is one line: which columns, which curvature.

    ``MAP``                 the network itself: largest probability, largest logit, entropy
    ``DiagonalLaplace``     the diagonal of the curvature
    ``LastLayerLaplace``    the columns of the last layer
    ``KroneckerLaplace``    a Kronecker product for each layer (needs ``curvlinops``)
    ``LinearizedLaplace``   the whole matrix
    ``LanczosLaplace``      its largest eigenpairs, as many as a budget allows
    ``SCOD``                a random sketch of it, with a score of its own
    ``LocalEnsemble``       a score: the gradients of an input outside the largest eigenvectors
    ``SketchedLanczos``     the same with more, shorter vectors
    ``SWAG``                a Gaussian from the iterates of SGD
    ``DeepEnsemble``        networks trained from different starts
"""

from nullbayes.baselines.base import Baseline as Baseline
from nullbayes.baselines.deep_ensemble import DeepEnsemble as DeepEnsemble
from nullbayes.baselines.diagonal import DiagonalLaplace as DiagonalLaplace
from nullbayes.baselines.kronecker import KroneckerLaplace as KroneckerLaplace
from nullbayes.baselines.lanczos import LanczosLaplace as LanczosLaplace
from nullbayes.baselines.last_layer import LastLayerLaplace as LastLayerLaplace
from nullbayes.baselines.linearized import LinearizedLaplace as LinearizedLaplace
from nullbayes.baselines.local_ensemble import LocalEnsemble as LocalEnsemble
from nullbayes.baselines.map_estimate import MAP as MAP
from nullbayes.baselines.report import BaselineReport as BaselineReport
from nullbayes.baselines.scod import SCOD as SCOD
from nullbayes.baselines.sketched_lanczos import SketchedLanczos as SketchedLanczos
from nullbayes.baselines.swag import SWAG as SWAG

METHODS: tuple[type[Baseline], ...] = (
    MAP, DiagonalLaplace, LastLayerLaplace, KroneckerLaplace, LinearizedLaplace, LanczosLaplace, SCOD,
    LocalEnsemble, SketchedLanczos, SWAG, DeepEnsemble,
)  # fmt: skip
