"""``nullbayes report``: one page about a posterior and a user's own data."""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nullbayes as nb
from nullbayes.command import options as shared
from nullbayes.command.frame import Command, Console, Refusal, misused, writable, write

if TYPE_CHECKING:
    from nullbayes import Evaluation, FitCheck
    from nullbayes.page import Page, Table

BatchFn = Callable[[Any], Any]
_SHUFFLED = "values shuffled"  # the label of strangers that are made where none are given
_ALPHA = 0.05
_NAMES = 17  # columns of a report that hold names
_NONE_GIVEN = (
    "No strangers were given, so the inputs themselves were made strange: their values are shuffled within each input. "
    "Real strangers may be easier or harder to find: pass some of your own, `--strangers LABEL=NAME`."
)


def _arguments(parser: argparse.ArgumentParser) -> None:
    shared.posterior(parser)
    shared.data(parser, "familiar data with targets that were not trained on")
    shared.strangers(parser, required=False)
    shared.held_out(parser, "which calibrate the posterior for this page")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the page, such as report.html"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Evaluate a posterior by all of its scores, and write a page."""
    if options.output.suffix not in (".html", ".htm"):
        msg = f"-o {options.output}: the page is a file that ends with .html."
        raise misused(msg)
    output = writable(options.output, "the page")
    from nullbayes.command.data import read_data, read_pairs
    from nullbayes.page.html import render

    posterior = shared.the_posterior(options.posterior, shared.the_model(options, console), options)
    data, strangers = read_pairs(options.data, "--data", console), shared.the_strangers(options, console)
    if options.held_out is not None:
        posterior.calibrate(read_data(options.held_out, "--held-out", console))
    page, evaluation = make_page(
        posterior, options.posterior.stem, data, strangers, _command(options), shared.functions(options)["batch_fn"]
    )
    write(output, lambda path: path.write_text(render(page), encoding="utf-8"))
    console.result(f"The page is {output}.", {"page": str(output), "evaluation": evaluation.to_dict()})
    return 0


def make_page(
    posterior: Any, name: str, data: Any, strangers: dict[str, Any], command: str, batch_fn: BatchFn | None = None
) -> tuple[Page, Evaluation]:
    """Return the page about a posterior, and the evaluation that it shows.

    ``name`` is what the page calls the posterior, and ``command`` has made the page. Where there are no strangers, they
    are made of the data.
    """
    from nullbayes.command.inputs import galleries
    from nullbayes.page import Page, Section, evaluation_sections, evaluation_summary

    given = strangers or {_SHUFFLED: _Shuffled(data, batch_fn)}
    evaluation = nb.evaluate({name: posterior}, data, given, scores="all")
    check = posterior.check_fit(data)
    row, limit = evaluation.rows[0], _threshold(posterior)
    summary = evaluation_summary(evaluation, thresholds={} if limit is None else {row.name: limit})
    pictures = galleries(posterior, data, given, _ALPHA, batch_fn)
    sections = [
        Section("The posterior and its network", [_promise(check)], [_table(check)]),
        *evaluation_sections(summary, galleries=pictures, per_method=True, skipped=("accuracy", "nll")),
        Section("The fit", ["What `fit` reported."], [_report(posterior)]),
    ]
    if not strangers:
        sections.insert(1, Section("Strangers", [_NONE_GIVEN]))
    return Page(f"Report on {name}", _lead(posterior, evaluation), sections, _facts(posterior, command)), evaluation


class _Shuffled:
    """The inputs of some data with their values shuffled, the same way in every pass."""

    without_batch_fn = True  # which was applied already

    def __init__(self, data: Any, batch_fn: BatchFn | None) -> None:
        self._data, self._batch_fn = data, batch_fn

    def __iter__(self) -> Iterator[Any]:
        import torch

        from nullbayes.command.data import batches, inputs_in, is_given

        generator = torch.Generator().manual_seed(0)
        for batch in batches(self._data):
            x = inputs_in(batch, None if is_given(self._data) else self._batch_fn)
            if x is None or x.ndim < 2:
                msg = "No strangers can be made of these inputs: pass some, --strangers LABEL=NAME."
                raise Refusal(msg)
            flat = x.flatten(1)
            order = torch.rand(flat.shape, generator=generator, device="cpu").argsort(1).to(flat.device)
            yield flat.gather(1, order).reshape(x.shape)


def _lead(posterior: Any, evaluation: Evaluation) -> str:
    """Return the result in a sentence or two."""
    row = evaluation.rows[0]
    found = ", ".join(f"{label} {detection.auroc:.3f}" for label, detection in row.strangers.items())
    score = "calibrated score" if row.calibrated_by else f"score {row.score!r}"
    lead = f"AUROC of the {score}: {found}."
    if row.false_alarms is not None:
        flagged = ", ".join(f"{(d.flagged or 0.0):.1%} of {label}" for label, d in row.strangers.items())
        alarms = f"{row.false_alarms:.1%} of familiar inputs"
        return f"At a false-alarm rate of {_ALPHA:g}, the posterior flags {alarms}, and {flagged}. {lead}"
    return f"The posterior is not calibrated, so that there are scores and no decisions. {lead}"


def _threshold(posterior: Any) -> float | None:
    """Return the calibrated score above which inputs are flagged; None where there are no decisions."""
    if posterior.calibration is None:
        return None
    ranked = posterior.calibration.scores.sort(descending=True).values
    most = math.floor(_ALPHA * (len(ranked) + 1) + 1e-9)  # a flagged input, and the ranked ones above it
    return float(ranked[most - 1]) if most else None


def _promise(check: FitCheck) -> str:
    return (
        f"A posterior is of use if it predicts as well as its network does. On {check.n_data:,} examples its outputs "
        f"have a standard deviation of {check.std:.3g}, where the outputs themselves spread by {check.output_std:.3g}."
        + ("" if check.temperature == 1.0 else f" {check.why()}")
    )


def _table(check: FitCheck) -> Table:
    from nullbayes.page import Column, Table, Value

    columns = [Column(""), Column("NLL", "Negative log-likelihood per target.", "low", 4)]
    if check.accuracy_model is not None:
        columns.append(Column("accuracy", "Share of correct classes.", "high", 4))
    rows: list[list[str | Value]] = [
        [name, Value(nll), *([] if share is None else [Value(share)])] for name, nll, share in check.rows()
    ]
    return Table("Predictions of the network and of the posterior", columns, rows)


def _report(posterior: Any) -> Table:
    """Return the report of the fit as a table; baselines have none."""
    from nullbayes.page import Column, Table

    report = getattr(posterior, "report", None)
    lines = [] if report is None else str(report).splitlines()
    rows = [[line[:_NAMES].strip(), line[_NAMES:].strip()] for line in lines]
    return Table("Report of the fit", [Column("what"), Column("value")], rows)


def _facts(posterior: Any, command: str) -> dict[str, str]:
    """Return how the page was made."""
    import torch

    return {
        "command": command,
        "posterior": str(posterior),
        "device": str(posterior.directions.device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "nullbayes": nb.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _command(options: argparse.Namespace) -> str:
    """Return the command as it can be typed again."""
    words: list[str] = ["nullbayes", "report", str(options.posterior)]
    for name in ("model", "weights", "output_fn", "batch_fn", "likelihood", "data", "held_out", "output"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    words += ["--strangers", *options.strangers] if options.strangers else []
    return shlex.join(words + (["--device", options.device] if options.device != "cpu" else []))


COMMAND = Command(
    "report",
    "write a page about a posterior",
    "Writes one HTML file that opens without a network: figures by every score, reliability, histograms, and the "
    "strangest and most certain inputs. Without strangers of your own, shuffled inputs stand for them.",
    "nullbayes report posterior.safetensors --model own:build --weights own.pt --data own:test "
    "--strangers noise=own:noise -o report.html",
    _arguments,
    run,
)
