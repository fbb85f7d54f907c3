"""A page with everything that a page can show, and a page of accidents.

`PYTHONPATH=tests python -m support.sample_page FILE` writes the first, with `--accidents` the second.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from nullbayes.page import (
    Column,
    Curves,
    Gallery,
    Histograms,
    Page,
    Picture,
    Reliability,
    Section,
    Series,
    Table,
    Value,
    render,
)

HOSTILE = "<script>document.title = 'hacked'</script>\"'&]]><img src=x onerror=\"document.title='hacked'\">"
LONG = "projected_posterior_with_a_very_long_name_and_no_place_to_break" * 4
NAN, INF = math.nan, math.inf

_METRICS = [
    Column("method"),
    Column("accuracy", "Share of test inputs whose most probable class is right.", "high"),
    Column("NLL", "Mean negative log-likelihood of the test labels, in nats.", "low"),
    Column("ECE", "Expected calibration error over 15 bins of equal width.", "low"),
    Column("AUROC KMNIST", "Share of pairs of a test input and a KMNIST input that `ood_score` ranks right.", "high"),
    Column("AUROC MNIST", "The same with MNIST.", "high"),
    Column("seconds", "To fit the method, without the training of the network.", None, 0),
]


def _row(name: str, *cells: tuple[float, float | None, float | None]) -> list[str | Value | None]:
    return [name, *(Value(*cell) for cell in cells)]


def tables() -> Section:
    first = Table(
        "Fashion-MNIST, LeNet, three seeds: the test set, and strangers of two kinds.",
        _METRICS,
        [
            _row("network (MAP)", (0.9134, 0.0012, 0.911), (0.2561, 0.0031, 0.27), (0.0142, 0.002, None),
                 (0.9213, 0.004, 0.855), (0.9187, 0.003, 0.852), (0.0, None, None)),
            _row("projected posterior", (0.9134, 0.0011, 0.912), (0.2544, 0.0030, 0.26), (0.0081, 0.001, None),
                 (0.9981, 0.0002, 0.867), (0.9979, 0.0003, 0.861), (41.2, 1.1, None)),
            _row("loss-projected posterior", (0.9133, 0.0012, 0.911), (0.2551, 0.0031, 0.26), (0.0094, 0.001, None),
                 (0.9812, 0.0010, 0.871), (0.9824, 0.0011, 0.868), (12.9, 0.4, None)),
            ["diagonal Laplace", Value(0.8971, 0.0101, 0.84), Value(0.3419, 0.021, 0.51), Value(0.0611, 0.011),
             Value(0.8712, 0.02, 0.79), Value(0.8644, 0.02, 0.78), Value(15230.0, 12.0)],
            ["SWAG", Value(0.9129, 0.0013), Value(0.2533, 0.0028), Value(0.0122, 0.001), None, Value(NAN), Value(INF)],
        ],
        source="table 2",
    )  # fmt: skip
    second = Table(
        "The same columns for MNIST; what they mean is said once.",
        _METRICS,
        [
            _row("network (MAP)", (0.99, None, None), (0.0312, None, None), (0.00004, None, None),
                 (0.95, None, None), (0.94, None, None), (0.0, None, None)),
            _row("projected posterior", (0.99, None, None), (0.0311, None, None), (0.0041, None, None),
                 (0.991, None, None), (0.9904, None, None), (33.0, None, None)),
        ],
    )  # fmt: skip
    paragraphs = [
        "The projected posterior keeps the predictions of the network: its accuracy and its likelihood are those of "
        "the network to within the standard deviation over seeds. It ranks strangers above test inputs almost always.",
        "Scores are those of `posterior.ood_score(x)` with defaults. The paper does not say which score it used; "
        "its figures are beside ours all the same.",
    ]
    return Section("In and out of distribution", paragraphs, [first, second])


def shift() -> Section:
    angles = [float(angle) for angle in range(0, 181, 15)]
    names = ["network (MAP)", "projected posterior", "loss-projected posterior", "diagonal Laplace", "SWAG",
             "last-layer Laplace", "SCOD"]  # fmt: skip
    accuracy = [
        Series(
            name, angles, [0.91 * math.exp(-((a / (60 + 7 * i)) ** 2)) + 0.06 for a in angles], [0.012 + 0.002 * i] * 13
        )
        for i, name in enumerate(names[:3])
    ]
    calibration = [
        Series(name, angles, [0.02 + 0.5 * (1 - math.exp(-((a / (70 + 9 * i)) ** 2))) for a in angles])
        for i, name in enumerate(names)
    ]
    return Section(
        "Rotated test images",
        ["Test images are rotated by up to 180°. Accuracy falls for all methods alike; calibration does not."],
        [
            Curves("Accuracy against the angle of rotation.", "angle in degrees", "accuracy", accuracy,
                   "Accuracy of three methods falls from 0.97 at 0 degrees to 0.06 at 180 degrees."),
            Curves("ECE against the angle, seven methods.", "angle in degrees", "ECE", calibration,
                   "The calibration error of seven methods rises with the angle."),
        ],
    )  # fmt: skip


def convergence() -> Section:
    seconds = [0.05 * 1.12**k for k in range(60)]
    curves = [
        Series("conjugate gradients", seconds, [10 ** (-0.9 * s**0.55) for s in seconds]),
        Series("alternating projections", seconds, [10 ** (-0.4 * s**0.5) for s in seconds], [0.02] * 60),
    ]
    grid = [k / 20 - 3 for k in range(121)]
    toy = [
        Series("data", [-1.9, -1.7, -1.4, -1.1, 1.0, 1.3, 1.5, 1.9], [0.4, 0.1, -0.3, -0.6, 0.7, 0.5, 0.2, -0.2],
               points_only=True),
        Series("projected posterior", grid, [math.sin(2 * x) * 0.7 for x in grid],
               [0.05 + max(0.0, 1.1 - abs(x)) ** 2 for x in grid]),
    ]  # fmt: skip
    return Section(
        "Convergence, and a gap in the data",
        [],
        [
            Curves("Residual against seconds for two projectors.", "seconds", "relative residual", curves,
                   "Both residuals fall; conjugate gradients reach 1e-6 within 30 seconds.", log_x=True, log_y=True),
            Curves("Regression with a gap between two groups of points.", "x", "y", toy,
                   "The band is narrow at the data and wide between them.", y_range=(-2.0, 2.0)),
        ],
    )  # fmt: skip


def scores() -> Section:
    edges = [k / 20 for k in range(21)]
    inside = [math.exp(-((e - 0.2) ** 2) / 0.01) for e in edges[:-1]]
    outside = [math.exp(-((e - 0.65) ** 2) / 0.03) for e in edges[:-1]]
    shares = {
        "Fashion-MNIST (test)": [v / sum(inside) for v in inside],
        "KMNIST": [v / sum(outside) for v in outside],
    }
    count = [0, 0, 0, 12, 30, 41, 60, 84, 110, 130, 190, 260, 410, 900, 7773]
    confidence = [(i + 0.5) / 15 for i in range(15)]
    accuracy = [min(1.0, c * 0.92 + 0.03 * math.sin(9 * c)) for c in confidence]
    return Section(
        "Scores and confidence",
        [],
        [
            Histograms("Scores of test inputs and of strangers.", "score", edges, shares,
                       "Scores of test inputs lie around 0.2, those of KMNIST around 0.65."),
            Reliability("Reliability of the projected posterior.", count, confidence, accuracy,
                        "Accuracy is a little below confidence in most of 15 bins."),
        ],
    )  # fmt: skip


def _digit(kind: int) -> list[list[int]]:
    return [[int(127 + 127 * math.sin((i - 14) * (j - 14) / (9 + 4 * kind))) for j in range(28)] for i in range(28)]


def _colours(kind: int) -> list[list[list[int]]]:
    return [[[8 * i, 8 * j, 40 * kind] for j in range(32)] for i in range(32)]


def inputs() -> Section:
    grey = [Picture(_digit(k), f"p = {0.001 * (k + 1):.3f}, sandal", f"Test image {k}, a sandal") for k in range(8)]
    colour = [Picture(_colours(k), f"p = 0.9{k}", f"Colour image {k}") for k in range(4)]
    texts = [
        Picture([], "p = 0.002, out of scope", "", text="how many planets orbit the nearest star"),
        Picture([], "what is the meaning of the word posterior", ""),
        Picture([], "p = 0.91, transfer", "", text="please move 100 dollars from checking to savings"),
    ]
    return Section(
        "The strangest and the most certain inputs",
        ["A p-value is the share of held-out inputs that are at least as strange."],
        [
            Gallery("The strangest test images.", grey),
            Gallery("Colour images.", colour, columns=4),
            Gallery("Queries.", texts),
        ],
    )


def sample() -> Page:
    """A page as an experiment makes it."""
    facts = {
        "command": "`nullbayes reproduce fashion-mnist --data FOLDER`",
        "commit": "0bf09ff3c0ffee",
        "versions": "nullbayes 0.1.0, torch 2.13.0, Python 3.11.7",
        "device": "NVIDIA H200",
        "seeds": "0, 1, 2",
        "seconds": "1843",
    }
    lead = (
        "A posterior in the null space of the training data keeps the network’s predictions and tells strangers from "
        "test inputs: AUROC 0.998 on KMNIST, where the paper has 0.867."
    )
    sections = [tables(), shift(), convergence(), scores(), inputs()]
    return Page("Fashion-MNIST: when not to trust a LeNet", lead, sections, facts)


def accidents() -> Page:
    """A page made of what should not happen."""
    columns = [Column(HOSTILE, HOSTILE, "high"), Column(LONG, LONG, "low", 2), Column("x", "", "high")]
    rows = [
        [HOSTILE, Value(NAN, NAN, NAN), Value(INF, INF, -INF), "text"],
        [LONG, None, Value(None, None, 0.5), HOSTILE],
        ["", Value(1e-12, 1e-13), Value(-1e15), Value(0.5, None)],
    ]
    many = [[f"row {i}", Value((i * 37) % 1000 / 1000, 0.001)] for i in range(1000)]
    nothing: list[Series] = []
    return Page(
        HOSTILE,
        HOSTILE + LONG,
        [
            Section(HOSTILE, [HOSTILE, LONG, "one ` backtick"], [
                Table(HOSTILE, columns, rows, HOSTILE),
                Table("Empty", [], []),
                Table("No rows", _METRICS, []),
                Table("A thousand rows", [Column("row"), Column("value", best="high")], many),
            ]),
            Section("", [], [
                Curves("", "", "", nothing, ""),
                Curves(HOSTILE, HOSTILE, LONG, [
                    Series(HOSTILE, [1, 2, None, 4, INF], [NAN, 1e308, 3, -1e308, 2], [INF, 1, None, NAN, 3]),
                    Series(LONG, [0, -1, 1], [0, -2, 3], points_only=True),
                ], HOSTILE),
                Curves("Logarithms of nothing", "x", "y", [Series("a", [0, -1], [0, -1])], "none",
                       log_x=True, log_y=True),
                Curves("Constant", "x", "y", [Series("a", [1, 1], [3, 3], [0, 0])], "a point"),
                Curves("Bands beyond zero", "x", "y", [Series("a", [1, 10, 1e9], [1e-9, 1, 5], [1, 2, 9])], "bands",
                       log_x=True, log_y=True),
                Histograms(HOSTILE, HOSTILE, [0.0, 1.0, INF], {HOSTILE: [0.5, NAN], LONG: []}, HOSTILE),
                Histograms("Empty", "", [], {}, ""),
                Reliability(HOSTILE, [0, NAN, 3, None], [0.1, 0.3, NAN, 0.9], [0.1, 0.3, 0.6, 0.9], HOSTILE),
                Reliability("Empty", [], [], [], ""),
            ]),
            Section(LONG, [], [
                Gallery("Empty", []),
                Gallery(HOSTILE, [Picture([[255]], HOSTILE, HOSTILE), Picture([], HOSTILE, HOSTILE, text=LONG)]),
                Gallery("A large one", [Picture([[i % 256] * 300 for i in range(200)], "", "")]),
            ]),
            Section("No blocks"),
        ],
        {HOSTILE: HOSTILE, LONG: LONG},
    )  # fmt: skip


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(accidents() if "--accidents" in sys.argv else sample()), encoding="utf-8")
