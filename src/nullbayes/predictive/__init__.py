"""Predictions: outputs and their variance, probabilities, masks of positions, and out-of-distribution scores."""

from nullbayes.predictive.outputs import LINKS as LINKS
from nullbayes.predictive.outputs import PRED_TYPES as PRED_TYPES
from nullbayes.predictive.outputs import Mask as Mask
from nullbayes.predictive.outputs import Masks as Masks
from nullbayes.predictive.outputs import default_link as default_link
from nullbayes.predictive.outputs import joined as joined
from nullbayes.predictive.outputs import nll as nll
from nullbayes.predictive.outputs import predict as predict
from nullbayes.predictive.outputs import sample_outputs as sample_outputs
from nullbayes.predictive.outputs import stream as stream
from nullbayes.predictive.outputs import summarize as summarize
from nullbayes.predictive.prediction import Prediction as Prediction
from nullbayes.predictive.scores import OF_MEAN as OF_MEAN
from nullbayes.predictive.scores import SCORES as SCORES
from nullbayes.predictive.scores import check_per as check_per
from nullbayes.predictive.scores import default_score as default_score
from nullbayes.predictive.scores import pooled as pooled
from nullbayes.predictive.scores import score as score
from nullbayes.predictive.scores import scores_of as scores_of
from nullbayes.predictive.scores import warn_of_padding as warn_of_padding
from nullbayes.predictive.sharing import in_parallel as in_parallel
