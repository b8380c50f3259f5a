"""How curved the objective is in the metric s: what decides the step size and the batch size.

    L = λ_max(s^-½ H s^-½) by power iteration,   L_max = the largest over the data of N λ_max(s^-½ A_nᵀ ℓ''_n A_n s^-½)
    𝓛(B) = N(B−1)/(B(N−1)) L + (N−B)/(B(N−1)) L_max

(Gazagnadou, Gower and Salmon 2019.) Under fixed minibatches a minibatch is the datum, and one is drawn at a time.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jointcv.elbo import Elbo
from jointcv.evaluate import take_batch
from jointcv.family import MeanFieldParams
from jointcv.sampler import AbstractSampler, FixedBatches, Reshuffle
from jointcv.view import LinearView

UNIT_ITERATIONS = 4
PASS_SIZE = 10_000  # data at once in a pass over all


class Smoothness(eqx.Module):
    """What a pass over the data tells of the curvature.

    Attributes:
        step: γ_i = 1/(4𝓛_i), the step that theory allows for every coordinate.
        direction: where the curvature is largest, to begin the next power iteration with.
    """

    step: Float[Array, " dim"]
    direction: Float[Array, " dim"]


def measure(
    objective: Elbo, sampler: AbstractSampler, params: MeanFieldParams, direction: Float[Array, " dim"], rounds
) -> Smoothness:
    """The largest steps for which SAGA is known to converge here.

    Args:
        objective: the negative ELBO.
        sampler: how minibatches are drawn.
        params: where, and in which metric.
        direction: where to begin the power iteration.
        rounds: how many full passes it takes.
    """
    many, one = _shares(objective, sampler)
    full, direction = _largest_eigenvalue(objective, params, direction, rounds)
    shape = many * full + one * _reach(objective, sampler, params)
    stretched = MeanFieldParams(params.location, params.log_scale - jnp.log(shape) / 2)
    full, _ = _largest_eigenvalue(objective, stretched, direction / jnp.sqrt(shape), rounds)
    datum = _largest_unit(objective, sampler, stretched)
    return Smoothness(1 / (4 * shape * (many * full + one * datum)), direction)


def _shares(objective: Elbo, sampler: AbstractSampler) -> tuple[float, float]:
    """The weights of L and L_max in 𝓛."""
    fixed = isinstance(sampler, FixedBatches)
    total = sampler.steps_per_epoch(objective.num_data) if fixed else objective.num_data
    drawn = 1 if fixed else min(sampler.batch_size or total, total)
    if total == drawn:
        return 1.0, 0.0
    return total * (drawn - 1) / (drawn * (total - 1)), (total - drawn) / (drawn * (total - 1))


def _largest_eigenvalue(objective, params, direction, rounds):
    """L by power iteration, and its direction."""

    def turn(_, carry):
        direction, _ = carry
        unit = direction / jnp.linalg.norm(direction)
        product = params.scale * _hessian_product(objective, params, params.scale * unit)
        return product, jnp.linalg.norm(product)

    direction, value = jax.lax.fori_loop(0, rounds, turn, (direction, jnp.zeros((), direction.dtype)))
    return value, direction


def _reach(objective: Elbo, sampler: AbstractSampler, params: MeanFieldParams):
    """For every coordinate the largest curvature of a datum that sees it: the shape of the steps, not their size."""
    view = objective.view
    if not isinstance(view, LinearView) or not view.has_squares:
        return jnp.full_like(params.location, _largest_unit(objective, sampler, params))
    zeros = jnp.zeros_like(params.location)
    schedule = Reshuffle(min(PASS_SIZE, objective.num_data)).sweep(objective.num_data)

    def larger(largest, schedule):
        batch = take_batch(objective, schedule, 0, zeros.dtype)
        curvature = _datum_curvature(view, params, batch)
        rows = jax.vmap(view.split.rows)(batch.data)
        for row in rows:
            spread = jnp.broadcast_to(jnp.expand_dims(curvature, range(1, row.ndim)), row.shape)
            largest = largest.at[row].max(spread, mode="drop")
        return largest, None

    return jax.lax.scan(larger, zeros, schedule)[0]


def _largest_unit(objective, sampler, params):
    """L_max, of a datum or of a fixed minibatch."""
    largest = _largest_datum if isinstance(objective.view, LinearView) else _largest_batch
    return largest(objective, sampler, params)


def _datum_curvature(view: LinearView, params: MeanFieldParams, batch) -> Float[Array, " batch"]:
    """N Σ_k |ℓ''_kk| (A² / s)_nk, an upper bound of λ_max for a datum."""
    seen = view.look(params.location, batch.data)
    bend = view.bend(seen, batch.data, jnp.ones_like(batch.weights))
    return jnp.sum(jnp.abs(bend) * view.spread(params.variance, batch.data), axis=-1)



def _hessian_product(objective: Elbo, params: MeanFieldParams, direction: Float[Array, " dim"]):
    """∇²[K + P] v on all data, at the location."""
    view = objective.view
    size = min(PASS_SIZE, objective.num_data)

    def add(total, schedule):
        batch = take_batch(objective, schedule, 0, direction.dtype)
        seen, step = view.look(params.location, batch.data), view.push(direction, batch.data)
        bend = view.expand(seen, step, batch.data, batch.share)[1]
        return total + view.pull(bend, batch.data), None

    schedule = Reshuffle(size).sweep(objective.num_data)
    data_part, _ = jax.lax.scan(add, jnp.zeros_like(direction), schedule)
    return data_part + objective.prior.hessian_product(params, direction)


def _largest_datum(objective: Elbo, sampler: AbstractSampler, params: MeanFieldParams) -> Float[Scalar, ""]:
    view = objective.view
    dtype = params.location.dtype
    schedule = Reshuffle(min(PASS_SIZE, objective.num_data)).sweep(objective.num_data)

    def larger(largest, schedule):
        batch = take_batch(objective, schedule, 0, dtype)
        curvature = _datum_curvature(view, params, batch)
        return jnp.maximum(largest, jnp.max(curvature)), None

    return jax.lax.scan(larger, jnp.zeros((), dtype), schedule)[0]


def _largest_batch(objective: Elbo, sampler: AbstractSampler, params: MeanFieldParams) -> Float[Scalar, ""]:
    """The largest λ_max of a minibatch's Hessian, by a few rounds of power iteration each."""
    view = objective.view

    def larger(largest, schedule):
        batch = take_batch(objective, schedule, 0, params.location.dtype)

        def turn(_, carry):
            direction, _ = carry
            unit = direction / jnp.linalg.norm(direction)
            bend = view.expand(params.location, params.scale * unit, batch.data, batch.weights)[1]
            product = params.scale * bend
            return product, jnp.linalg.norm(product)

        start = params.scale * view.slope(params.location, batch.data, batch.weights)
        _, value = jax.lax.fori_loop(0, UNIT_ITERATIONS, turn, (start, jnp.zeros((), start.dtype)))
        return jnp.maximum(largest, value), None

    schedule = sampler.sweep(objective.num_data)
    return jax.lax.scan(larger, jnp.zeros((), params.location.dtype), schedule)[0]
