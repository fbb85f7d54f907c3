r"""Detectors: the post-hoc out-of-distribution scores that people use, with the interface of the baselines.

A detector predicts as the network does, and has a score of its own, which is higher for inputs unlike the training
data: ``nb.detectors.KNN(model).fit(loader).ood_score(x)``. Nothing is trained. A detector looks at the **outputs** of
the network, at its **features**, which are the inputs of its last layer, or at its gradients.

    ``MSP``                  one minus the largest probability
    ``MaxLogit``             minus the largest logit
    ``Energy``               minus the logarithm of the sum of all exponentiated logits
    ``GEN``                  the generalized entropy of the softmax of the logits
    ``KNN``                  distance to the k-th nearest training example; for every likelihood
    ``Mahalanobis``          distance to the nearest class mean
    ``RelativeMahalanobis``  the same, minus the distance to the mean of all classes
    ``ViM``                  length of the features outside of their principal directions, against the energy
    ``ReAct``                energy after large features are clipped
    ``SCALE``                energy after features are scaled by how concentrated they are
    ``FDBD``                 distance to the decision boundaries, relative to that from the mean feature
    ``NNGuide``              energy, weighted by the nearest training examples
    ``GradPCA``              part of the gradient outside of the principal directions of the class means
"""

from nullbayes.detectors.distances import Mahalanobis as Mahalanobis
from nullbayes.detectors.distances import RelativeMahalanobis as RelativeMahalanobis
from nullbayes.detectors.gradients import GradPCA as GradPCA
from nullbayes.detectors.heads import FDBD as FDBD
from nullbayes.detectors.heads import SCALE as SCALE
from nullbayes.detectors.heads import ReAct as ReAct
from nullbayes.detectors.heads import ViM as ViM
from nullbayes.detectors.logits import GEN as GEN
from nullbayes.detectors.logits import MSP as MSP
from nullbayes.detectors.logits import Energy as Energy
from nullbayes.detectors.logits import MaxLogit as MaxLogit
from nullbayes.detectors.neighbours import KNN as KNN
from nullbayes.detectors.neighbours import NNGuide as NNGuide
