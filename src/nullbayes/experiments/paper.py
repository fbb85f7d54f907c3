"""The paper's tables 1 and 2, with the definition that each figure used, and which of them cannot be right.

Methods have the names that they have here. Figures are (mean, standard deviation) over three seeds.
"""

from __future__ import annotations

Figure = tuple[float, float]

METHODS = ("MAP", "ProjectedPosterior", "LossProjectedPosterior", "SWAG", "LastLayerLaplace", "DiagonalLaplace")
METRICS = ("confidence", "nll", "accuracy", "brier", "ece", "mce")
SCORE = {"MAP": "max_probability"}  # by which the paper judges a method; all others by "max_variance"

# Data -> method -> the six metrics of table 1, in the order of METRICS.
_TABLE_1: dict[str, tuple[tuple[Figure, ...], ...]] = {
    "mnist": (
        ((0.981, 0.002), (0.080, 0.005), (0.977, 0.002), (1.775, 0.004), (0.787, 0.009), (0.895, 0.014)),
        ((0.981, 0.002), (0.080, 0.005), (0.977, 0.002), (1.774, 0.004), (0.787, 0.009), (0.895, 0.014)),
        ((0.813, 0.018), (1.225, 0.099), (0.949, 0.000), (1.532, 0.028), (0.666, 0.007), (0.894, 0.011)),
        ((0.982, 0.001), (0.064, 0.006), (0.982, 0.000), (1.776, 0.002), (0.788, 0.005), (0.906, 0.013)),
        ((0.977, 0.002), (0.090, 0.005), (0.975, 0.002), (1.768, 0.003), (0.784, 0.007), (0.887, 0.008)),
        ((0.951, 0.008), (0.129, 0.016), (0.975, 0.001), (1.727, 0.012), (0.784, 0.008), (0.894, 0.015)),
    ),
    "fashion-mnist": (
        ((0.938, 0.005), (0.325, 0.011), (0.897, 0.002), (1.713, 0.008), (0.732, 0.006), (0.901, 0.006)),
        ((0.937, 0.005), (0.325, 0.011), (0.897, 0.002), (1.713, 0.008), (0.732, 0.006), (0.902, 0.006)),
        ((0.744, 0.031), (1.529, 0.371), (0.871, 0.006), (1.441, 0.041), (0.617, 0.025), (0.901, 0.013)),
        ((0.931, 0.006), (0.327, 0.001), (0.898, 0.001), (1.703, 0.008), (0.725, 0.003), (0.907, 0.003)),
        ((0.931, 0.005), (0.339, 0.011), (0.896, 0.002), (1.703, 0.008), (0.727, 0.004), (0.902, 0.004)),
        ((0.735, 0.024), (0.922, 0.051), (0.855, 0.000), (1.431, 0.033), (0.621, 0.021), (0.895, 0.021)),
    ),
    "svhn": (
        ((0.949, 0.004), (0.188, 0.004), (0.949, 0.002), (1.691, 0.004), (0.740, 0.012), (0.889, 0.004)),
        ((0.949, 0.004), (0.188, 0.004), (0.949, 0.002), (1.691, 0.004), (0.740, 0.012), (0.889, 0.007)),
        ((0.948, 0.005), (0.191, 0.007), (0.949, 0.003), (1.685, 0.013), (0.734, 0.017), (0.880, 0.012)),
        ((0.897, 0.007), (0.217, 0.014), (0.947, 0.004), (1.606, 0.010), (0.745, 0.007), (0.874, 0.003)),
        ((0.943, 0.005), (0.197, 0.009), (0.946, 0.001), (1.681, 0.006), (0.740, 0.007), (0.899, 0.009)),
        ((0.948, 0.003), (0.187, 0.005), (0.949, 0.002), (1.689, 0.003), (0.742, 0.011), (0.899, 0.000)),
    ),
    "cifar10": (
        ((0.952, 0.002), (0.422, 0.011), (0.894, 0.002), (1.698, 0.038), (0.703, 0.013), (0.878, 0.009)),
        ((0.952, 0.001), (0.422, 0.011), (0.894, 0.002), (1.698, 0.038), (0.703, 0.013), (0.878, 0.002)),
        ((0.701, 0.013), (2.643, 0.205), (0.855, 0.002), (1.387, 0.018), (0.559, 0.006), (0.802, 0.005)),
        ((0.914, 0.035), (0.445, 0.063), (0.865, 0.029), (1.670, 0.049), (0.694, 0.018), (0.881, 0.005)),
        ((0.944, 0.001), (0.406, 0.005), (0.894, 0.001), (1.712, 0.001), (0.704, 0.000), (0.880, 0.007)),
        ((0.934, 0.028), (0.465, 0.069), (0.872, 0.032), (1.698, 0.038), (0.703, 0.013), (0.873, 0.005)),
    ),
}

# Data -> strangers -> the AUROC of table 2 for METHODS. EMNIST is left out: it is among no data that we have.
_TABLE_2: dict[str, dict[str, tuple[Figure, ...]]] = {
    "mnist": {
        "fashion-mnist": (
            (0.924, 0.015), (0.926, 0.013), (0.899, 0.011), (0.917, 0.024), (0.793, 0.215), (0.772, 0.218),
        ),
        "kmnist": ((0.846, 0.019), (0.862, 0.011), (0.856, 0.002), (0.861, 0.032), (0.759, 0.166), (0.745, 0.174)),
    },
    "fashion-mnist": {
        "mnist": ((0.714, 0.001), (0.861, 0.029), (0.914, 0.035), (0.685, 0.014), (0.768, 0.001), (0.726, 0.028)),
        "kmnist": ((0.664, 0.012), (0.867, 0.012), (0.907, 0.026), (0.655, 0.015), (0.699, 0.020), (0.683, 0.013)),
    },
    "cifar10": {
        "svhn": ((0.874, 0.002), (0.881, 0.002), (0.863, 0.008), (0.798, 0.040), (0.811, 0.024), (0.836, 0.022)),
        "cifar100": ((0.816, 0.026), (0.836, 0.004), (0.800, 0.013), (0.782, 0.042), (0.801, 0.026), (0.806, 0.027)),
    },
    "svhn": {
        "cifar10": ((0.960, 0.007), (0.960, 0.002), (0.966, 0.009), (0.777, 0.029), (0.914, 0.005), (0.917, 0.005)),
        "cifar100": ((0.954, 0.008), (0.957, 0.001), (0.960, 0.006), (0.787, 0.027), (0.908, 0.005), (0.916, 0.004)),
    },
}  # fmt: skip

# Our definition of each metric, and what the paper's figure was computed by.
DEFINITIONS = {
    "confidence": ("Mean probability of the predicted class.", "The paper: the same."),
    "nll": (
        "Negative log-likelihood of the mean predictive distribution, in nats.",
        "The paper's released code: the mean of the negative log-likelihoods of the samples, which is never smaller.",
    ),
    "accuracy": ("Share of examples whose most probable class is the target.", "The paper: the same."),
    "brier": (
        "Mean of Σ (p − y)² over the classes.",
        "The paper's figures exceed the bound that its own confidence and accuracy set.",
    ),
    "ece": (
        "Expected calibration error over 15 equal bins that include both ends.",
        "The paper's released code leaves out confidences of 0.99 and above; its figures exceed the bound that its own "
        "confidence and accuracy set.",
    ),
    "mce": (
        "Maximum calibration error over the same bins; a bin with one example counts as much as any other.",
        "The paper: from the same bins as its expected calibration error, so no target either.",
    ),
    "auroc": (
        "Probability that a stranger scores higher than a familiar input.",
        "The paper: by the largest variance of a logit, for the network by the largest probability; its released code "
        "takes the variance of probabilities.",
    ),
}


def familiar(data: str, method: str, metric: str) -> float | None:
    """Return the mean of a figure of table 1, in-distribution; None where the paper has none."""
    if data not in _TABLE_1 or method not in METHODS or metric not in METRICS:
        return None
    return _TABLE_1[data][METHODS.index(method)][METRICS.index(metric)][0]


def strangers(data: str, method: str, stranger: str) -> float | None:
    """Return the mean of an AUROC of table 2; None where the paper has none."""
    if method not in METHODS or stranger not in _TABLE_2.get(data, {}):
        return None
    return _TABLE_2[data][stranger][METHODS.index(method)][0]


def bound(confidence: float, accuracy: float, metric: str) -> float | None:
    r"""Return the largest value that "ece" or "brier" can have beside a confidence and an accuracy.

    In every bin :math:`|\mathrm{conf} - \mathrm{acc}| \le (1 - \mathrm{conf}) + (1 - \mathrm{acc})`, and so is the mean
    over the bins. The Brier score of an example is at most :math:`2 (1 - \mathrm{conf})` if it is right, and at most 2
    if it is wrong, so that its mean is at most twice that. Other metrics have no such bound: None.
    """
    slack = (1.0 - confidence) + (1.0 - accuracy)
    return {"ece": slack, "brier": 2.0 * slack}.get(metric)


def impossible(data: str) -> list[tuple[str, str, float, float]]:
    """Return what in table 1 exceeds its bound: method, metric, the figure, and the bound by the paper's own figures.

    The bound is taken with confidence and accuracy two standard deviations below what is printed.
    """
    found = []
    for method in METHODS if data in _TABLE_1 else ():
        confidence, _, accuracy, brier, ece, _ = _TABLE_1[data][METHODS.index(method)]
        low = confidence[0] - 2 * confidence[1], accuracy[0] - 2 * accuracy[1]
        for metric, figure in (("brier", brier[0]), ("ece", ece[0])):
            most = bound(*low, metric)
            if most is not None and figure > most:
                found.append((method, metric, figure, most))
    return found
