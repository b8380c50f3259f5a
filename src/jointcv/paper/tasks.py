"""The tasks: each a problem and the settings that it runs with, as data.

sonar, australian   binary logistic regression, standard normal prior, no intercept
mnist               softmax regression on pixels / 255, standard normal prior, D = 784 · 10
ppca                x ~ N(0, W Wᵀ + λ I) on standardised MNIST, λ = 1, W of 784 × 16 standard normal
tennis              Bradley–Terry, logit s_winner − s_loser, s ~ N(0, r²), r half-normal and unconstrained as log r
movielens           y ~ softmax(x · Z_g), Z_g ~ N(mean, exp(log scale)), mean and log scale standard normal
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jointcv as jcv
from jointcv.paper import data
from jointcv.paper.estimators import BATCHES, PREDICTORS, WHOLE, Form

SGD_GRID = (7.5e-3, 5e-3, 2.5e-3, 1e-3, 5e-4, 1e-4, 5e-5, 2.5e-5, 1e-5)
ADAM_GRID = (1e-1, 5e-2, 1e-2, 5e-3, 1e-3)
SMALL = (
    "naive",
    "joint",
    "cv",
    "ours",
    "natural",
    "joint-svrg",
    "inc",
    "ens",
    "full-naive",
    "full-cv",
)
LARGE = ("naive", "joint", "cv", "ours", "natural", "joint-svrg", "smiso", "full-naive", "full-cv")
NUM_FACTORS, FACTOR_NOISE = 16, 1.0


@dataclass(frozen=True)
class Budget:
    """How much of a task is run.

    Args:
        num_seeds: runs a step size.
        epochs: of the sweep.
        full_steps: steps of the full-batch estimators.
        full_records: how often those are evaluated.
        draws: of ε in an evaluation along the run, where it needs any.
        final_draws: the same at the end.
        trace_epochs: of the runs whose variance is traced.
        trace_draws: gradients that a variance along the run is taken of.
        table_draws: the same of Table 1.
        full_draws: of full-data gradients in V_ε.
        nuts_draws: of each of four chains; 0 for no comparison.
        num_rows: the first so many data; all where None.
        num_values: the first so many step sizes; all where None.
        seeds_at_once: seeds in one program.
        values_at_once: step sizes in one program; all where None.
        timing_epochs: of one timed repetition.
    """

    num_seeds: int
    epochs: int
    full_steps: int
    full_records: int = 20
    draws: int = 16
    final_draws: int = 64
    trace_epochs: int = 10
    trace_draws: int = 64
    table_draws: int = 400
    full_draws: int = 32
    nuts_draws: int = 0
    num_rows: int | None = None
    num_values: int | None = None
    seeds_at_once: int = 1
    values_at_once: int | None = None
    timing_epochs: int = 1


@dataclass(frozen=True)
class Task:
    """A problem and the paper's settings for it.

    Args:
        name: as on the command line.
        load: the problem, from the first so many rows of its data (all where None).
        form: how the paper's estimators are written down for it.
        batch: data a step.
        optimizer: a function of the learning rate.
        grid: of its step sizes.
        smiso_grid: of SMISO's.
        estimators: which run on it.
        budgets: by name.
        natural_batch: data a natural step; larger than the paper's, where theory has the step grow with it.
        naive_epochs: before a control with a memory sets in.
        stages: of `jointcv.paper.run`.
        notes: what differs from the paper.
    """

    name: str
    load: Callable[[int | None], jcv.Problem]
    form: Form
    batch: int
    optimizer: Callable[[float], optax.GradientTransformation]
    grid: tuple[float, ...]
    estimators: tuple[str, ...]
    budgets: Mapping[str, Budget]
    natural_batch: int
    smiso_grid: tuple[float, ...] = ()
    naive_epochs: int = 1
    stages: tuple[str, ...] = ("sweep", "timing", "table1", "variance", "nuts")
    notes: tuple[str, ...] = field(default=())


def log_normal(x, log_scale=0.0):
    """Σ log N(x; 0, exp(log_scale)²)."""
    terms = -0.5 * (x * jnp.exp(-log_scale)) ** 2 - log_scale - 0.5 * math.log(2 * math.pi)
    return jnp.sum(jnp.broadcast_to(terms, jnp.shape(x)))


def binary_regression(record: data.Binary, num_rows: int | None = None) -> jcv.Problem:
    """Logistic regression with a standard normal prior and no intercept."""

    def log_likelihood(z, datum):
        logit = datum["x"] @ z
        return datum["y"] * logit - jax.nn.softplus(logit)

    features, labels = record.X[:num_rows], record.y[:num_rows].astype(np.float32)
    return jcv.Problem(
        log_prior=log_normal,
        log_likelihood=log_likelihood,
        data={"x": features, "y": labels},
        example=np.zeros(features.shape[1], np.float32),
    )


def softmax_regression(record: data.Mnist, num_rows: int | None = None) -> jcv.Problem:
    """Ten classes from pixels in [0, 1], no intercept."""

    def log_likelihood(z, datum):
        return jax.nn.log_softmax(datum["x"] @ z)[datum["y"]]

    pixels = record.x_train[:num_rows].reshape(-1, 784).astype(np.float32) / 255
    return jcv.Problem(
        log_prior=log_normal,
        log_likelihood=log_likelihood,
        data={"x": pixels, "y": record.y_train[:num_rows].astype(np.int32)},
        example=np.zeros((784, 10), np.float32),
    )


def standardise(pixels: np.ndarray) -> np.ndarray:
    """Columns centred and divided by their standard deviation; constant ones by 1, so that they are zero."""
    deviation = pixels.std(axis=0)
    return (pixels - pixels.mean(axis=0)) / np.where(deviation > 0, deviation, 1)


def factor_analysis(record: data.Mnist, num_rows: int | None = None) -> jcv.Problem:
    """PPCA with the factors integrated out, by Woodbury: only M = λ I + Wᵀ W, of 16 × 16, is inverted."""

    def log_likelihood(z, datum):
        x = datum["x"]
        root = jnp.linalg.cholesky(FACTOR_NOISE * jnp.eye(z.shape[1], dtype=z.dtype) + z.T @ z)
        whitened = jax.scipy.linalg.solve_triangular(root, z.T @ x, lower=True)
        distance = (x @ x - whitened @ whitened) / FACTOR_NOISE
        size, rank = z.shape
        log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(root))) + (size - rank) * math.log(FACTOR_NOISE)
        return -0.5 * (distance + log_det + size * math.log(2 * math.pi))

    pixels = record.x_train[:num_rows].reshape(-1, 784).astype(np.float64)
    return jcv.Problem(
        log_prior=log_normal,
        log_likelihood=log_likelihood,
        data={"x": standardise(pixels).astype(np.float32)},
        example=np.zeros((784, NUM_FACTORS), np.float32),
    )


def bradley_terry(record: data.Tennis, num_rows: int | None = None) -> jcv.Problem:
    """Skills around 0 with one global scale, centred parameterisation, D = 5,525.

    p(log r) = 2 N(r; 0, 1) r: the half-normal density and the Jacobian of the logarithm.
    """

    def log_prior(z):
        log_scale = z["log_scale"]
        half_normal = math.log(2) + log_normal(jnp.exp(log_scale))
        return half_normal + log_scale + log_normal(z["skills"], log_scale)

    def log_likelihood(z, datum):
        return jax.nn.log_sigmoid(z["skills"][datum["winner"]] - z["skills"][datum["loser"]])

    winner, loser = record.winner_ids[:num_rows], record.loser_ids[:num_rows]
    return jcv.Problem(
        log_prior=log_prior,
        log_likelihood=log_likelihood,
        data={"winner": winner.astype(np.int32), "loser": loser.astype(np.int32)},
        example={
            "log_scale": np.zeros((), np.float32),
            "skills": np.zeros(int(record.num_player), np.float32),
        },
    )


def hierarchical_regression(record: data.MovieLens, num_rows: int | None = None) -> jcv.Problem:
    """Five ratings from 18 genres with weights of every user, centred parameterisation, D = 85,050."""

    def log_prior(z):
        spread = z["weights"] - z["mean"]
        return log_normal(z["mean"]) + log_normal(z["log_scale"]) + log_normal(spread, z["log_scale"])

    def log_likelihood(z, datum):
        return jax.nn.log_softmax(datum["x"] @ z["weights"][datum["group"]])[datum["y"]]

    shape = (record.X.shape[1], 5)
    return jcv.Problem(
        log_prior=log_prior,
        log_likelihood=log_likelihood,
        data={
            "x": record.X[:num_rows].astype(np.float32),
            "y": record.y[:num_rows].astype(np.int32),
            "group": record.group_id[:num_rows].astype(np.int32),
        },
        example={
            "mean": np.zeros(shape, np.float32),
            "log_scale": np.zeros(shape, np.float32),
            "weights": np.zeros((int(record.num_groups), *shape), np.float32),
        },
    )


SMOKE = Budget(
    num_seeds=1,
    epochs=1,
    full_steps=2,
    full_records=1,
    draws=2,
    final_draws=4,
    trace_epochs=1,
    trace_draws=4,
    table_draws=8,
    full_draws=2,
    num_rows=1000,
    num_values=2,
)
SMALL_PAPER = Budget(
    num_seeds=10,
    epochs=200,
    full_steps=10_000,
    full_records=50,
    trace_epochs=50,
    trace_draws=2000,
    table_draws=50_000,
    full_draws=5000,
    nuts_draws=25_000,
    seeds_at_once=10,
    timing_epochs=20,
)
LARGE_PAPER = Budget(
    num_seeds=5,
    epochs=100,
    full_steps=2000,
    draws=64,
    final_draws=5000,
    trace_epochs=50,
    trace_draws=256,
    table_draws=2000,
    full_draws=512,
)
SMALL_SHORT = replace(
    SMALL_PAPER,
    num_seeds=5,
    seeds_at_once=5,
    epochs=100,
    full_steps=2000,
    full_records=40,
    trace_epochs=30,
    trace_draws=1000,
    table_draws=20_000,
    full_draws=2000,
    nuts_draws=2500,
    timing_epochs=10,
)
LARGE_SHORT = Budget(num_seeds=1, epochs=20, full_steps=100, full_records=10)


def _small(name: str, load: Callable[[int | None], jcv.Problem]) -> Task:
    return Task(
        name=name,
        load=load,
        form=WHOLE,
        batch=5,
        optimizer=optax.sgd,
        grid=SGD_GRID,
        estimators=SMALL,
        natural_batch=50,
        budgets={"smoke": replace(SMOKE, nuts_draws=50), "short": SMALL_SHORT, "paper": SMALL_PAPER},
        notes=("paper-form estimators keep (m_n, sigma_n) for every datum and the prior in the table",),
    )


PREDICTOR_NOTE = (
    "paper-form estimators keep A_n m_n for every datum instead of m_n: the same correction of the location, "
    "with the prior expanded at the current m and the current sigma in v; log sigma has its naive gradient"
)

TASKS: dict[str, Task] = {
    "australian": _small("australian", lambda rows: binary_regression(data.load_australian(), rows)),
    "sonar": _small("sonar", lambda rows: binary_regression(data.load_sonar(), rows)),
    "tennis": Task(
        name="tennis",
        load=lambda num_rows: bradley_terry(data.load_tennis(), num_rows),
        form=PREDICTORS,
        batch=100,
        optimizer=optax.adam,
        grid=ADAM_GRID,
        smiso_grid=(5e-2, 1e-2, 1e-3, 1e-4, 1e-5),
        estimators=LARGE,
        natural_batch=1000,
        budgets={
            "smoke": SMOKE,
            "short": replace(LARGE_SHORT, num_seeds=3, epochs=40, full_steps=400),
            "paper": LARGE_PAPER,
        },
        notes=(
            PREDICTOR_NOTE,
            "player_sd, the standard deviation of all skills, is half-normal with scale 1",
        ),
    ),
    "mnist": Task(
        name="mnist",
        load=lambda num_rows: softmax_regression(data.load_mnist(), num_rows),
        form=PREDICTORS,
        batch=100,
        optimizer=optax.adam,
        grid=ADAM_GRID,
        smiso_grid=(5e-2, 1e-2, 1e-3, 1e-4, 1e-5),
        estimators=LARGE,
        natural_batch=500,
        budgets={
            "smoke": SMOKE,
            # By its seconds and its time of a step the paper needs 17,000 steps of joint for −25,000, 58,000 of naive.
            "short": replace(LARGE_SHORT, num_seeds=2, epochs=100, draws=4),
            "paper": LARGE_PAPER,
        },
        notes=(PREDICTOR_NOTE,),
    ),
    "movielens": Task(
        name="movielens",
        load=lambda num_rows: hierarchical_regression(data.load_movielens(), num_rows),
        form=PREDICTORS,
        batch=100,
        optimizer=optax.adam,
        grid=ADAM_GRID,
        smiso_grid=(2.5e-3, 1e-3, 5e-4, 1e-4),
        estimators=LARGE,
        natural_batch=500,
        budgets={
            "smoke": SMOKE,
            # One run at a time: five at once leave the processor's cache and take three times as long.
            "short": replace(
                LARGE_SHORT,
                draws=4,
                trace_draws=32,
                values_at_once=1,
                full_steps=50,
                full_records=5,
            ),
            "paper": replace(LARGE_PAPER, values_at_once=1),
        },
        notes=(PREDICTOR_NOTE,),
    ),
    "ppca": Task(
        name="ppca",
        load=lambda num_rows: factor_analysis(data.load_mnist(), num_rows),
        form=BATCHES,
        batch=100,
        optimizer=optax.adam,
        grid=ADAM_GRID,
        smiso_grid=(1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7),
        estimators=LARGE,
        natural_batch=100,
        budgets={
            "smoke": SMOKE,
            "short": replace(LARGE_SHORT, num_seeds=2, epochs=30, draws=4, final_draws=32, full_steps=40),
            "paper": LARGE_PAPER,
        },
        notes=(
            "67 constant pixels are divided by 1, so they are zero",
            "paper-form joint keeps one location for every fixed minibatch; log sigma has its naive gradient",
        ),
    ),
}


def other_optimizer(task: Task, kind: str, **changes) -> Task:
    """The same task with the optimiser that the main figures do not have, for the figure that compares the two."""
    optimizer, grid = {"adam": (optax.adam, ADAM_GRID), "sgd": (optax.sgd, SGD_GRID)}[kind]
    budgets = {name: replace(budget, num_seeds=1) for name, budget in task.budgets.items() if name != "paper"}
    return replace(
        task,
        name=f"{task.name}-{kind}",
        optimizer=optimizer,
        estimators=("naive", "cv", "joint"),
        stages=("sweep",),
        budgets=budgets | {"paper": task.budgets["paper"]},
        **({"grid": grid} | changes),
    )


# Of PPCA the gradients are so large that SGD wants steps far below the paper's grid for small tasks.
OTHERS = (
    other_optimizer(TASKS["sonar"], "adam"),
    other_optimizer(TASKS["australian"], "adam"),
    other_optimizer(TASKS["tennis"], "sgd"),
    other_optimizer(TASKS["ppca"], "sgd", grid=(1e-5, 1e-6, 1e-7, 1e-8), naive_epochs=3),
)
TASKS |= {task.name: task for task in OTHERS}
