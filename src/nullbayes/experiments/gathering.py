"""What a study measured, gathered over its seeds: means, standard deviations, and the paper's figures beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nullbayes.experiments import paper
from nullbayes.experiments.frame import Results
from nullbayes.experiments.summary import mean, spread

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Gathered:
    """One subject of a study, over its seeds. What a method does not have is an empty list, or None.

    Attributes
    ----------
    subject : mapping
        As `nullbayes.experiments.study.run_study` returns it.
    """

    subject: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of network and data."""
        found: str = self.subject["name"]
        return found

    @property
    def data(self) -> str:
        """The name of the data in the paper; may be empty."""
        found: str = self.subject["data"]
        return found

    @property
    def runs(self) -> Sequence[Run]:
        """One per seed."""
        found: Sequence[Run] = self.subject["runs"]
        return found

    @property
    def strangers(self) -> list[str]:
        """The names of the sets of strangers."""
        found: list[str] = self.runs[0]["network"]["strangers"]
        return found

    @property
    def methods(self) -> list[str]:
        """Those that were fitted in some seed; the network itself comes first."""
        names = dict.fromkeys(("MAP", *(name for run in self.runs for name in run["methods"])))
        return [name for name in names if self.records(name)]

    @property
    def failures(self) -> dict[str, str]:
        """Why some methods are left out."""
        found = ((name, record) for run in self.runs for name, record in run["methods"].items())
        return {name: record["failed"] for name, record in found if "failed" in record}

    def records(self, method: str) -> list[Mapping[str, Any]]:
        """Return what a method gave, for each seed in which it was fitted."""
        found = (run["methods"].get(method, {"failed": ""}) for run in self.runs)
        return [record for record in found if "failed" not in record]

    # --- figures ------------------------------------------------------------------------------------------------------

    def familiar(self, method: str, metric: str) -> list[float]:
        """Return a metric of the predictions for test data, for each seed."""
        return [record["familiar"][metric] for record in self.records(method) if record["familiar"] is not None]

    def detection(self, method: str, score: str, stranger: str) -> list[float]:
        """Return the AUROC of a score against strangers, for each seed."""
        found = (record["scores"].get(score) for record in self.records(method))
        return [figures[stranger]["auroc"] for figures in found if figures is not None]

    def scores(self, method: str) -> list[str]:
        """Return the scores of a method."""
        return list(dict.fromkeys(score for record in self.records(method) for score in record["scores"]))

    def default(self, method: str) -> str:
        """Return the score that a method has without being asked for another."""
        found: str = self.records(method)[0]["default"]
        return found

    def published(self, method: str) -> str | None:
        """Return the score by which the paper judges a method."""
        found: str | None = self.records(method)[0]["published"]
        return found

    def best(self, method: str, stranger: str) -> str:
        """Return the score of a method with the highest mean AUROC against strangers."""
        return max(self.scores(method), key=lambda score: mean(self.detection(method, score, stranger)))

    def shift(self, method: str, shift: str, metric: str) -> list[list[float]]:
        """Return a metric at every strength of a shift, for each seed."""
        found = (record.get("shift", {}).get(shift) for record in self.records(method))
        return [[point[metric] for point in points] for points in found if points is not None]

    def strengths(self, shift: str) -> list[float]:
        """Return the strengths of a shift."""
        for run in self.runs:
            for record in run["methods"].values():
                if shift in record.get("shift", {}):
                    return [point["strength"] for point in record["shift"][shift]]
        return []


def summary(found: Gathered) -> Results:
    """Return the figures of the main tables, with the paper's: what a README shows.

    Returns
    -------
    dict
        "familiar" by method and metric, "strangers" by method, score and set: ``mean``, ``std`` and ``paper`` each.
        The scores are the default one and the paper's.
    """
    familiar = {
        method: {
            metric: _plain(found.familiar(method, metric), paper.familiar(found.data, method, metric))
            for metric in paper.METRICS
        }
        for method in found.methods
        if found.familiar(method, "accuracy")
    }
    strangers = {
        method: {
            score: {
                name: _plain(
                    found.detection(method, score, name),
                    paper.strangers(found.data, method, name) if score == found.published(method) else None,
                )
                for name in found.strangers
            }
            for score in dict.fromkeys(filter(None, (found.default(method), found.published(method))))
        }
        for method in found.methods
    }
    return {"familiar": familiar, "strangers": strangers}


def _plain(found: Sequence[float], published: float | None) -> dict[str, float | None]:
    return {"mean": mean(found), "std": spread(found), "paper": published}
