"""The paper's figures from our runs."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter

from jointcv.paper.drawing import (
    DASHED,
    DOTTED,
    INK,
    MAIN,
    PAPER,
    SOFT,
    STYLE,
    count_axis,
    curve_limits,
    draw_curve,
    draw_line,
    dress,
    elbo_axis,
    elbo_tick,
    few_decades,
    label_outer,
    look,
    panel_grid,
    seconds_axis,
    shared_legend,
    value_limits,
)
from jointcv.paper.outcomes import (
    Curve,
    MissingResults,
    available,
    curves,
    estimators,
    read,
    record,
    rows,
    seconds_per_step,
    sweeps,
)
from jointcv.paper.reference import TASKS
from jointcv.paper.tables import best_errors

DROPOUT = "dropout"


def figure(name: str, results: Path) -> Figure:
    """A figure of the paper, from committed results.

    Args:
        name: one of `FIGURES`.
        results: the folder of result files.

    Raises:
        ValueError: there is no such figure, or no file with its data; the message names the files.
    """
    if name not in FIGURES:
        raise ValueError(f"name={name!r} is not a figure. Use one of {', '.join(FIGURES)}.")
    with rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        return FIGURES[name](results)


# Variance


def _variance(results: Path) -> Figure:
    return _variance_traces(results, "trace_location", "variance, location gradient", floors=True)


def _variance_scale(results: Path) -> Figure:
    return _variance_traces(results, "trace_scale", "variance, scale gradient", floors=False)


def _variance_traces(results: Path, column: str, label: str, floors: bool) -> Figure:
    tasks = _need(_posteriors(results, ".variance.csv"), results, "*.variance.csv")
    found = {task: read(results, f"{task}.variance.csv") for task in tasks}
    found = {task: columns for task, columns in found.items() if _has_positive(columns[column])}
    _need(found, results, f"{column} in *.variance.csv")
    sheet, panels = panel_grid(found)
    for task, columns in found.items():
        axes = panels[task]
        for estimator in estimators(columns):
            own = rows(columns, estimator=estimator)
            steps, values = _by_step(own["step"], own[column])
            draw_line(axes, estimator, steps, values)
        if floors:
            _floors(axes, columns)
        axes.set_yscale("log")
        count_axis(axes)
        few_decades(axes)
    label_outer(panels, "iteration", label)
    shared_legend(sheet, panels.values())
    return sheet


def _has_positive(values: np.ndarray) -> bool:
    return bool((np.isfinite(values) & (values > 0)).any())


def _by_step(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Geometric mean of the positive values at each step."""
    keep = np.isfinite(values) & (values > 0)
    steps, values = steps[keep], np.log(values[keep])
    grid, index = np.unique(steps, return_inverse=True)
    return grid, np.exp(np.bincount(index, values) / np.maximum(np.bincount(index), 1))


def _floors(axes: Axes, columns: Mapping[str, np.ndarray]) -> None:
    """V_n, which cv cannot go below, and V_ε, which inc cannot go below, where joint stood at each step."""
    whose = next((name for name in ("joint", "naive") if (columns["estimator"] == name).any()), None)
    columns = rows(columns, estimator=whose) if whose else columns
    for column, text in (("v_data", "$V_n$: floor of cv"), ("v_noise", r"$V_\varepsilon$: floor of inc")):
        steps, values = _by_step(columns["step"], columns[column])
        if not steps.size:
            continue
        axes.plot(steps, values, color=INK, linewidth=0.9, linestyle=DASHED, zorder=6, label=text)
        axes.annotate(
            text,
            (steps[-1], values[-1]),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=7,
            zorder=7,
            path_effects=[withStroke(linewidth=2, foreground=PAPER)],
        )


# ELBO


def _elbo(results: Path) -> Figure:
    found = _all_curves(results)
    sheet, panels = panel_grid(found)
    for task, entries in found.items():
        for curve in entries.values():
            draw_curve(panels[task], curve, curve.steps)
        elbo_axis(panels[task], entries.values())
        count_axis(panels[task])
    label_outer(panels, "iteration", "ELBO")
    shared_legend(sheet, panels.values())
    return sheet


def _seconds(results: Path) -> Figure:
    timed = {}
    for task, entries in _all_curves(results).items():
        seconds = seconds_per_step(results, task)
        timed[task] = {name: (curve, seconds[name]) for name, curve in entries.items() if name in seconds}
    timed = {task: entries for task, entries in timed.items() if entries}
    _need(timed, results, "*.timing.csv")
    sheet, panels = panel_grid(timed)
    for task, entries in timed.items():
        for curve, seconds in entries.values():
            draw_curve(panels[task], curve, curve.steps * seconds)
        elbo_axis(panels[task], [curve for curve, _ in entries.values()])
        seconds_axis(panels[task], [curve.steps * seconds for curve, seconds in entries.values()])
    label_outer(panels, "seconds of compiled steps", "ELBO")
    shared_legend(sheet, panels.values())
    return sheet


def _step_sizes(results: Path) -> Figure:
    tasks = _need(_posteriors(results), results, "<task>.csv")
    sheet, panels = panel_grid(tasks)
    for task in tasks:
        _step_size_panel(panels[task], results, task)
    label_outer(panels, "step size", "final ELBO")
    shared_legend(sheet, panels.values(), markers=True)
    return sheet


def _step_size_panel(axes: Axes, results: Path, task: str, sign: int = 1) -> None:
    """Final values by step size; a cross at the bad end of the axis for a step size that diverged."""
    found = {name: (sweep, *sweep.finals()) for name, sweep in sweeps(results, task).items()}
    bests = {
        name: float(np.nanmax(means)) for name, (_, means, _) in found.items() if np.isfinite(means).any()
    }
    if not bests:
        raise MissingResults(f"every run in {results / f'{task}.csv'} diverged")
    low, high = value_limits(bests, max(bests.values()), stretch=1.8)
    for name, (sweep, means, deviations) in found.items():
        grid = np.isfinite(sweep.step_sizes) & (sweep.step_sizes > 0)
        known = np.isfinite(means)
        if grid.sum() > 1:
            shown = grid & known
            where = sweep.step_sizes[shown]
            dress(axes.plot(where, sign * means[shown])[0], name, markers=True)
            bars = np.where(means[shown] >= low, deviations[shown], np.nan)
            how = {"elinewidth": 0.9, "ecolor": look(name).color, "zorder": look(name).order}
            axes.errorbar(where, sign * means[shown], bars, fmt="none", **how)
        elif name in bests:  # no grid: a step size from a formula
            dress(axes.axhline(sign * bests[name]), name)
        _crosses(axes, sweep.step_sizes[grid & ~known], look(name).color, 0.025 if sign > 0 else 0.975)
    axes.set_xscale("log")
    few_decades(axes, axis="x")
    axes.set_ylim(*((low, high) if sign > 0 else (-high, -low)))
    axes.yaxis.set_major_formatter(FuncFormatter(elbo_tick))


def _crosses(axes: Axes, where: np.ndarray, color: str, height: float) -> None:
    """Marks at the edge of a panel, for what lies beyond."""
    if not len(where):
        return  # a line without points would still take its place in the layout
    place, heights = axes.get_xaxis_transform(), np.full(len(where), height)
    axes.plot(where, heights, "x", color=color, markersize=4, transform=place, zorder=2, clip_on=False)


def _all_curves(results: Path) -> dict[str, dict[str, Curve]]:
    found = {}
    for task in _posteriors(results):
        try:
            found[task] = curves(results, task)
        except MissingResults:
            continue
    return _need(found, results, "<task>.csv")


# Variants of one estimator


def _optimizers(results: Path) -> Figure:
    """Runs with the other optimizer than the main figures', from `<task>-sgd.csv` or `<task>-adam.csv`."""
    pairs = {}
    for task in TASKS.values():
        other = "adam" if task.optimizer == "SGD" else "sgd"
        try:
            main, second = curves(results, task.name), curves(results, f"{task.name}-{other}")
        except MissingResults:
            continue
        pairs[task.name] = (main, second) if other == "adam" else (second, main)
    _need(pairs, results, "<task>-sgd.csv beside <task>.csv (or <task>-adam.csv for Sonar, Australian)")
    sheet, panels = panel_grid(pairs, ratio=0.8)
    for task, (sgd, adam) in pairs.items():
        axes = panels[task]
        for entries, dashes in ((sgd, DOTTED), (adam, "-")):
            for name in MAIN:
                if name in entries:
                    how, curve = look(name), entries[name]
                    axes.plot(curve.steps, curve.mean, color=how.color, linestyle=dashes, label=how.label)
        elbo_axis(axes, [*sgd.values(), *adam.values()])
        count_axis(axes)
    label_outer(panels, "iteration", "ELBO")
    styles = [("SGD", SOFT, DOTTED), ("Adam", SOFT, "-")]
    shared_legend(
        sheet, panels.values(), extra=[Line2D([], [], color=c, linestyle=s, label=t) for t, c, s in styles]
    )
    return sheet


def _memory(results: Path) -> Figure:
    kept = ("naive", "joint", "joint-svrg")
    found = {}
    for task in _posteriors(results):
        try:
            entries = curves(results, task)
        except MissingResults:
            continue
        if "joint" in entries and "joint-svrg" in entries:
            found[task] = {name: entries[name] for name in kept if name in entries}
    _need(found, results, "runs of both joint and joint-svrg in <task>.csv")
    sheet, panels = panel_grid(found)
    labels = {"joint": "joint, SAGA: a table", "joint-svrg": "joint, SVRG: an anchor"}
    for task, entries in found.items():
        for name, curve in entries.items():
            draw_curve(panels[task], curve, curve.steps)
            panels[task].lines[-1].set_label(labels.get(name, look(name).label))
        elbo_axis(panels[task], entries.values())
        count_axis(panels[task])
    label_outer(panels, "iteration", "ELBO")
    shared_legend(sheet, panels.values())
    return sheet


# NUTS


def _nuts(results: Path) -> Figure:
    tasks = _need(available(results, ".nuts.csv"), results, "sonar.nuts.csv or australian.nuts.csv")
    sheet = Figure(figsize=(7.2, 2.5 * len(tasks) + 0.5), layout="constrained")
    grid = np.asarray(sheet.subplots(len(tasks), 2, squeeze=False))
    kinds = (("mean_error", "error of the mean"), ("variance_error", "error of the variance"))
    for line, task in zip(grid, tasks, strict=True):
        columns = read(results, f"{task}.nuts.csv")
        optimum = _reference_errors(results, task)
        for axes, (kind, label) in zip(line, kinds, strict=True):
            for estimator in estimators(columns):
                own = best_errors(columns, estimator)
                draw_line(axes, estimator, own["step"], own[kind])
            if kind in optimum:
                axes.axhline(optimum[kind], color=INK, linestyle=DASHED, linewidth=1, zorder=6)
                axes.annotate(
                    "best of this family",
                    (0.99, optimum[kind]),
                    xycoords=("axes fraction", "data"),
                    xytext=(0, -3),
                    textcoords="offset points",
                    ha="right",
                    va="top",
                    fontsize=7,
                )
            axes.set_yscale("log")
            axes.set_title(TASKS[task].title)
            axes.set_ylabel(label)
            if task == tasks[-1]:
                axes.set_xlabel("iteration")
            axes.margins(y=0.12)
            count_axis(axes)
            few_decades(axes)
    shared_legend(sheet, grid.flat)
    return sheet


def _reference_errors(results: Path, task: str) -> dict[str, float]:
    """The errors of the reference optimum, from the JSON record."""
    entries = record(results, f"{task}.nuts.json").get("reference", {})
    return {kind: float(entries[kind]) for kind in ("mean_error", "variance_error") if kind in entries}


# Dropout


def _dropout(results: Path) -> Figure:
    found, seconds = curves(results, DROPOUT), seconds_per_step(results, DROPOUT)
    panels: list[Callable[[Axes], None]] = [lambda axes: _dropout_steps(axes, found)]
    if any(name in seconds for name in found):
        panels.append(lambda axes: _dropout_seconds(axes, found, seconds))
    panels.append(lambda axes: _dropout_sizes(axes, results))
    if (results / "dropout.variance.csv").is_file():
        panels.append(lambda axes: _dropout_variance(axes, results))
    across = 2 if len(panels) == 4 else len(panels)
    down = -(-len(panels) // across)
    sheet = Figure(figsize=(3.4 * across, 2.5 * down + 0.4), layout="constrained")
    grid = np.asarray(sheet.subplots(down, across, squeeze=False)).ravel()
    for axes, draw in zip(grid, panels, strict=True):
        draw(axes)
    shared_legend(sheet, grid)
    return sheet


def _dropout_steps(axes: Axes, found: Mapping[str, Curve]) -> None:
    for curve in found.values():
        draw_curve(axes, _negated(curve), curve.steps)
    _loss_axis(axes, found.values())
    count_axis(axes)
    axes.set(xlabel="iteration", ylabel="training objective", title="Against iterations")


def _dropout_seconds(axes: Axes, found: Mapping[str, Curve], seconds: Mapping[str, float]) -> None:
    timed = {name: curve for name, curve in found.items() if name in seconds}
    for name, curve in timed.items():
        draw_curve(axes, _negated(curve), curve.steps * seconds[name])
    _loss_axis(axes, timed.values())
    seconds_axis(axes, [curve.steps * seconds[name] for name, curve in timed.items()])
    axes.set(xlabel="seconds of compiled steps", ylabel="training objective", title="Against time")


def _dropout_sizes(axes: Axes, results: Path) -> None:
    _step_size_panel(axes, results, DROPOUT, sign=-1)
    axes.set(xlabel="step size", ylabel="final training objective", title="Against the step size")


def _dropout_variance(axes: Axes, results: Path) -> None:
    columns = read(results, "dropout.variance.csv")
    for estimator in estimators(columns):
        own = rows(columns, estimator=estimator)
        draw_line(axes, estimator, *_by_step(own["step"], own["trace_location"]))
    _floors(axes, columns)
    axes.set_yscale("log")
    count_axis(axes)
    few_decades(axes)
    axes.set(xlabel="iteration", ylabel="gradient variance", title="Variance of the gradient")


def _loss_axis(axes: Axes, entries: Iterable[Curve]) -> None:
    low, high = curve_limits(entries)
    axes.set_ylim(-high, -low)


def _negated(curve: Curve) -> Curve:
    return Curve(
        curve.estimator, curve.steps, curve.epochs, -curve.mean, curve.deviation, curve.step_size, curve.seeds
    )


def _posteriors(results: Path, suffix: str = ".csv") -> list[str]:
    """The tasks that have a file with this suffix and an ELBO: all but dropout, which has its own figure."""
    return [task for task in available(results, suffix) if task != DROPOUT]


def _need(found, results: Path, files: str):
    """What was found, or the sentence that says which file is missing."""
    if not found:
        raise MissingResults(f"{results}/ has no {files}")
    return found


FIGURES: Mapping[str, Callable[[Path], Figure]] = MappingProxyType(
    {
        "variance": _variance,
        "variance-scale": _variance_scale,
        "elbo": _elbo,
        "step-size": _step_sizes,
        "seconds": _seconds,
        "optimizers": _optimizers,
        "memory": _memory,
        "nuts": _nuts,
        "dropout": _dropout,
    }
)
