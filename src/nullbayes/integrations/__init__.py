"""Integrations: the library inside others. ``import nullbayes`` loads none of them; import the module that you need.

``nullbayes.integrations.sklearn``
    ``NullBayesClassifier`` and ``NullBayesRegressor``. Install ``nullbayes[sklearn]``.
``nullbayes.integrations.lightning``
    ``PosteriorCallback``, which fits after training. Install ``nullbayes[lightning]``.
``nullbayes.integrations.transformers``
    ``PosteriorCallback``, the same for a ``Trainer``. Install ``nullbayes[transformers]``.
``nullbayes.integrations.export``
    ``export``: the prediction as a program. For ONNX files install ``nullbayes[onnx]``.

Predictions go into metrics of torchmetrics as they are: ``metric.update(prediction.probs, labels)``.
"""
