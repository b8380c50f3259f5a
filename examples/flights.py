"""Which airlines out of New York arrive late? 327,346 flights of 2013, one logistic regression, four fits.

    late ~ Bernoulli(logit = z_0 + z_carrier + z_origin + z_destination + z_month + z_weekday + z_hour)

with all z standard normal. `naive`, `cv` and `joint` share everything but the control variate: Adam with a
constant step (with `--decay` one that falls to zero), minibatches, epochs, one draw of z a step. The fourth is
`jcv.fit(problem, key=key)`, with nothing else said but the epochs. A flight has one predictor, so the ELBO of all
four is known by quadrature, without a draw.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import optax

import jointcv as jcv
from flights_data import Flights, airline_names, load_flights
from jointcv.diagnostics import variance_report

LEARNING_RATE = 0.01
POSTERIOR_DRAWS = 4000
INTERVAL = (5, 50, 95)  # per cent
CHUNK_SIZE = 10_000  # steps; whole epochs compile once
COLORS = {"naive": "#9a9a9a", "cv": "#d9952b", "joint": "#3b7dd8", "joint, default": "#0b3d70"}


@dataclass(frozen=True)
class Result:
    """A fit, and the ELBO after each of its epochs."""

    fit: jcv.Fit
    elbo: list[float]


@dataclass(frozen=True)
class Carrier:
    """An airline, and its odds of a late arrival against the average flight's: an interval and its middle."""

    name: str
    num_flights: int
    share_late: float
    low: float
    middle: float
    high: float


def make_problem(flights: Flights) -> jcv.Problem:
    """The model, in plain JAX: what one flight sees of z is a sum of seven entries."""
    features = {name: len(levels) for name, levels in flights.levels.items()}

    def log_prior(z):
        return sum(-0.5 * jnp.sum(effect**2) for effect in z.values())

    def log_likelihood(z, flight):
        logit = z["intercept"] + sum(z[feature][flight[feature]] for feature in features)
        return flight["late"] * logit - jax.nn.softplus(logit)

    data = dict(flights.codes, late=flights.late.astype(np.float32))
    example = {feature: jnp.zeros(size) for feature, size in features.items()}
    return jcv.Problem(
        log_prior=log_prior,
        log_likelihood=log_likelihood,
        data=data,
        example=dict(example, intercept=jnp.zeros(())),
    )


def run(problem: jcv.Problem, elbo: jcv.FullElbo, num_epochs: int, **options) -> Result:
    """A run, looked at after every epoch. `Fit.seconds` counts the steps and their compilation alone."""
    fit = jcv.fit(problem, key=jax.random.key(0), num_epochs=1, chunk_size=CHUNK_SIZE, **options)
    curve = [elbo(fit.params).item()]
    for _ in range(num_epochs - 1):
        fit = fit.extend(num_epochs=1, chunk_size=CHUNK_SIZE)
        curve.append(elbo(fit.params).item())
    return Result(fit, curve)


def run_all(
    problem: jcv.Problem, optimizer: optax.GradientTransformation, num_epochs: int, batch_size: int
) -> dict[str, Result]:
    """The three estimators at the same settings, and the default."""
    same = {"optimizer": optimizer, "batch_size": batch_size, "noise": jcv.ParameterNoise()}
    by_quadrature, _, _ = jcv.assemble(problem)
    elbo = jcv.FullElbo(by_quadrature, num_draws=1)
    return {
        "naive": run(problem, elbo, num_epochs, control=jcv.NaiveGradient(), **same),
        "cv": run(problem, elbo, num_epochs, control=jcv.MonteCarloCV(), **same),
        "joint": run(problem, elbo, num_epochs, control=jcv.JointCV(), **same),
        "joint, default": run(problem, elbo, num_epochs),
    }


def print_results(results: dict[str, Result]) -> None:
    print(f"{'gradient variance':>49}")
    head = ("", "batch", "ELBO", "location", "log scale", "seconds")
    print("{:<16}{:>7}{:>13}{:>13}{:>12}{:>10}".format(*head))
    for name, result in results.items():
        report = variance_report(result.fit, jax.random.key(2))
        location, log_scale = report.own
        print(
            f"{name:<16}{report.batch_size:>7}{result.elbo[-1]:>13,.1f}{location:>13.1e}{log_scale:>12.1e}"
            f"{result.fit.seconds:>10.1f}"
        )


def carriers(flights: Flights, fit: jcv.Fit) -> list[Carrier]:
    """Every airline against the average flight, all else equal, from the least late to the most."""
    effects = np.asarray(fit.sample(jax.random.key(3), POSTERIOR_DRAWS)["carrier"], np.float64)
    codes, names = flights.codes["carrier"], airline_names()
    counts = np.bincount(codes, minlength=effects.shape[1])
    late = np.bincount(codes, flights.late, minlength=effects.shape[1])
    relative = effects - (effects @ counts / counts.sum())[:, None]
    low, middle, high = np.exp(np.percentile(relative, INTERVAL, axis=0))
    rows = [
        Carrier(names[code], counts[i], late[i] / counts[i], low[i], middle[i], high[i])
        for i, code in enumerate(flights.levels["carrier"])
        if counts[i] > 0
    ]
    return sorted(rows, key=lambda carrier: carrier.middle)


def print_carriers(rows: list[Carrier]) -> None:
    print("{:<22}{:>9}{:>8}{:>12}   {}".format("airline", "flights", "late", "odds ratio", "90% interval"))
    for row in rows:
        print(
            f"{row.name:<22}{row.num_flights:>9,}{row.share_late:>8.1%}{row.middle:>12.2f}"
            f"   {row.low:.2f} to {row.high:.2f}"
        )


def draw(results: dict[str, Result], rows: list[Carrier], path: Path) -> None:
    """Left: how the four runs climb. Right: what they found."""
    style = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
    }
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(12, 5.2), width_ratios=(1, 1.1), layout="constrained"
        )
        _draw_runs(left, results)
        _draw_carriers(right, rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _draw_runs(axes, results: dict[str, Result]) -> None:
    best = max(max(result.elbo) for result in results.values())
    for name, result in results.items():
        epochs = np.arange(1, len(result.elbo) + 1)
        axes.plot(epochs, result.elbo, "-o", color=COLORS[name], label=name, linewidth=2, markersize=4)
    worst = min(result.elbo[-1] for result in results.values())
    axes.set_ylim(best - 1.6 * (best - worst) - 1, best + 0.08 * (best - worst) + 1)
    axes.set_title("Evidence lower bound, higher is better")
    axes.set_xlabel("passes over the data")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("nats")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color="#e6e6e6")
    axes.legend(frameon=False, ncols=len(results), loc="upper center", bbox_to_anchor=(0.45, -0.11))


def _draw_carriers(axes, rows: list[Carrier]) -> None:
    places = np.arange(len(rows))
    for place, row in zip(places, rows, strict=True):
        color = "#2a7f4f" if row.high < 1 else "#b5382a" if row.low > 1 else "#777777"
        axes.plot([row.low, row.high], [place, place], color=color, linewidth=3, solid_capstyle="round")
        axes.plot(row.middle, place, "o", color=color, markersize=6)
    axes.axvline(1, color="#444444", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(places, [f"{row.name}  ({row.num_flights:,})" for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.set_title("Odds of arriving more than 15 minutes late")
    axes.set_xlabel("against the average flight, all else equal; median and 90% interval")


def main() -> None:
    parser = argparse.ArgumentParser(description="Late arrivals out of New York in 2013, fitted four ways.")
    parser.add_argument("--flights", type=int, help="use only so many flights, drawn at random")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--decay", action="store_true", help="let Adam's step fall to zero along a cosine")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()

    began = time.perf_counter()
    flights = load_flights()
    if options.flights is not None:
        flights = flights.take(np.random.default_rng(0).permutation(len(flights.late))[: options.flights])
    problem = make_problem(flights)
    print(jcv.describe(problem), end="\n\n", flush=True)
    num_steps = options.epochs * math.ceil(problem.num_data / options.batch_size)
    decayed = optax.cosine_decay_schedule(LEARNING_RATE, num_steps)
    optimizer = optax.adam(decayed if options.decay else LEARNING_RATE)
    results = run_all(problem, optimizer, options.epochs, options.batch_size)
    print_results(results)
    rows = carriers(flights, results["joint, default"].fit)
    print()
    print_carriers(rows)
    path = options.output / "flights.png"
    draw(results, rows, path)
    print(f"\n{path} saved; {time.perf_counter() - began:.0f} seconds in all")


if __name__ == "__main__":
    main()
