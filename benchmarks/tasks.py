"""The networks that cases measure: a part is a function that yields tasks, with the options of the case.

- digits: the network of the demonstration; batchnorm: a CNN with batch normalization, on scikit-learn's digits;
- lenet: on the folders ``lenet_data``, with ``lenet_n`` images (several of either are joined by plus signs);
- resnet20: the published network on CIFAR-10, with ``resnet_parameters`` free (globs joined by plus signs; all: ``*``);
- repeated: the same with ``repeated_n`` images: all there are, again and again, each time with other noise;
- svhn: a residual network trained on SVHN digits, ``svhn*/*.npz`` like those of CIFAR-10;
- uci: regressions, networks of one hidden layer, on the first ``splits`` of the usual splits;
- minilm: a sentence encoder fine-tuned on CLINC150, ``minilm_parameters`` free for the loss-projected posterior and the
  head for the projected one, to which 150 outputs are 150 rows an example. ``minilm`` is the folder with its weights.

Those without their data or packages raise :class:`Skipped <benchmarks.frame.Skipped>`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.frame import Settings
from nullbayes.experiments import tasks
from nullbayes.experiments.tasks import Task

_NOISE = 0.1  # standard deviation, of pixels whose own is about 1


def _sizes(settings: Settings) -> dict[str, int]:
    return {"held_out": settings.options.held_out, "test": settings.options.test}


def _digits(settings: Settings) -> Iterator[Task]:
    o = settings.options
    yield tasks.demo_digits(settings, o.digits_n, o.digits_steps, **_sizes(settings))


def _batchnorm(settings: Settings) -> Iterator[Task]:
    o = settings.options
    yield tasks.batchnorm_digits(settings, o.digits_n, o.batchnorm_epochs, **_sizes(settings))


def _lenet(settings: Settings) -> Iterator[Task]:
    o = settings.options
    for own in o.lenet_data.split("+"):
        for n in map(int, o.lenet_n.split("+")):
            epochs = o.lenet_epochs if n <= 10_000 else 0
            yield tasks.lenet_images(settings, own, n, epochs, **_sizes(settings))


def _resnet20(settings: Settings) -> Iterator[Task]:
    o = settings.options
    yield tasks.published_resnet(settings, o.resnet_n, o.resnet_parameters.split("+"), **_sizes(settings))


def _repeated(settings: Settings) -> Iterator[Task]:
    o = settings.options
    task = tasks.published_resnet(settings, o.repeated_n, o.resnet_parameters.split("+"), **_sizes(settings))
    (x, y), generator = task.train, settings.generator()
    assert isinstance(x, Tensor)
    index = torch.arange(o.repeated_n) % len(y)
    noise = _NOISE * torch.randn(o.repeated_n, *x.shape[1:], generator=generator).to(x)
    noise[: len(y)] = 0.0
    index = index.to(y.device)
    yield replace(task, name=f"{task.name}, repeated with noise", train=(x[index] + noise, y[index]))


def _svhn(settings: Settings) -> Iterator[Task]:
    o = settings.options
    free = o.resnet_parameters.split("+")
    yield tasks.trained_resnet(settings, "svhn", o.resnet_n, o.svhn_epochs, free, **_sizes(settings))


def _uci(settings: Settings) -> Iterator[Task]:
    o = settings.options
    for name in ("concrete", "energy", "yacht"):
        for split in range(o.splits):
            yield tasks.uci_regression(settings, name, split, o.uci_epochs)


def _minilm(settings: Settings) -> Iterator[Task]:
    o = settings.options
    yield tasks.clinc_sentences(
        settings, o.minilm_n, o.minilm_epochs, o.minilm_parameters.split("+"), length=o.minilm_length, folder=o.minilm,
        **_sizes(settings),
    )  # fmt: skip


PARTS = {
    "digits": _digits, "batchnorm": _batchnorm, "lenet": _lenet, "resnet20": _resnet20, "repeated": _repeated,
    "svhn": _svhn, "uci": _uci, "minilm": _minilm,
}  # fmt: skip
