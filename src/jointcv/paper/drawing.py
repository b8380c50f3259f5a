"""How the figures look: one estimator, one colour; panels, axes and the shared legend.

A hue is a control (grey none, orange for ε, green for n, blue both, vermilion ours); dashes are its variant.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from jointcv.paper.outcomes import Curve
from jointcv.paper.reference import ESTIMATORS, TASKS

MAIN = ("naive", "cv", "joint")
INK, SOFT, GRID, PAPER = "#1b1f24", "#5b6470", "#dfe3e8", "#fdfdfc"
POINTS = 160
STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "mathtext.fontset": "dejavusans",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "savefig.facecolor": "none",
    "figure.facecolor": PAPER,
    "figure.dpi": 160,
    "axes.facecolor": "none",
}


@dataclass(frozen=True)
class Look:
    """How an estimator is drawn, everywhere."""

    label: str
    color: str
    dashes: str | tuple = "-"
    width: float = 1.4
    marker: str = "o"
    order: float = 3.0


GREY, ORANGE, GREEN, SKY, BLUE = "#868b92", "#e69f00", "#009e73", "#56b4e9", "#0072b2"
PINK, VERMILION = "#cc79a7", "#d55e00"
DASHED, DOTTED = (0, (4, 1.6)), (0, (1.2, 1.4))

LOOKS: Mapping[str, Look] = MappingProxyType(
    {
        "naive": Look("naive", GREY, marker="o"),
        "cv": Look("cv", ORANGE, marker="s"),
        "inc": Look("inc", GREEN, marker="^"),
        "ens": Look("ens", SKY, marker="v"),
        "joint": Look("joint", BLUE, width=1.9, marker="D", order=4.0),
        "joint-svrg": Look("joint (SVRG)", BLUE, DASHED, width=1.6, marker="d", order=4.1),
        "smiso": Look("SMISO", PINK, marker="P"),
        "full-naive": Look("naive, full batch", GREY, DOTTED, marker="o"),
        "full-cv": Look("cv, full batch", ORANGE, DOTTED, marker="s"),
        "ours": Look("ours", VERMILION, width=2.3, marker="*", order=5.0),
        "natural": Look("ours, natural step", VERMILION, DASHED, width=2.1, marker="X", order=5.1),
    }
)
UNKNOWN = Look("", "#7a5cad")


def look(estimator: str) -> Look:
    """An estimator's colour, dashes and label."""
    return LOOKS.get(estimator, Look(estimator, UNKNOWN.color))


def draw_curve(axes: Axes, curve: Curve, abscissa: np.ndarray) -> None:
    keep = _thin(len(curve.steps))
    where, mean, deviation = abscissa[keep], curve.mean[keep], curve.deviation[keep]
    how = look(curve.estimator)
    if curve.seeds > 1:
        axes.fill_between(
            where,
            mean - deviation,
            mean + deviation,
            color=how.color,
            alpha=0.18,
            linewidth=0,
            zorder=how.order - 2,
        )
    draw_line(axes, curve.estimator, where, mean)


def draw_line(axes: Axes, estimator: str, where: np.ndarray, values: np.ndarray) -> None:
    dress(axes.plot(where, values)[0], estimator)


def dress(line: Line2D, estimator: str, *, markers: bool = False) -> None:
    how = look(estimator)
    line.set(color=how.color, linestyle=how.dashes, linewidth=how.width, zorder=how.order, label=how.label)
    if markers:
        line.set(marker=how.marker, markersize=6.5 if how.marker == "*" else 4)


def panel_grid(tasks: Iterable[str], ratio: float = 0.78) -> tuple[Figure, dict[str, Axes]]:
    names = list(tasks)
    across = {1: 1, 2: 2, 4: 2}.get(len(names), 3)
    down = -(-len(names) // across)
    width = 3.15
    size = max(5.0, width * across + 0.2), width * ratio * down + 0.4
    sheet = Figure(figsize=size, layout="constrained")
    grid = np.asarray(sheet.subplots(down, across, squeeze=False)).ravel()
    panels = dict(zip(names, grid, strict=False))
    for axes in grid[len(names) :]:
        axes.remove()
    for name, axes in panels.items():
        axes.set_title(TASKS[name].title)
    return sheet, panels


def label_outer(panels: Mapping[str, Axes], below: str, beside: str) -> None:
    """Labels at the outer panels only."""
    everyone = list(panels.values())
    for axes in everyone:
        place = axes.get_subplotspec()
        assert place is not None
        across = place.get_gridspec().ncols
        if place.is_first_col():
            axes.set_ylabel(beside)
        if everyone.index(axes) + across >= len(everyone):
            axes.set_xlabel(below)


def shared_legend(
    sheet: Figure, panels: Iterable[Axes], *, extra: Iterable[Line2D] = (), markers: bool = False
) -> None:
    """One legend for all panels, in the canonical order."""
    seen: dict[str, Line2D] = {}
    for axes in panels:
        for line in axes.get_lines():
            seen.setdefault(str(line.get_label()), line)
    order = [look(name).label for name in ESTIMATORS]
    names = [name for name in seen if not name.startswith(("_", "$"))]
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    handles = [*(_handle(seen[name], name, markers) for name in names), *extra]
    sheet.legend(
        handles=handles,
        loc="outside upper left",
        ncols=_legend_columns([str(handle.get_label()) for handle in handles], sheet.get_figwidth() - 0.3),
        handlelength=2.4,
        columnspacing=1.4,
    )


def _legend_columns(labels: list[str], inches: float) -> int:
    """How many columns fit into as few lines as can be."""
    widths = [0.56 + 0.056 * len(label) for label in labels]
    for lines in range(1, len(labels)):
        columns = -(-len(labels) // lines)
        if sum(max(part) for part in np.array_split(widths, columns)) <= inches:
            return columns
    return 1


def _handle(line: Line2D, label: str, markers: bool) -> Line2D:
    handle = Line2D([], [])
    handle.update_from(line)
    handle.set(label=label, markersize=4, clip_on=False)
    if not markers:
        handle.set_marker("")
    return handle


def _thin(length: int) -> np.ndarray:
    """Indices of at most `POINTS` places, the first and the last among them; denser at the start."""
    if length <= POINTS:
        return np.arange(length)
    return np.unique(np.round((length - 1) * np.linspace(0, 1, POINTS) ** 1.5).astype(int))


def elbo_axis(axes: Axes, entries: Iterable[Curve]) -> None:
    axes.set_ylim(*curve_limits(entries))
    axes.yaxis.set_major_formatter(FuncFormatter(elbo_tick))


def curve_limits(entries: Iterable[Curve]) -> tuple[float, float]:
    """Limits that show the last third of the paper's main curves, and of others unless they are hopeless."""
    entries = list(entries)
    late = {curve.estimator: float(curve.mean[2 * len(curve.mean) // 3 :].min()) for curve in entries}
    return value_limits(late, max(curve.best for curve in entries))


def value_limits(lows: Mapping[str, float], high: float, stretch: float = 1.15) -> tuple[float, float]:
    """From just above `high` down to the lowest of `lows`; a low that is far out counts only for `MAIN`."""
    gaps = {name: high - low for name, low in lows.items()}
    main = [gap for name, gap in gaps.items() if name in MAIN] or list(gaps.values())
    gap = max([max(main), *(gap for gap in gaps.values() if gap <= 1.5 * max(main))])
    gap = gap if gap > 0 else max(1e-3, 0.01 * abs(high))
    return high - stretch * gap, high + 0.07 * gap


def elbo_tick(value: float, _: int | None) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.6g}M".replace("-", "−")
    return f"{value:,.6g}".replace("-", "−")


def count_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_count_tick))
    axes.margins(x=0.02)


def _count_tick(value: float, _: int | None) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def seconds_axis(axes: Axes, times: list[np.ndarray]) -> None:
    """Logarithmic; it starts where the quickest estimator is a fiftieth of its way."""
    firsts = [time[time > 0].min() for time in times if (time > 0).any()]
    lasts = [time.max() for time in times]
    axes.set_xscale("log")
    if firsts:
        axes.set_xlim(max(min(firsts), min(lasts) / 100), max(lasts) * 1.1)
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def few_decades(axes: Axes, axis: str = "y") -> None:
    side = axes.yaxis if axis == "y" else axes.xaxis
    side.set_major_locator(LogLocator(numticks=6))
    side.set_minor_formatter(NullFormatter())
