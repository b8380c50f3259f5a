"""How curved the objective is in the metric s: what decides the step size and the batch size.

    L = λ_max(s^-½ H s^-½) by power iteration,   L_max = the largest over the data of N λ_max(s^-½ A_nᵀ ℓ''_n A_n s^-½)
    𝓛(B) = N(B−1)/(B(N−1)) L + (N−B)/(B(N−1)) L_max

(Gazagnadou, Gower and Salmon 2019.) Under fixed minibatches a minibatch is the datum, and one is drawn at a time.

One rare column makes L_max large, and one step for all coordinates would be held back by it. So every coordinate has
its own: 𝓛_i has the largest curvature of a datum *that sees it* in the place of L_max. Steps γ/𝓛_i are a metric like
any other, s_i 𝓛_i; L and L_max are measured once more in that metric, and so the bound holds as it stands.
"""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from jointcv.elbo import Elbo
from jointcv.evaluate import full_summary, take_batch
from jointcv.family import MeanFieldParams
from jointcv.sampler import AbstractSampler, FixedBatches, Reshuffle, Schedule
from jointcv.view import LinearView

UNIT_ITERATIONS = 4
PASS_SIZE = 10_000  # data at once in a pass over all
DENSE_SIZE = 100
SMALLEST_BATCH, LARGEST_BATCH = 8, 1024
DENSE_BUDGET = 2_000_000_000  # entries of a design matrix that are looked at one by one


class Smoothness(eqx.Module):
    """What passes over the data tell of the curvature; state of the next measurement.

    Attributes:
        step: 1/(4𝓛_i), the step that theory allows for every coordinate.
        direction: where the curvature is largest.
        reach: for every coordinate the largest curvature of a datum that sees it.
    """

    step: Float[Array, " dim"]
    direction: Float[Array, " dim"]
    reach: Float[Array, " dim"]


def unmeasured(params: MeanFieldParams) -> Smoothness:
    """Before the first measurement."""
    zeros, ones = jnp.zeros_like(params.location), jnp.ones_like(params.location)
    return Smoothness(zeros, ones, zeros)


def measure(
    objective: Elbo, sampler: AbstractSampler, params: MeanFieldParams, before: Smoothness, rounds
) -> Smoothness:
    """The largest steps for which SAGA is known to converge here.

    Args:
        objective: the negative ELBO.
        sampler: how minibatches are drawn.
        params: where, and in which metric.
        before: an earlier measurement, to begin from.
        rounds: how many full passes a power iteration takes.
    """
    many, one = _shares(objective, sampler)
    sight, scale = see_all(objective, params), params.scale
    reach = _reach(objective, sampler, params, scale)
    full, direction = _largest_eigenvalue(objective, params, sight, scale, before.direction, rounds)
    shape = many * full + one * reach
    stretched = scale / jnp.sqrt(shape)
    full, _ = _largest_eigenvalue(objective, params, sight, stretched, direction / jnp.sqrt(shape), rounds)
    bound = many * full + one * _largest_unit(objective, sampler, params, stretched)
    return Smoothness(1 / (4 * shape * bound), direction, reach)


def _shares(objective: Elbo, sampler: AbstractSampler) -> tuple[float, float]:
    """The weights of L and L_max in 𝓛."""
    fixed = isinstance(sampler, FixedBatches)
    total = sampler.steps_per_epoch(objective.num_data) if fixed else objective.num_data
    drawn = 1 if fixed else min(sampler.batch_size or total, total)
    if total == drawn:
        return 1.0, 0.0
    return total * (drawn - 1) / (drawn * (total - 1)), (total - drawn) / (drawn * (total - 1))


def _largest_eigenvalue(objective, params, sight, scale, direction, rounds):
    """L by power iteration, in the metric of these scales, and its direction."""

    def turn(_, carry):
        direction, _ = carry
        unit = direction / jnp.linalg.norm(direction)
        product = scale * hessian_product(objective, params, sight, scale * unit)
        return product, jnp.linalg.norm(product)

    direction, value = jax.lax.fori_loop(0, rounds, turn, (direction, jnp.zeros((), direction.dtype)))
    return value, direction


def _reach(objective: Elbo, sampler: AbstractSampler, params: MeanFieldParams, scale):
    """For every coordinate the largest curvature of a datum that sees it: the shape of the steps, not their size."""
    view = objective.view
    if not isinstance(view, LinearView) or not view.has_squares:
        return jnp.full_like(params.location, _largest_unit(objective, sampler, params, scale))
    if view.same_rows and view.problem.num_data * view.problem.dim > DENSE_BUDGET:
        return jnp.full_like(params.location, _largest_unit(objective, sampler, params, scale))
    larger, size = (_larger_dense, DENSE_SIZE) if view.same_rows else (_larger_sparse, PASS_SIZE)
    schedule = Reshuffle(min(size, objective.num_data)).sweep(objective.num_data)

    def compare(largest, schedule):
        batch = take_batch(objective, schedule, 0, largest.dtype)
        return larger(largest, objective, params, scale, batch), None

    return jax.lax.scan(compare, jnp.zeros_like(params.location), schedule)[0]


def _larger_sparse(largest, objective: Elbo, params, scale, batch):
    """A datum of curvature c is below c·1 on the coordinates that it sees."""
    curvature = _datum_curvature(objective, params, scale, batch)
    for row in jax.vmap(objective.view.split.rows)(batch.data):  # pyright: ignore
        spread = jnp.broadcast_to(jnp.expand_dims(curvature, range(1, row.ndim)), row.shape)
        largest = largest.at[row].max(spread, mode="drop")
    return largest


def _larger_dense(largest, objective: Elbo, params, scale, batch):
    """a aᵀ is below diag(|a_i| Σ_j |a_j|), which spares the coordinates in which a datum is small."""
    bend = jnp.abs(jnp.diagonal(_datum_hessian(objective, params, batch), axis1=-2, axis2=-1))

    def bound(bend, datum):
        one = jax.tree.map(lambda leaf: leaf[None], datum)
        size = jnp.sqrt(objective.view.pull_squared(bend[None], one)) * scale  # pyright: ignore
        return size * jnp.sum(size)

    return jnp.maximum(largest, jnp.max(jax.vmap(bound)(bend, batch.data), axis=0))


def _largest_unit(objective, sampler, params, scale):
    """L_max, of a datum or of a fixed minibatch."""
    largest = _largest_datum if isinstance(objective.view, LinearView) else _largest_batch
    return largest(objective, sampler, params, scale)


def _datum_curvature(objective: Elbo, params: MeanFieldParams, scale, batch) -> Float[Array, " batch"]:
    """An upper bound of N λ_max(s^-½ A_nᵀ ℓ''_n A_n s^-½), which is that of N ℓ''_n diag(A_n² / s)."""
    hessian = jnp.abs(_datum_hessian(objective, params, batch))
    spread = objective.view.spread(scale**2, batch.data)  # pyright: ignore
    rows = jnp.max(spread * jnp.sum(hessian, axis=-1), axis=-1)
    frobenius = jnp.sqrt(jnp.einsum("nkl,nkl,nk,nl->n", hessian, hessian, spread, spread))
    return jnp.minimum(rows, frobenius)


def _datum_hessian(objective: Elbo, params, batch) -> Float[Array, "batch predictors predictors"]:
    """N ℓ''_n; its mean over q where the noise knows it, as at the mean of a wide η_n there may be no curvature."""
    entry, ones = objective.remember(params, batch.data), jnp.ones_like(batch.weights)
    shape = batch.weights.shape[0], objective.view.num_predictors  # pyright: ignore

    def column(direction):
        step = jnp.broadcast_to(direction, shape)
        return objective.noise.bend(objective.view, entry, batch.data, ones, step)

    return jax.vmap(column, out_axes=-1)(jnp.eye(shape[1], dtype=params.location.dtype))


class Sight(NamedTuple):
    """A pass over the data, and what is remembered of each of its chunks."""

    schedule: Schedule
    entries: PyTree[Array]


def see_all(objective: Elbo, params: MeanFieldParams) -> Sight:
    """All data as they look at these parameters."""
    schedule = Reshuffle(min(PASS_SIZE, objective.num_data)).sweep(objective.num_data)

    def see(_, step):
        return None, objective.remember(params, take_batch(objective, step, 0, params.location.dtype).data)

    return Sight(schedule, jax.lax.scan(see, None, schedule)[1])


def hessian_product(
    objective: Elbo, params: MeanFieldParams, sight: Sight, direction: Float[Array, " dim"]
) -> Float[Array, " dim"]:
    """∇²[K + P] v on all data as they were seen at these parameters."""
    view = objective.view

    def add(total, chunk):
        batch = take_batch(objective, chunk.schedule, 0, direction.dtype)
        step = view.push(direction, batch.data)
        bend = objective.noise.bend(view, chunk.entries, batch.data, batch.share, step)
        return total + view.pull(bend, batch.data), None

    data_part, _ = jax.lax.scan(add, jnp.zeros_like(direction), sight)
    return data_part + objective.prior.hessian_product(params, direction)


def _largest_datum(
    objective: Elbo, sampler: AbstractSampler, params: MeanFieldParams, scale
) -> Float[Scalar, ""]:
    dtype = params.location.dtype
    schedule = Reshuffle(min(PASS_SIZE, objective.num_data)).sweep(objective.num_data)

    def larger(largest, schedule):
        batch = take_batch(objective, schedule, 0, dtype)
        curvature = _datum_curvature(objective, params, scale, batch)
        return jnp.maximum(largest, jnp.max(curvature)), None

    return jax.lax.scan(larger, jnp.zeros((), dtype), schedule)[0]


def _largest_batch(
    objective: Elbo, sampler: AbstractSampler, params: MeanFieldParams, scale
) -> Float[Scalar, ""]:
    """The largest λ_max of a minibatch's Hessian, by a few rounds of power iteration each."""
    view = objective.view

    def larger(largest, schedule):
        batch = take_batch(objective, schedule, 0, params.location.dtype)

        def turn(_, carry):
            direction, _ = carry
            unit = direction / jnp.linalg.norm(direction)
            bend = view.expand(params.location, scale * unit, batch.data, batch.weights)[1]
            product = scale * bend
            return product, jnp.linalg.norm(product)

        start = scale * view.slope(params.location, batch.data, batch.weights)
        _, value = jax.lax.fori_loop(0, UNIT_ITERATIONS, turn, (start, jnp.zeros((), start.dtype)))
        return jnp.maximum(largest, value), None

    schedule = sampler.sweep(objective.num_data)
    return jax.lax.scan(larger, jnp.zeros((), params.location.dtype), schedule)[0]


def propose_batch_size(objective: Elbo) -> int:
    """Where larger minibatches begin to cost more passes over the data: B L as large as L_max of a usual coordinate.

    Below that the number of epochs hardly depends on B, and larger minibatches are cheaper steps.
    """
    full, reach = _proposal(objective)
    largest = max(1, min(objective.num_data // 10, LARGEST_BATCH))
    knee = float(reach) / max(float(full), 1e-30)
    if not math.isfinite(knee):
        return largest
    return int(min(max(2 ** round(math.log2(max(knee, 1))), min(SMALLEST_BATCH, largest)), largest))


@eqx.filter_jit
def _proposal(objective: Elbo):
    """L and the median over the coordinates of L_max, at the start, in the metric of its curvature there."""
    params = objective.init(jax.random.key(0))
    schedule = Reshuffle(min(PASS_SIZE, objective.num_data)).sweep(objective.num_data)
    for _ in range(2):
        summary = full_summary(objective, params, schedule)
        precision = summary.curvature + objective.prior.curvature(params, jnp.zeros_like(params.location))
        log_scale = jnp.where(precision > 0, -jnp.log(precision) / 2, params.log_scale)
        params = MeanFieldParams(params.location, log_scale)
    sight, direction = see_all(objective, params), jnp.ones_like(params.location)
    full, _ = _largest_eigenvalue(objective, params, sight, params.scale, direction, 10)
    return full, jnp.median(_reach(objective, Reshuffle(1), params, params.scale))
