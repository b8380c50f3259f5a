"""The paper's tables with our numbers beside its own, and the tables we derive from our runs."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jointcv.paper.arrivals import arrival_table, mnist_table
from jointcv.paper.cells import NOTHING, Cell, Table, elbo, fixed, ratio, scientific, storage
from jointcv.paper.outcomes import (
    MissingResults,
    available,
    estimators,
    read,
    record,
    rows,
    seconds_per_step,
    sweeps,
)
from jointcv.paper.reference import (
    TASKS,
    VARIANCE_BOUNDS,
    PaperTask,
    Variances,
)

FACTOR = 3.0


def table(number: int, results: Path) -> Table:
    """A table of the paper, or one derived from our runs.

    Args:
        number: 1 variance decomposition, 2 sizes, 3 cost of a step; 4 steps and seconds to the best ELBO of
            naive and of cv, 5 MNIST to −25,000, 6 final ELBO by step size, 7 the comparison with NUTS.
        results: the folder of result files.

    Raises:
        ValueError: there is no such table, or the files it needs are missing; the message names them.
    """
    if number not in TABLES:
        raise ValueError(f"number={number} is not a table. Use one of {', '.join(map(str, TABLES))}.")
    return TABLES[number](results)


def beyond(value: float, factor: float = FACTOR) -> bool:
    """Whether a ratio is off by more than a factor either way."""
    return math.isfinite(value) and not 1 / factor <= value <= factor


# Table 1


def our_variances(results: Path, task: str) -> tuple[Variances, str, float, float]:
    """Our row of Table 1, with the end point it was measured at, the batch size and the draws.

    Raises:
        MissingResults: `<task>.table1.csv` is missing or empty.
    """
    columns = read(results, f"{task}.table1.csv")
    batch = TASKS[task].batch_size
    at = int(np.argmin(abs(columns["batch"] - batch)))
    values = Variances(*(float(columns[name][at]) for name in ("v_total", "v_data", "v_noise")))
    return values, str(columns["end_point"][at]), float(columns["batch"][at]), float(columns["draws"][at])


def _variance_table(results: Path) -> Table:
    lines, notes, missing = [], [], []
    for task in TASKS.values():
        if task.variances is None:
            continue
        try:
            ours, end_point, batch, draws = our_variances(results, task.name)
        except MissingResults as error:
            missing.append(str(error))
            continue
        lines.append(_variance_row(task, ours, batch))
        notes += _variance_reasons(task, ours, end_point, batch, draws)
    if not lines:
        raise MissingResults("; ".join(missing))
    heads = [f"{name} {who}" for name in ("V_{n,ε}", "V_n", "V_ε") for who in ("paper", "ours", "ratio")]
    return Table(
        "Table 1. Variance of the gradient at the end point, and its two floors",
        ("task", "batch", *heads),
        tuple(lines),
        (*notes, *(f"Not measured: {sentence}." for sentence in missing)),
    )


def _variance_row(task: PaperTask, ours: Variances, batch: float) -> tuple[Cell, ...]:
    cells = [Cell(task.title), Cell(f"{batch:g}", batch)]
    for paper, our, quotient in variance_ratios(task, ours):
        flag = beyond(quotient)
        cells += [Cell(scientific(paper), paper), Cell(scientific(our), our)]
        cells.append(Cell(ratio(quotient), quotient, flag))
    return tuple(cells)


def variance_ratios(task: PaperTask, ours: Variances) -> list[tuple[float, float, float]]:
    """(paper, ours, ours ÷ paper) of V_{n,ε}, V_n, V_ε."""
    assert task.variances is not None
    pairs = [(getattr(task.variances, name), getattr(ours, name)) for name in ("total", "data", "noise")]
    return [(paper, our, our / paper) for paper, our in pairs]


def _variance_reasons(
    task: PaperTask, ours: Variances, end_point: str, batch: float, draws: float
) -> list[str]:
    names = ("V_{n,ε}", "V_n", "V_ε")
    off = [
        f"{name} is {ratio(quotient)} times the paper's"
        for name, (_, _, quotient) in zip(names, variance_ratios(task, ours), strict=True)
        if beyond(quotient)
    ]
    if not off:
        return []
    where = f"measured at {end_point}" if end_point else "measured at our own end point"
    reason = f"{task.title}: {', '.join(off)}. Ours was {where} from {draws:,.0f} draws; "
    if batch != task.batch_size:
        reason += f"our batch holds {batch:g} data and the paper's {task.batch_size}; "
    reason += (
        "the paper's end point is not published, and these variances depend on the location and σ there."
    )
    return [reason]


# Table 2


def _size_table(results: Path) -> Table:
    lines, measured = [], []
    for task in TASKS.values():
        if task.num_dims is None:
            continue
        view = Cell("whole z") if task.view_size is None else Cell(str(task.view_size), task.view_size)
        saved = task.paper_bytes / task.our_bytes
        lines.append(
            (
                Cell(task.title),
                Cell(f"{task.num_data:,}", task.num_data),
                Cell(f"{task.num_dims:,}", task.num_dims),
                view,
                Cell(storage(task.paper_bytes), task.paper_bytes),
                Cell(storage(task.our_bytes), task.our_bytes),
                Cell(f"{ratio(saved)}×", saved),
            )
        )
        measured += _measured_sizes(results, task)
    return Table(
        "Table 2. Sizes, and the memory of the joint control variate",
        ("task", "N", "D", "K of the view", "paper's table", "ours", "smaller by"),
        tuple(lines),
        (
            "The paper's table holds a location for every datum, N×D numbers of 4 bytes; ours the view of "
            "every datum, N×K, and where a datum sees the whole z a location for every fixed minibatch of "
            f"{TASKS['ppca'].batch_size}.",
            *measured,
        ),
    )


def _measured_sizes(results: Path, task: PaperTask) -> list[str]:
    """A sentence where a run's own record has other sizes than the paper."""
    run, off = record(results, f"{task.name}.json"), []
    for name, letter, expected in (("num_data", "N", task.num_data), ("dim", "D", task.num_dims)):
        found = run.get(name)
        if isinstance(found, int) and found != expected:
            off.append(f"{letter} = {found:,} where the paper has {expected:,}")
    return [f"{task.title} as run here: {', '.join(off)}."] if off else []


# Table 3


def step_costs(results: Path, task: str) -> Iterator[tuple[str, float, float, float]]:
    """(estimator, ms of a step, its ratio to naive's, oracle calls) in a task's timing file.

    Raises:
        MissingResults: `<task>.timing.csv` is missing or empty.
    """
    columns = read(results, f"{task}.timing.csv")
    naive = seconds_per_step(results, task).get("naive", math.nan)
    for estimator, seconds in seconds_per_step(results, task).items():
        calls = np.median(rows(columns, estimator=estimator)["oracle_calls_per_step"])
        yield estimator, 1000 * seconds, seconds / naive, float(calls)


def paper_ratio(task: str, estimator: str) -> float:
    """The paper's time of a step relative to naive's."""
    times = TASKS[task].milliseconds
    return times.get(estimator, math.nan) / times.get("naive", math.nan)


def _cost_table(results: Path) -> Table:
    lines = []
    for task in available(results, ".timing.csv"):
        label = TASKS[task].title
        for estimator, milliseconds, quotient, calls in step_costs(results, task):
            theirs, paper = paper_ratio(task, estimator), TASKS[task].milliseconds.get(estimator, math.nan)
            lines.append(
                (
                    Cell(label),
                    Cell(estimator),
                    Cell(VARIANCE_BOUNDS.get(estimator, NOTHING)),
                    Cell(f"{calls:,.4g}" if math.isfinite(calls) else NOTHING, calls),
                    Cell(_milliseconds(milliseconds), milliseconds),
                    Cell(ratio(quotient), quotient),
                    Cell(_milliseconds(paper), paper),
                    Cell(ratio(theirs), theirs),
                )
            )
            label = ""
    if not lines:
        raise MissingResults(f"no *.timing.csv in {results}")
    heads = ("task", "estimator", "variance bound", "oracle calls", "ms a step", "÷ naive")
    return Table(
        "Table 3. Variance bound, oracle calls and time of a step",
        (*heads, "paper's ms (GPU)", "paper's ÷ naive"),
        tuple(lines),
        (
            "Oracle calls count gradients and Hessian-vector products a step over data. Times are of a "
            "compiled step, compilation left out; the paper's are of one RTX 2080 Ti.",
        ),
    )


def _milliseconds(value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# Derived tables


def _final_table(results: Path) -> Table:
    lines = []
    for task in available(results):
        label = TASKS[task].title
        for estimator, sweep in sweeps(results, task).items():
            means, deviations = sweep.finals()
            best = np.nanargmax(means) if np.isfinite(means).any() else -1
            for index in range(len(means)):
                size, mean = sweep.step_sizes[index], means[index]
                lines.append(
                    (
                        Cell(label),
                        Cell(estimator if index == 0 else ""),
                        Cell(f"{size:g}" if size > 0 else "its own", size),
                        Cell(
                            elbo(task, mean) if math.isfinite(mean) else "diverged", mean, bool(index == best)
                        ),
                        Cell(fixed(deviations[index]), deviations[index]),
                        Cell(f"{sweep.seeds}", sweep.seeds),
                        Cell(f"{sweep.steps[-1]:,.0f}", sweep.steps[-1]),
                    )
                )
                label = ""
    if not lines:
        raise MissingResults(f"no task's runs in {results}")
    return Table(
        "Table 6. Final ELBO by estimator and step size",
        ("task", "estimator", "step size", "final ELBO", "sd over seeds", "seeds", "steps"),
        tuple(lines),
        (
            "Marked: the best step size. Diverged: at least one seed was no longer finite at the end. Of "
            "dropout the training objective, which falls.",
        ),
    )


def _nuts_table(results: Path) -> Table:
    lines, missing = [], []
    for task in ("sonar", "australian"):
        try:
            columns = read(results, f"{task}.nuts.csv")
        except MissingResults as error:
            missing.append(str(error))
            continue
        label = TASKS[task].title
        for estimator in estimators(columns):
            last = best_errors(columns, estimator)
            lines.append(
                (
                    Cell(label),
                    Cell(estimator),
                    Cell(f"{last['step'][-1]:,.0f}", last["step"][-1]),
                    Cell(f"{last['mean_error'][-1]:.3g}", last["mean_error"][-1]),
                    Cell(f"{last['variance_error'][-1]:.3g}", last["variance_error"][-1]),
                )
            )
            label = ""
    if not lines:
        raise MissingResults("; ".join(missing))
    return Table(
        "Table 7. Error of the posterior mean and variance against NUTS at the end",
        ("task", "estimator", "step", "error of mean", "error of variance"),
        tuple(lines),
        tuple(f"Not measured: {sentence}." for sentence in missing),
    )


def best_errors(columns: Mapping[str, np.ndarray], estimator: str) -> dict[str, np.ndarray]:
    """An estimator's errors against NUTS by step, each time those of the step size with the highest ELBO."""
    own = rows(columns, estimator=estimator)
    score = np.where(np.isfinite(own["elbo"]), own["elbo"], -np.inf)
    chosen = []
    for step in np.unique(own["step"]):
        here = np.flatnonzero(own["step"] == step)
        chosen.append(here[np.argmax(score[here])])
    return {name: values[chosen] for name, values in own.items()}


TABLES: Mapping[int, Callable[[Path], Table]] = MappingProxyType(
    {
        1: _variance_table,
        2: _size_table,
        3: _cost_table,
        4: arrival_table,
        5: mnist_table,
        6: _final_table,
        7: _nuts_table,
    }
)
