"""Decisions: is this input strange, yes or no, and which answers can be excluded; with guarantees from held-out data.

``familiar``    what a fit remembers of the training data: features of some examples, and a checksum of each input
``strangers``   artificial strangers, made of familiar inputs
``weights``     learns which statistics tell familiar inputs from strange ones
``conformal``   p-values and quantiles that hold for every distribution
``calibration`` what `calibrate` finds, as one value
``deciding``    the methods of a posterior: calibrate, p_value, is_ood, predict_set, predict_interval
"""
