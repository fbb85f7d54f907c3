r"""Baselines: the methods that the paper compares with, used in the same way as the projected posteriors.

1. **One posterior class** (``Baseline``) holds one :class:`Method <nullbayes.baselines.method.Method>`, a frozen value
   that says how the method learns, how it draws samples or scores inputs, and what a file keeps of it. Predictions,
   scores, checks and files are those of every posterior.
2. **The same rows.** :math:`A` is the output Jacobian, scaled by a root of the likelihood's Hessian, so that
   :math:`A^\top A` is the generalized Gauss-Newton matrix. A Laplace approximation is
   :math:`\mathcal N(\theta, (C + \alpha I)^{-1})`, where the **curvature** :math:`C` is :math:`A^\top A` in some form
   (``linalg.curvature``); :math:`\alpha` can change without a new fit.

    ``MAP``                 the network itself: largest probability, largest logit, entropy
    ``TemperatureScaling``  the network with a temperature that suits held-out data
    ``DiagonalLaplace``     the diagonal of the curvature
    ``LastLayerLaplace``    the columns of the last layer
    ``KroneckerLaplace``    a Kronecker product for each layer (needs ``curvlinops``)
    ``LinearizedLaplace``   the whole matrix
    ``LanczosLaplace``      its largest eigenpairs, as many as a budget allows
    ``SCOD``                a random sketch of it, with a score of its own
    ``LocalEnsemble``       a score: the gradients of an input outside the leading eigenvectors
    ``SketchedLanczos``     the same with more, shorter vectors
    ``SWAG``                a Gaussian from the iterates of SGD
    ``DeepEnsemble``        networks trained from different starts
"""

from nullbayes.baselines.base import Baseline as Baseline
from nullbayes.baselines.kronecker import KroneckerLaplace as KroneckerLaplace
from nullbayes.baselines.laplace import DiagonalLaplace as DiagonalLaplace
from nullbayes.baselines.laplace import LanczosLaplace as LanczosLaplace
from nullbayes.baselines.laplace import LastLayerLaplace as LastLayerLaplace
from nullbayes.baselines.laplace import LinearizedLaplace as LinearizedLaplace
from nullbayes.baselines.local_ensemble import LocalEnsemble as LocalEnsemble
from nullbayes.baselines.local_ensemble import SketchedLanczos as SketchedLanczos
from nullbayes.baselines.map_estimate import MAP as MAP
from nullbayes.baselines.members import DeepEnsemble as DeepEnsemble
from nullbayes.baselines.method import BaselineReport as BaselineReport
from nullbayes.baselines.method import Method as Method
from nullbayes.baselines.scod import SCOD as SCOD
from nullbayes.baselines.swag import SWAG as SWAG
from nullbayes.baselines.temperature import TemperatureScaling as TemperatureScaling
