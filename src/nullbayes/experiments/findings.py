"""What the paper claims, and whether a study finds it: rules that are applied to the figures.

Nothing here knows the outcome. Each rule takes the figures of a subject and says, in numbers, what it found; a rule
whose methods were not fitted says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from nullbayes.experiments import paper
from nullbayes.experiments.frame import Results
from nullbayes.experiments.gathering import Gathered
from nullbayes.experiments.summary import brief, mean, spread

NETWORK, PROJECTED, LOSS = "MAP", "ProjectedPosterior", "LossProjectedPosterior"
POINTS, NATS = 0.002, 0.005  # of accuracy and NLL that a posterior may lose
GAIN = 0.005  # of ECE or AUROC that counts as better
_MARGIN = f"{GAIN:g}, and by more than the standard deviation of the difference over the seeds"
RIVALS = ("SWAG", "LastLayerLaplace", "DiagonalLaplace")  # with which the paper compares
_NAMES = {NETWORK: "network", PROJECTED: "projected posterior", LOSS: "loss-projected posterior"}


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, what this study measured, and whether that supports the claim.

    Attributes
    ----------
    claim, measured : str
        In one sentence each, the latter with its figures.
    holds : bool
        By the rule that ``rule`` states.
    rule : str
        When the claim counts as found.
    """

    claim: str
    measured: str
    holds: bool
    rule: str


def findings(found: Gathered) -> list[Finding]:
    """Return what each rule says about a subject."""
    return [finding for rule in _RULES for finding in rule(found)]


def as_results(found: Gathered) -> list[Results]:
    """Return the findings as JSON holds them."""
    return [asdict(finding) for finding in findings(found)]


# --- in-distribution --------------------------------------------------------------------------------------------------


def _keeps_the_network(found: Gathered) -> Iterator[Finding]:
    """The projected posterior predicts as the network does."""
    pairs = [_pair(found.familiar(m, metric) for m in (PROJECTED, NETWORK)) for metric in ("accuracy", "nll")]
    if not all(own for own, _ in pairs):
        return
    (points, nats), ends = (_differences(*pair) for pair in pairs), (POINTS, NATS)
    yield Finding(
        "The projected posterior matches the network in-distribution (table 1).",
        f"Its accuracy differs by {100 * mean(points):+.2f} points and its NLL by {mean(nats):+.4f} nats.",
        abs(mean(points)) <= ends[0] and mean(nats) <= ends[1],
        f"Accuracy within {100 * POINTS:g} points of the network's, and an NLL at most {NATS:g} nats above.",
    )


def _improves_calibration(found: Gathered) -> Iterator[Finding]:
    """The loss-projected posterior is better calibrated than the network."""
    own, network = _pair(found.familiar(m, "ece") for m in (LOSS, NETWORK))
    if not own:
        return
    gain = _differences(network, own)
    yield Finding(
        "The loss-projected posterior improves calibration in-distribution (table 1, appendix B).",
        f"Its ECE is {brief(own)}, the network's {brief(network)}.",
        _better(gain),
        f"Its ECE is below the network's by more than {_MARGIN}.",
    )


def _price_of_loss_rows(found: Gathered) -> Iterator[Finding]:
    """The paper's loss-projected posterior predicts worse than its network."""
    before, after = (paper.familiar(found.data, method, "accuracy") for method in (NETWORK, LOSS))
    own, network = _pair(found.familiar(m, "accuracy") for m in (LOSS, NETWORK))
    if before is None or after is None or not own:
        return
    theirs, ours = before - after, -mean(_differences(own, network))
    if theirs <= POINTS:
        return
    yield Finding(
        f"The loss-projected posterior costs {100 * theirs:.1f} points of accuracy (table 1).",
        f"Accuracy {brief(own)}, the network's {brief(network)}: ours costs {100 * ours + 0.0:.2f} points.",
        ours >= theirs / 2,
        "Ours costs at least half as much.",
    )


def _possible_metrics(found: Gathered) -> Iterator[Finding]:
    """Brier score and ECE of table 1 agree with its confidence and accuracy."""
    beyond = paper.impossible(found.data)
    if not found.data:
        return
    worst = max(beyond, key=lambda case: case[2] - case[3], default=None)
    said = "None exceeds the bound."
    if worst is not None:
        method, metric, figure, most = worst
        said = (
            f"{len(beyond)} of its {2 * len(paper.METHODS)} Brier scores and calibration errors for these data exceed "
            f"the bound that its own confidence and accuracy set: {_NAMES.get(method, method)}, {metric}, {figure:g} "
            f"where at most {most:.3f} is possible."
        )
    yield Finding(
        "Table 1 has Brier scores and calibration errors beside confidence and accuracy.",
        said,
        not beyond,
        "ECE ≤ (1 − confidence) + (1 − accuracy) and Brier ≤ twice that, both with two standard deviations to spare.",
    )


# --- strangers --------------------------------------------------------------------------------------------------------


def _above_the_network(found: Gathered) -> Iterator[Finding]:
    """By the paper's scores, both posteriors tell strangers better than the network."""
    for method in (PROJECTED, LOSS):
        for name in found.strangers:
            own, other = (paper.strangers(found.data, m, name) for m in (method, NETWORK))
            if own is not None and other is not None and own > other:
                yield from _compared(found, method, NETWORK, name, f"{own:g} against {other:g}")


def _above_the_baselines(found: Gathered) -> Iterator[Finding]:
    """By the paper's score, the projected posterior tells strangers better than the baselines."""
    for name in found.strangers:
        own = paper.strangers(found.data, PROJECTED, name)
        for rival in RIVALS:
            other = paper.strangers(found.data, rival, name)
            if own is not None and other is not None and own > other:
                yield from _compared(found, PROJECTED, rival, name, f"{own:g} against {other:g}")


def _compared(found: Gathered, method: str, rival: str, stranger: str, published: str) -> Iterator[Finding]:
    own, other = _pair(_by_the_papers_score(found, m, stranger) for m in (method, rival))
    if not own:
        return
    best = found.best(method, stranger)
    default = found.detection(method, found.default(method), stranger)
    yield Finding(
        f"The {_NAMES[method]} tells {stranger} better than {_article(rival)} by the paper's scores (table 2: "
        f"{published}).",
        f"Ours by these scores: {brief(own)} against {brief(other)}. The {found.default(method)} score gives "
        f"{brief(default)}, and its best score is {best}, {brief(found.detection(method, best, stranger))}.",
        _better(_differences(own, other)),
        f"Its AUROC is higher by more than {_MARGIN}.",
    )


def _by_the_papers_score(found: Gathered, method: str, stranger: str) -> list[float]:
    score = found.published(method) if found.records(method) else None
    return [] if score is None else found.detection(method, score, stranger)


# --- shifts -----------------------------------------------------------------------------------------------------------


def _keeps_calibration_under_shift(found: Gathered) -> Iterator[Finding]:
    """The loss-projected posterior stays calibrated as inputs shift."""
    for shift in found.subject["shifts"]:
        own, network = _pair([mean(c) for c in found.shift(m, shift, "ece")] for m in (LOSS, NETWORK))
        if own:
            yield Finding(
                f"Under {shift}, the loss-projected posterior keeps a low, stable calibration error (section 5.2).",
                f"Its ECE, averaged over all strengths, is {brief(own)}, the network's {brief(network)}.",
                _better(_differences(network, own)),
                f"Its mean ECE is below the network's by more than {_MARGIN}.",
            )


def _keeps_accuracy_under_shift(found: Gathered) -> Iterator[Finding]:
    """The projected posterior stays accurate as inputs shift."""
    for shift in found.subject["shifts"]:
        own, network = _pair([mean(c) for c in found.shift(m, shift, "accuracy")] for m in (PROJECTED, NETWORK))
        if own:
            lost = -mean(_differences(own, network))
            yield Finding(
                f"Under {shift}, the projected posterior retains high accuracy (section 5.2).",
                f"Averaged over all strengths, its accuracy is {brief(own)}, the network's {brief(network)}.",
                lost <= 0.01,
                "Its mean accuracy is at most one point below the network's.",
            )


_RULES: tuple[Callable[[Gathered], Iterator[Finding]], ...] = (
    _keeps_the_network, _improves_calibration, _price_of_loss_rows, _possible_metrics, _above_the_network,
    _above_the_baselines, _keeps_calibration_under_shift, _keeps_accuracy_under_shift,
)  # fmt: skip


# --- figures ----------------------------------------------------------------------------------------------------------


def _pair(lists: Iterator[list[float]]) -> tuple[list[float], list[float]]:
    """Return figures of two methods over the same seeds; nothing where one of them has none."""
    one, other = lists
    return (one, other) if len(one) == len(other) else ([], [])


def _differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def _better(differences: Sequence[float]) -> bool:
    return mean(differences) > max(GAIN, spread(differences) or 0.0)


def _article(method: str) -> str:
    return f"the {_NAMES[method]}" if method in _NAMES else method
