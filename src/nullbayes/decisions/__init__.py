"""Decisions: is this input strange, yes or no, and which answers can be excluded; with guarantees from held-out data.

``familiar``    what a fit remembers of the training data: features of some examples, and a checksum of each input
``remembering`` what a fit reads of the training data to remember it
``overlap``     data that should be new and are not: training inputs, and copies
``strangers``   artificial strangers, made of familiar inputs
``words``       those with other lines of a table of embeddings
``weights``     learns which statistics tell familiar inputs from strange ones
``conformal``   p-values and quantiles that hold for every distribution
``posterior``   what decisions ask of a posterior
``calibration`` what `calibrate` finds, as one value
``deciding``    the methods of a posterior: calibrate, p_value, is_ood, predict_set, predict_interval
"""

from nullbayes.decisions.calibration import Calibration as Calibration
from nullbayes.decisions.deciding import COMBINED as COMBINED
from nullbayes.decisions.deciding import calibrate as calibrate
from nullbayes.decisions.deciding import calibration_of as calibration_of
from nullbayes.decisions.deciding import check_mask as check_mask
from nullbayes.decisions.deciding import combined_score as combined_score
from nullbayes.decisions.deciding import is_ood as is_ood
from nullbayes.decisions.deciding import need_calibration as need_calibration
from nullbayes.decisions.deciding import outdated as outdated
from nullbayes.decisions.deciding import p_value as p_value
from nullbayes.decisions.deciding import predict_interval as predict_interval
from nullbayes.decisions.deciding import predict_set as predict_set
from nullbayes.decisions.familiar import Familiar as Familiar
from nullbayes.decisions.overlap import watched as watched
from nullbayes.decisions.remembering import remember as remember
