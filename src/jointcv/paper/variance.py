"""Variances of gradients at a frozen state: of an estimator, and the parts of the naive one.

    V_{n,ε} = V_{n,ε}[∇f(w; n, ε)],   V_n = V_n[E_ε ∇f(w; n, ε)],   V_ε = V_ε[∇f(w; ε)]

V_n is the covariance of two gradients with one minibatch and independent ε. All are traces, of μ unless said otherwise.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import jointcv as jcv
from jointcv.algorithm.gradient import controlled_gradient
from jointcv.evaluate import float_type, take_batch

AT_ONCE = 4


@dataclass(frozen=True)
class Parts:
    """The noise of the naive gradient of μ."""

    total: float
    data: float
    noise: float


def estimator_variance(algorithm, run, key, count: int) -> list[float]:
    """The traces of an estimator's variance, one a leaf of w (μ, then log σ); its memory as it stands in the run."""
    gradients = _controlled(algorithm, run, jax.random.split(key, count))
    return [_trace(leaf) for leaf in jax.tree.leaves(gradients)]


def naive_parts(objective, params, batch: int, key, count: int, full_draws: int) -> Parts:
    """V_{n,ε}, V_n and V_ε for minibatches of `batch`.

    Args:
        objective: with the paper's noise, one ε for the whole z.
        params: where.
        batch: data a minibatch.
        key: of minibatches and ε.
        count: minibatches, each with two ε.
        full_draws: gradients on all data.
    """
    pair_key, full_key = jax.random.split(key)
    first, second = _pairs(objective, params, batch, jax.random.split(pair_key, count))
    first, second = np.asarray(first, np.float64), np.asarray(second, np.float64)
    covariance = np.sum((first - first.mean(0)) * (second - second.mean(0))) / (count - 1)
    full = _full(objective, params, jax.random.split(full_key, full_draws))
    return Parts((_trace(first) + _trace(second)) / 2, float(covariance), _trace(full))


def _trace(samples) -> float:
    return float(np.asarray(samples, np.float64).var(axis=0, ddof=1).sum())


def _one_batch(sampler, num_data: int, key):
    """A minibatch of a new epoch, at a random place."""
    place = jax.random.randint(jax.random.fold_in(key, 1), (), 0, sampler.steps_per_epoch(num_data))
    schedule = sampler.epoch(key, num_data).cut(place, 1)
    # The table is frozen at an epoch's beginning, and so is what Snapshots make of it.
    return eqx.tree_at(lambda s: s.place, schedule, jnp.zeros_like(schedule.place))


@eqx.filter_jit
def _controlled(algorithm, run, keys):
    objective, memory = algorithm.objective, algorithm.control.memory
    params = algorithm.params(run.state)

    def one(key):
        schedule = _one_batch(algorithm.sampler, objective.num_data, key)
        shared, rows = algorithm.open(run.table, schedule)
        plan, row = jax.tree.map(lambda leaf: leaf[0], (schedule, rows))
        # The first epochs' naive steps are over, and an anchor stays where it is.
        step = algorithm.naive_steps + 1
        batch = take_batch(objective, plan, step, float_type(params))
        recall = memory.read(run.state.memory, shared, row, objective, params, batch)
        draws = objective.draw(jax.random.fold_in(key, 2), params, batch.data)
        _, gradient, correction = controlled_gradient(
            objective, algorithm.control, recall, params, batch, draws
        )
        return jax.tree.map(jnp.add, gradient, correction)

    return jax.lax.map(one, keys, batch_size=AT_ONCE)


@eqx.filter_jit
def _pairs(objective, params, batch: int, keys):
    sampler = jcv.Reshuffle(batch)

    def one(key):
        schedule = jax.tree.map(lambda leaf: leaf[0], _one_batch(sampler, objective.num_data, key))
        rows = take_batch(objective, schedule, 0, float_type(params))
        entry = objective.remember(params, rows.data)

        def gradient(number):
            draws = objective.draw(jax.random.fold_in(key, number), params, rows.data)
            return objective.gradient(entry, params, rows.data, rows.weights, draws).location

        return gradient(2), gradient(3)

    return jax.lax.map(one, keys, batch_size=AT_ONCE)


@eqx.filter_jit
def _full(objective, params, keys):
    weights = jnp.full(objective.num_data, 1 / objective.num_data, float_type(params))
    entry = objective.remember(params, objective.data)

    def one(key):
        draws = objective.draw(key, params, objective.data)
        return objective.gradient(entry, params, objective.data, weights, draws).location

    return jax.lax.map(one, keys)
