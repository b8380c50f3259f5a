"""An objective on the full data, in chunks: its value with a standard error, and its exact summaries."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from jointcv.checks import check_count, check_key
from jointcv.objective import AbstractObjective, Params
from jointcv.sampler import Batch, Reshuffle, Schedule

DRAWS_AT_ONCE = 16


class Estimate(NamedTuple):
    """A mean over draws and its standard error."""

    value: float
    standard_error: float


def take_batch(objective: AbstractObjective, schedule: Schedule, step, dtype) -> Batch:
    """One step's data. A padded place (index N) repeats the last datum, with no weight."""
    data = jax.tree.map(lambda leaf: leaf.at[schedule.indices].get(mode="clip"), objective.data)
    weights, share = schedule.weights.astype(dtype), schedule.share.astype(dtype)
    return Batch(data, schedule.indices, weights, share, jnp.asarray(step, jnp.int32))


def float_type(params: Params):
    """The precision of a run."""
    return jnp.result_type(*jax.tree.leaves(params))


@eqx.filter_jit
def full_values(
    objective: AbstractObjective, params: Params, key: Key[Array, ""], *, num_draws: int, chunk_size: int
) -> Float[Array, " draws"]:
    """f(w; ε) on all data, for each of `num_draws` draws of ε."""
    dtype = float_type(params)
    schedule = Reshuffle(chunk_size).sweep(objective.num_data)

    def one_draw(key):
        def add_chunk(total, chunk):
            batch = take_batch(objective, chunk, 0, dtype)
            draws = objective.draw(key, params, batch.data, chunk.unit)
            entry = objective.remember(params, batch.data)
            return total + objective.value(entry, params, batch.data, batch.share, draws), None

        total, _ = jax.lax.scan(add_chunk, jnp.zeros((), dtype), schedule)
        first = take_batch(objective, jax.tree.map(lambda leaf: leaf[0], schedule), 0, dtype)
        draws = objective.draw(key, params, first.data)
        return total + objective.rest(params, draws)

    return jax.lax.map(one_draw, jax.random.split(key, num_draws), batch_size=min(num_draws, DRAWS_AT_ONCE))


def full_value(
    objective: AbstractObjective,
    params: Params,
    key: Key[Array, ""],
    *,
    num_draws: int = 100,
    chunk_size: int | None = None,
) -> Estimate:
    """The objective on the full data, by Monte Carlo over ε.

    Args:
        objective: what is evaluated.
        params: where.
        key: of the draws.
        num_draws: how many draws of ε.
        chunk_size: how many data at once; about a million predictions by default.

    Returns:
        The mean over draws and its standard error (zero where the objective has no noise).
    """
    check_key(key)
    check_count("num_draws", num_draws, "draws")
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, "data")
    chunk_size = min(chunk_size or 10_000, objective.num_data)
    values = np.asarray(
        full_values(objective, params, key, num_draws=num_draws, chunk_size=chunk_size), np.float64
    )
    error = values.std(ddof=1) / math.sqrt(num_draws) if num_draws > 1 else math.nan
    return Estimate(float(values.mean()), float(error))


def naive_gradient(objective: AbstractObjective, params: Params, batch: Batch, draws) -> PyTree[Array]:
    """∇f(w; n, ε) of a batch, as a cotangent."""
    entry = objective.remember(params, batch.data)
    return objective.gradient(entry, params, batch.data, batch.weights, draws)


def full_gradient(
    objective: AbstractObjective,
    params: Params,
    key: Key[Array, ""],
    chunk_size: int = 10_000,
    gradient: Callable[..., PyTree[Array]] = naive_gradient,
) -> Params:
    """∇f(w; ε) on all data, for one draw of ε.

    Args:
        objective: whose gradient.
        params: where.
        key: of the draw.
        chunk_size: how many data at once.
        gradient: of a batch; a controlled one has the noise of ε controlled.
    """
    dtype = float_type(params)
    schedule = Reshuffle(min(chunk_size, objective.num_data)).sweep(objective.num_data)

    def pulled(chunk, weight):
        batch = take_batch(objective, chunk, 0, dtype)
        draws = objective.draw(key, params, batch.data, chunk.unit)
        batch = dataclasses.replace(batch, weights=weight * batch.share)
        return objective.pull(gradient(objective, params, batch, draws), params, batch.data, draws)

    # What does not depend on the data is in every chunk, and is to count once.
    rest = pulled(jax.tree.map(lambda leaf: leaf[0], schedule), 0)

    def add_chunk(total, chunk):
        return jax.tree.map(
            lambda total, part, rest: total + (part - rest), total, pulled(chunk, 1), rest
        ), None

    return jax.lax.scan(add_chunk, rest, schedule)[0]


def full_summary(objective: AbstractObjective, params: Params, sweep: Schedule) -> PyTree[Array]:
    """The mean summary of all data as they look at these parameters, in the minibatches of a full pass."""
    dtype = float_type(params)

    def add_batch(total, schedule):
        batch = take_batch(objective, schedule, 0, dtype)
        summary = objective.summarise(objective.remember(params, batch.data), batch.data, batch.share)
        return jax.tree.map(jnp.add, total, summary), None

    return jax.lax.scan(add_batch, zero_summary(objective, params), sweep)[0]


def zero_summary(objective: AbstractObjective, params: Params) -> PyTree[Array]:
    """A summary of nothing."""

    def summarise(params):
        batch = jax.tree.map(lambda leaf: leaf[:1], objective.data)
        return objective.summarise(objective.remember(params, batch), batch, jnp.zeros(1, float_type(params)))

    shapes = jax.eval_shape(summarise, params)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
