"""Tables of problems, controls, memories and noises for the core's tests, and independent reference formulas."""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jointcv as jcv
from jointcv.algorithm.gradient import controlled_gradient
from jointcv.algorithm.interface import AbstractAlgorithm
from jointcv.evaluate import float_type, take_batch
from jointcv.loop import Run, advance_epochs, start
from jointcv.plan import assemble, find_view
from jointcv.sampler import Schedule

N, B = 23, 5  # not a multiple: the last minibatch is padded
KEY = jax.random.key(20240501)
RNG = np.random.default_rng(7)

# ---------------------------------------------------------------- problems

X3, X2 = RNG.normal(size=(N, 3)), RNG.normal(size=(N, 2))
BINARY = RNG.integers(0, 2, N).astype(float)
CLASS, COUNT, GROUP = RNG.integers(0, 3, N), RNG.poisson(2.0, N).astype(float), RNG.integers(0, 4, N)
REAL = X3 @ np.array([1.0, -2.0, 0.5]) + RNG.normal(size=N)
NOISE_SD, PRIOR_SD = 0.8, 1.5


def log_normal(x, sd):
    """log N(x; 0, sd²), summed."""
    x = jnp.asarray(x)
    return jnp.sum(-0.5 * (x / sd) ** 2) - x.size * math.log(sd * math.sqrt(2 * math.pi))


def wide_prior(z):
    return log_normal(z, PRIOR_SD)


def bernoulli(eta, y):
    return y * eta - jax.nn.softplus(eta)


def linear(z, datum):
    return log_normal(datum["y"] - datum["x"] @ z, NOISE_SD)


def logistic(z, datum):
    return bernoulli(datum["x"] @ z, datum["y"])


def softmax(z, datum):
    return jax.nn.log_softmax(datum["x"] @ z.reshape(2, 3))[datum["y"]]


def poisson(z, datum):
    eta = datum["x"] @ z
    return datum["y"] * eta - jnp.exp(eta)


def curved(z, datum):
    """Not a function of fewer linear predictors than z has entries."""
    mean = jnp.tanh(datum["x"] @ z) + 0.3 * z[0] ** 2
    return -0.5 * jnp.exp(-z[1]) * (datum["y"] - mean) ** 2 - 0.5 * z[1]


def hierarchical(z, datum):
    return bernoulli(z["slope"] * datum["x"][0] + z["effects"][datum["group"]], datum["y"])


def hierarchical_prior(z):
    scale = jnp.exp(z["log_scale"])
    effects = jnp.sum(-0.5 * (z["effects"] / scale) ** 2) - z["effects"].size * z["log_scale"]
    return effects + log_normal(z["slope"], 1.0) + log_normal(z["log_scale"], 1.0)


HIERARCHY = {"effects": np.zeros(4), "slope": np.zeros(()), "log_scale": np.zeros(())}
MODELS = {
    "linear": (linear, wide_prior, {"x": X3, "y": REAL}, np.zeros(3)),
    "linear2": (linear, wide_prior, {"x": X2, "y": REAL}, np.zeros(2)),
    "logistic": (logistic, wide_prior, {"x": X3, "y": BINARY}, np.zeros(3)),
    "logistic2": (logistic, wide_prior, {"x": X2, "y": BINARY}, np.zeros(2)),
    "softmax": (softmax, wide_prior, {"x": X2, "y": CLASS}, np.zeros(6)),
    "poisson": (poisson, wide_prior, {"x": X2, "y": COUNT}, np.zeros(2)),
    "whole": (curved, wide_prior, {"x": X2, "y": REAL}, np.zeros(2)),
    "hierarchical": (
        hierarchical,
        hierarchical_prior,
        {"x": X2, "y": BINARY, "group": GROUP},
        HIERARCHY,
    ),
}


def make(name: str) -> jcv.Problem:
    log_likelihood, log_prior, data, example = MODELS[name]
    return jcv.Problem(log_prior=log_prior, log_likelihood=log_likelihood, data=data, example=example)


PROBLEMS = {name: make(name) for name in MODELS}
PREDICTORS = {
    "linear": 1,
    "linear2": 1,
    "logistic": 1,
    "logistic2": 1,
    "softmax": 3,
    "poisson": 1,
    "hierarchical": 1,
}

# ---------------------------------------------------------------- controls, memories, noises and what goes together

RESHUFFLE, FIXED = jcv.Reshuffle(B), jcv.FixedBatches(B)
MEMORIES = {
    "datum": (jcv.PerDatum(), RESHUFFLE),
    "snapshots": (jcv.Snapshots(), RESHUFFLE),
    "batch": (jcv.PerBatch(), FIXED),
    "anchor": (jcv.Anchor(), RESHUFFLE),
    "table": (jcv.WholeTable(), jcv.WithReplacement(B)),
}
CONTROLS = {
    "naive": jcv.NaiveGradient(),
    "cv": jcv.MonteCarloCV(),
    "inc": jcv.SubsamplingCV(),
    "ens": jcv.EnsembleCV(0.3),
    "joint": jcv.JointCV(jcv.PerDatum()),
}
NOISES = {
    "parameter": jcv.ParameterNoise(),
    "paper": jcv.PaperNoise(),
    "predictor": jcv.PredictorNoise(),
    "quadrature": jcv.Quadrature(),
}


@lru_cache
def found_view(name: str):
    """Reading a model takes half a second."""
    return find_view(PROBLEMS[name]).view


def compose(
    problem: str | jcv.Problem, noise: str, control=None, sampler=None, whole=False, start=None, **options
):
    """An algorithm of these parts. `whole` asks for a view of the whole z."""
    view = found_view(problem) if isinstance(problem, str) else None
    problem = PROBLEMS[problem] if isinstance(problem, str) else problem
    view = None if noise == "paper" else jcv.WholeView(problem) if whole else view
    objective, control, sampler = assemble(
        problem,
        control=jcv.JointCV(jcv.PerDatum()) if control is None else control,
        sampler=RESHUFFLE if sampler is None else sampler,
        noise=NOISES[noise],
        family=jcv.MeanField(jcv.RandomStart(-0.5)) if start is None else jcv.MeanField(start),
        view=options.pop("view", view),
    )
    options = {"optimizer": optax.sgd(2e-3), "naive_steps": 0} | options
    return jcv.GradientDescent(objective, control, sampler, **options)


def joint_setups() -> Iterator[tuple[str, str, str, bool]]:
    """(name, noise, memory, whole view) of every joint control variate there is."""
    for memory in MEMORIES:
        for noise, whole in [("parameter", False), ("predictor", False), ("quadrature", False)]:
            yield f"{noise}-{memory}", noise, memory, whole
        yield f"whole-{memory}", "parameter", memory, True
        yield f"paper-{memory}", "paper", memory, True


def joint_setup(problem, noise: str, memory: str, whole: bool, **options) -> jcv.GradientDescent:
    memory, sampler = MEMORIES[memory]
    return compose(problem, noise, jcv.JointCV(memory), sampler, whole, **options)


# ---------------------------------------------------------------- what an estimator does at a frozen state


class Estimates(NamedTuple):
    """Gradients of independent steps at one state: what the step would take, and its correction."""

    gradient: jcv.MeanFieldParams
    correction: jcv.MeanFieldParams


@eqx.filter_jit
def minibatches(sampler, num_data: int, key, count: int) -> Schedule:
    """Independent minibatches: of as many epochs, each at a random place."""
    steps = sampler.steps_per_epoch(num_data)

    def one(key):
        place = jax.random.randint(jax.random.fold_in(key, 1), (), 0, steps)
        schedule = sampler.epoch(key, num_data).cut(place, 1)
        # The table is frozen at an epoch's beginning, and so is what Snapshots make of it.
        return eqx.tree_at(lambda s: s.place, schedule, jnp.zeros_like(schedule.place))

    return jax.vmap(one)(jax.random.split(key, count))


def estimates(algorithm: jcv.GradientDescent, run: Run, key, count: int) -> Estimates:
    """Independent steps at one state."""
    schedules = minibatches(algorithm.sampler, algorithm.objective.num_data, key, count)
    return _estimates(algorithm, run, schedules, jax.random.split(jax.random.fold_in(key, 2), count))


@eqx.filter_jit
def _estimates(algorithm, run: Run, schedules: Schedule, keys) -> Estimates:
    objective, memory = algorithm.objective, algorithm.control.memory
    params = algorithm.params(run.state)

    def one(schedule, key):
        shared, rows = algorithm.open(run.table, schedule)
        plan, row = jax.tree.map(lambda leaf: leaf[0], (schedule, rows))
        batch = take_batch(objective, plan, 1, float_type(params))  # step 1: an anchor stays where it is
        recall = memory.read(run.state.memory, shared, row, objective, params, batch)
        draws = objective.draw(key, params, batch.data)
        _, gradient, correction = controlled_gradient(
            objective, algorithm.control, recall, params, batch, draws
        )
        controlled = jax.tree.map(jnp.add, gradient, correction)
        controlled, naive = (objective.pull(c, params, batch.data, draws) for c in (controlled, gradient))
        return Estimates(controlled, jax.tree.map(jnp.subtract, controlled, naive))

    return jax.vmap(one)(schedules, keys)


@eqx.filter_jit
def state_after(algorithm: AbstractAlgorithm, key, num_epochs: int) -> Run:
    """A run after so many epochs."""
    return advance_epochs(algorithm, start(algorithm, key), num_epochs)[0]


def flat(params) -> np.ndarray:
    """(…, 2D): location, then log scale."""
    return np.concatenate([np.asarray(params.location), np.asarray(params.log_scale)], axis=-1)


def params_at(dim: int, seed: int = 0, dtype=np.float64) -> jcv.MeanFieldParams:
    rng = np.random.default_rng(seed)
    location, log_scale = rng.normal(size=dim), rng.normal(-0.5, 0.3, size=dim)
    return jcv.MeanFieldParams(jnp.asarray(location, dtype), jnp.asarray(log_scale, dtype))


def all_data(objective):
    """Every datum with the weight 1/N."""
    count = objective.num_data
    return objective.data, jnp.full(count, 1 / count)


# ---------------------------------------------------------------- reference formulas, in NumPy


def normal_grid(dim: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (nodes^dim, dim) and masses with Σ masses h(points) = E h(ε), ε standard normal."""
    points, masses = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[points] * dim, indexing="ij"), -1).reshape(-1, dim)
    product = np.prod(np.stack(np.meshgrid(*[masses / masses.sum()] * dim, indexing="ij"), -1), -1)
    return grid, product.reshape(-1)


def linear_exact_gradient(x, y, params) -> np.ndarray:
    """∇ of the negative ELBO of the conjugate problem: location, then log scale."""
    mean, variance = np.asarray(params.location), np.exp(2 * np.asarray(params.log_scale))
    location = x.T @ (x @ mean - y) / NOISE_SD**2 + mean / PRIOR_SD**2
    log_scale = variance * ((x**2).sum(0) / NOISE_SD**2 + 1 / PRIOR_SD**2) - 1
    return np.concatenate([location, log_scale])


def linear_exact_elbo(x, y, params) -> float:
    """The ELBO of the conjugate problem."""
    mean, variance = np.asarray(params.location), np.exp(2 * np.asarray(params.log_scale))
    errors = ((y - x @ mean) ** 2).sum() + ((x**2) @ variance).sum()
    likelihood = -0.5 * errors / NOISE_SD**2 - len(y) * (np.log(NOISE_SD) + 0.5 * np.log(2 * np.pi))
    prior = -0.5 * (mean**2 + variance).sum() / PRIOR_SD**2 - mean.size * (
        np.log(PRIOR_SD) + 0.5 * np.log(2 * np.pi)
    )
    entropy = np.asarray(params.log_scale).sum() + 0.5 * mean.size * (1 + np.log(2 * np.pi))
    return likelihood + prior + entropy


def binary_regression(data: dict[str, Any], dtype=np.float64) -> jcv.Problem:
    """The paper's: standard normal prior, no intercept."""
    return jcv.Problem(
        log_prior=lambda z: log_normal(z, 1.0),
        log_likelihood=logistic,
        data={"x": data["X"].astype(dtype), "y": data["y"].astype(dtype)},
        example=np.zeros(data["X"].shape[1], dtype),
    )
