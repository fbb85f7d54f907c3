"""Integrations: the library inside others. ``import nullbayes`` loads none of them; import the module that you need.

| module | what it has | extra |
|---|---|---|
| ``nullbayes.integrations.sklearn`` | ``NullBayesClassifier``, ``NullBayesRegressor`` | ``nullbayes[sklearn]`` |
| ``nullbayes.integrations.lightning`` | ``PosteriorCallback``, which fits after training | ``nullbayes[lightning]`` |
| ``nullbayes.integrations.transformers`` | ``PosteriorCallback``, the same for a ``Trainer`` | ``nullbayes[transformers]`` |
| ``nullbayes.integrations.export`` | ``export``: the prediction as a program, and as ONNX | ``nullbayes[onnx]`` for ONNX |

Predictions go into metrics of torchmetrics as they are: ``metric.update(prediction.probs, labels)``.
"""
