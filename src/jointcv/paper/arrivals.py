"""How soon an estimator is where another ended: steps, epochs and seconds to a target ELBO."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jointcv.paper.cells import NOTHING, Cell, Table, duration, elbo, fixed, ratio
from jointcv.paper.outcomes import Curve, MissingResults, available, curves, seconds_per_step
from jointcv.paper.reference import MNIST_TARGET, MNIST_TARGET_SECONDS, TASKS


@dataclass(frozen=True)
class Arrival:
    """When an estimator's curve first is at a target.

    Attributes:
        steps: infinite if it never is.
        epochs: infinite if it never is.
        seconds: NaN if a step was not timed.
    """

    steps: float
    epochs: float
    seconds: float


def arrival(curve: Curve, target: float, seconds: Mapping[str, float]) -> Arrival:
    """When a curve first is at a target, to the nearest evaluation."""
    steps, epochs = curve.time_to(target)
    return Arrival(steps, epochs, steps * seconds.get(curve.estimator, math.nan))


def _arrival_cells(found: Arrival, base: Arrival) -> list[Cell]:
    if not math.isfinite(found.steps):
        return [Cell("not reached"), *[Cell(NOTHING)] * 4]
    fewer, faster = _quotient(base.steps, found.steps), _quotient(base.seconds, found.seconds)
    return [
        Cell(f"{found.steps:,.0f}", found.steps),
        Cell(f"{ratio(fewer)}×" if math.isfinite(fewer) else NOTHING, fewer),
        Cell(ratio(found.epochs), found.epochs),
        Cell(duration(found.seconds), found.seconds),
        Cell(f"{ratio(faster)}×" if math.isfinite(faster) else NOTHING, faster),
    ]


def _quotient(above: float, below: float) -> float:
    return above / below if below > 0 and math.isfinite(above) else math.nan


def arrival_table(results: Path) -> Table:
    """Every estimator's way to the best ELBO of naive and to that of cv.

    Raises:
        MissingResults: no task has runs.
    """
    lines = []
    for task in available(results):
        lines += _arrival_rows(results, task)
    if not lines:
        raise MissingResults(f"no task in {results} has runs of naive or cv to compare with")
    return Table(
        "Table 4. Steps and seconds to the best ELBO of naive and of cv",
        ("task", "target", "ELBO", "estimator", "steps", "fewer by", "epochs", "seconds", "faster by"),
        tuple(lines),
        (
            "The target is the highest mean over seeds that naive (cv) has at any evaluation with any step "
            "size. An estimator is there at the first evaluation at which its mean with its best step size "
            "is at the target or above. Seconds are steps times the time of a compiled step.",
        ),
    )


def _arrival_rows(results: Path, task: str) -> list[tuple[Cell, ...]]:
    try:
        found = curves(results, task)
    except MissingResults:
        return []
    seconds, lines, label = seconds_per_step(results, task), [], TASKS[task].title
    for base in ("naive", "cv"):
        if base not in found:
            continue
        target = found[base].best
        reference = arrival(found[base], target, seconds)
        mark = f"{base}'s best"
        for estimator, curve in found.items():
            cells = _arrival_cells(arrival(curve, target, seconds), reference)
            lines.append(
                (Cell(label), Cell(mark), Cell(elbo(task, target) if mark else ""), Cell(estimator), *cells)
            )
            label = mark = ""
    return lines


def mnist_table(results: Path) -> Table:
    """Every estimator's way to the ELBO at which the paper compares times.

    Raises:
        MissingResults: MNIST has no runs.
    """
    found, seconds = curves(results, "mnist"), seconds_per_step(results, "mnist")
    base = arrival(found["naive"], MNIST_TARGET, seconds) if "naive" in found else Arrival(*[math.nan] * 3)
    lines = []
    for estimator, curve in found.items():
        paper = MNIST_TARGET_SECONDS.get(estimator, math.nan)
        cells = _arrival_cells(arrival(curve, MNIST_TARGET, seconds), base)
        best = Cell(fixed(curve.best), curve.best)
        lines.append((Cell(estimator), *cells, best, Cell(duration(paper), paper)))
    return Table(
        f"Table 5. MNIST: steps and seconds to an ELBO of {fixed(MNIST_TARGET)}",
        (
            "estimator",
            *("steps", "fewer than naive by", "epochs", "seconds", "faster by"),
            *("best ELBO", "paper's seconds (GPU)"),
        ),
        tuple(lines),
        ("The paper's seconds are approximate.",),
    )
