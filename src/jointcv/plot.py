"""Plots of a run and of what it found; needs the extra `jointcv[plot]`."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import ArrayLike

from jointcv.fit import Fit

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
except ImportError as error:
    raise ImportError(
        "jointcv.plot needs matplotlib, which is not installed. Use: pip install 'jointcv[plot]'"
    ) from error

BLUE, VERMILION, GREY = "#0072b2", "#d55e00", "#868b92"
CYCLE = (BLUE, "#e69f00", "#009e73", VERMILION, "#56b4e9", "#cc79a7", GREY)
WINDOWS = 60  # of the smoothed loss


def plot_history(fit: Fit, *, axes: Axes | None = None) -> Axes:
    """The loss of every step, smoothed, and the full-data negative ELBO where it was recorded.

    Args:
        fit: a run; with `elbo_every` its ELBO is shown too.
        axes: where to draw; a new figure by default.

    Returns:
        The axes, to be changed further.

    Examples:
        >>> plot_history(fit).figure.savefig("history.png")  # doctest: +SKIP
    """
    axes = _axes(axes, (6.0, 3.4))
    loss = np.asarray(fit.history["loss"], np.float64)
    steps = np.arange(1, len(loss) + 1)
    window = max(1, len(loss) // WINDOWS)
    smooth = _running_mean(loss, window)
    if window > 1:
        axes.plot(steps, loss, color=GREY, linewidth=0.4, alpha=0.5, zorder=1, rasterized=True)
    label = f"loss, mean of {window} steps" if window > 1 else "loss"
    axes.plot(steps[window - 1 :], smooth, color=BLUE, linewidth=1.5, label=label)
    shown = [smooth]
    if "elbo" in fit.history:
        where, values = fit.history["elbo_step"], -fit.history["elbo"]
        axes.plot(where, values, "o-", color=VERMILION, markersize=4, zorder=3, label="negative ELBO")
        shown.append(values)
    axes.set(xlabel="step", ylabel="negative ELBO")
    axes.set_ylim(*_late_range(shown))
    axes.legend(frameon=False)
    return axes


def plot_elbo(fits: Mapping[str, Fit], *, axes: Axes | None = None) -> Axes:
    """The full-data ELBO of several runs against steps, with bands of two standard errors.

    Args:
        fits: runs by label, each with `elbo_every`.
        axes: where to draw; a new figure by default.

    Returns:
        The axes.

    Raises:
        ValueError: a run has no recorded ELBO.
    """
    for label, fit in fits.items():
        if "elbo" not in fit.history:
            raise ValueError(f"fits[{label!r}] has no ELBO in its history. Use fit(..., elbo_every=1).")
    axes = _axes(axes, (6.0, 3.4))
    for index, (label, fit) in enumerate(fits.items()):
        steps, elbo = fit.history["elbo_step"], fit.history["elbo"]
        band = 2 * np.nan_to_num(fit.history["elbo_standard_error"])
        color = CYCLE[index % len(CYCLE)]
        axes.fill_between(steps, elbo - band, elbo + band, color=color, alpha=0.2, linewidth=0)
        axes.plot(steps, elbo, color=color, linewidth=1.6, label=label)
    low, high = _late_range([-fit.history["elbo"] for fit in fits.values()])
    axes.set(xlabel="step", ylabel="ELBO", ylim=(-high, -low))
    axes.legend(frameon=False)
    return axes


def plot_intervals(
    names: Sequence[str],
    mean: ArrayLike,
    sd: ArrayLike,
    *,
    width: float = 1.96,
    order: bool = True,
    axes: Axes | None = None,
) -> Axes:
    """One line a coefficient: its mean and an interval of `width` standard deviations either way.

    Args:
        names: of the coefficients.
        mean: their posterior means.
        sd: their posterior standard deviations.
        width: half the interval in standard deviations; 1.96 covers 95 % of a Gaussian.
        order: whether to sort by the mean, largest on top.
        axes: where to draw; a new figure of a fitting height by default.

    Returns:
        The axes.

    Raises:
        ValueError: the three do not have the same length.

    Examples:
        >>> mean, sd = fit.mean()["carrier"], fit.standard_deviation()["carrier"]  # doctest: +SKIP
        >>> plot_intervals(carriers, mean, sd)  # doctest: +SKIP
    """
    centre, spread = np.asarray(mean, np.float64).ravel(), np.asarray(sd, np.float64).ravel()
    if not len(names) == len(centre) == len(spread):
        raise ValueError(
            f"names, mean and sd have {len(names)}, {len(centre)} and {len(spread)} entries. "
            "Use one of each a coefficient."
        )
    axes = _axes(axes, (6.0, 0.8 + 0.24 * len(names)))
    places = np.argsort(centre) if order else np.arange(len(names))[::-1]
    heights = np.arange(len(names))
    centre, spread = centre[places], width * spread[places]
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=1)
    axes.hlines(heights, centre - spread, centre + spread, color=BLUE, linewidth=2.2, zorder=2)
    axes.plot(centre, heights, "o", color=BLUE, markersize=5, zorder=3)
    axes.set_yticks(heights, [str(names[int(place)]) for place in places])
    axes.set(xlabel="effect", ylim=(-0.7, len(names) - 0.3))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e3e6ea", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def _axes(axes: Axes | None, size: tuple[float, float]) -> Axes:
    if axes is None:
        _, axes = plt.subplots(figsize=size, layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    total = np.cumsum(np.concatenate([[0.0], values]))
    return (total[window:] - total[:-window]) / window


def _late_range(curves: Sequence[np.ndarray]) -> tuple[float, float]:
    """Limits that leave out the first descent: all that lies in the last 90 % of the curves."""
    late = np.concatenate([curve[len(curve) // 10 :] for curve in curves])
    late = late[np.isfinite(late)]
    low, high = (float(late.min()), float(late.max())) if late.size else (0.0, 1.0)
    margin = 0.06 * (high - low) or 1.0
    return low - margin, high + margin
