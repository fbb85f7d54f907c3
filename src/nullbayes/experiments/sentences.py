"""The experiment ``text``: MiniLM fine-tuned on CLINC150, with queries out of scope as strangers.

The loss-projected posterior has the head, the last layer and the head, the whole encoder where memory and time permit,
and LoRA adapters with the head. The projected posterior has the head alone: 150 outputs are 150 rows per example.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from nullbayes.experiments import text
from nullbayes.experiments.adapters import ADAPTERS
from nullbayes.experiments.frame import Estimate, Experiment, Results, Settings
from nullbayes.experiments.judging import DETECTORS
from nullbayes.experiments.study import Sizes, Subject, run_study
from nullbayes.experiments.study_page import study_page
from nullbayes.experiments.tasks import Inputs, Task, clinc_sentences

_PARAMETERS = 22_700_000
_OURS = ("MAP", "ProjectedPosterior", "LossProjectedPosterior")


@dataclass(frozen=True)
class TextSizes(Sizes):
    """How large a study of sentences is.

    Attributes
    ----------
    length : int
        Tokens of a query; longer ones are cut.
    last : str
        Glob of the last layer of the encoder.
    rank : int
        Of the adapters.
    """

    length: int = 32
    last: str = "bert.encoder.layer.5.*"
    rank: int = 4


FULL = TextSizes(n=15_000, epochs=6, held_out=1000, test=4500, shifted=0, members=3, budget=30, curvature=1500)
QUICK = TextSizes(
    n=450, epochs=6, held_out=200, test=200, shifted=0, samples=10, budget=10, pictures=4, length=16,
    patience=60.0, only=(*_OURS, "LastLayerLaplace", *DETECTORS, "TemperatureScaling"),
)  # fmt: skip


def study(settings: Settings, sizes: TextSizes, folder: str = "") -> Results:
    """Return all that is measured of the sentence encoder; for ``folder`` see `nullbayes.experiments.text`."""
    free = {
        "MiniLM, last layer and head": ((sizes.last, "head.*"), 0, (), None),
        "MiniLM, head": (("head.*",), 0, ("MAP", "LossProjectedPosterior"), None),
        "MiniLM, whole encoder": (("*",), 0, ("MAP", "LossProjectedPosterior"), 1),
        "MiniLM, LoRA adapters and head": ((*ADAPTERS, "head.*"), sizes.rank, _OURS, None),
    }
    task = functools.partial(_task, sizes=sizes, folder=folder)
    subject = functools.partial(
        Subject, show=functools.partial(_sentence, settings, folder), gallery_by="LossProjectedPosterior"
    )
    subjects = [
        subject(name, functools.partial(task, free=globs, rank=rank), only=only, seeds=seeds)
        for name, (globs, rank, only, seeds) in free.items()
    ]
    return run_study(settings, subjects, sizes)


def _task(settings: Settings, sizes: TextSizes, folder: str, free: tuple[str, ...], rank: int) -> Task:
    return clinc_sentences(
        settings, sizes.n, sizes.epochs, free, length=sizes.length, folder=folder, rank=rank, held_out=sizes.held_out,
        test=sizes.test,
    )  # fmt: skip


def _sentence(settings: Settings, folder: str, x: Inputs) -> str:
    """Return the words of a query, as the encoder has them."""
    assert not isinstance(x, Tensor)
    return text.decode(text.weights_folder(folder, settings.data), x["input_ids"])


def _sizes(settings: Settings) -> TextSizes:
    return QUICK if settings.quick else FULL


def _estimate(settings: Settings) -> Estimate:
    """Return what a run will take: training of encoder and adapters, and the fits, that of all parameters above all."""
    sizes, cuda = _sizes(settings), settings.device.type == "cuda"
    networks = 2 + (sizes.members if not sizes.only else 0)
    training = networks * sizes.epochs * sizes.n * (1e-3 if cuda else 2e-2)
    fits = 600.0 if cuda and not settings.quick else 120.0 if settings.quick else 1.0 * sizes.n
    disk = 4 * _PARAMETERS * settings.seeds * networks
    return Estimate(settings.seeds * (training + fits), 80 << 30 if cuda and not settings.quick else 4 << 30, disk)


EXPERIMENTS = {
    "text": Experiment(
        "text",
        "MiniLM on CLINC150: queries out of scope as strangers, by every method, and several choices of parameters.",
        ("clinc150", "transformers"),
        _estimate,
        run=lambda settings: study(settings, _sizes(settings)),
        page=functools.partial(study_page, title="A sentence encoder on CLINC150"),
        by_method=True,
    )
}
