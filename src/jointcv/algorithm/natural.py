"""Natural gradient steps for a mean field, with a step size from theory. With the precision s = 1/σ²

    s ← (1−γ) s + γ h,   h ≈ E_q diag ∇²[Σ_n −log p(x_n|z) − log p(z)]
    μ ← μ − γ ĝ_μ / s    with the new s and the controlled location gradient ĝ_μ

SAGA with minibatches of B converges for γ = 1/(4𝓛), with 𝓛(B) of `jointcv.smoothness` in the metric s; the bound is
cautious, so the step begins at four times it. Once an epoch L and L_max are measured again, running means are summed
anew, and the objective on the full data is looked at: has it risen beyond its noise, the epoch is taken back and the
step halved.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree, Scalar

from jointcv.algorithm.gradient import controlled_gradient
from jointcv.algorithm.interface import AbstractAlgorithm, Info
from jointcv.control import AbstractControl
from jointcv.elbo import Elbo
from jointcv.evaluate import full_summary, full_values
from jointcv.family import MeanFieldParams
from jointcv.sampler import AbstractSampler
from jointcv.smoothness import Smoothness, measure, unmeasured

SETTLING_ROUNDS = 3


class Position(eqx.Module):
    """Where the family is: μ and s."""

    location: Float[Array, " dim"]
    precision: Float[Array, " dim"]

    @property
    def params(self) -> MeanFieldParams:
        return MeanFieldParams(self.location, -jnp.log(self.precision) / 2)


class Guard(eqx.Module):
    """The end of the best epoch so far, and the objective there, for a few fixed draws of ε."""

    position: Position
    values: Float[Array, " draws"]


class NaturalState(eqx.Module):
    """What the next step needs."""

    position: Position
    memory: PyTree[Array]
    curvature: Float[Array, " dim"] | None
    smoothness: Smoothness
    rate: Float[Array, " dim"]
    slack: Float[Scalar, ""]
    guard: Guard
    halvings: Int[Scalar, ""]
    drift: Float[Scalar, ""]


class NaturalGradient(AbstractAlgorithm):
    """Steps in the metric of q, with any control; neither a learning rate nor an optimiser.

    Args:
        objective: the negative ELBO of a mean field.
        control: the zero-mean correction of its gradient.
        sampler: which data a step sees.
        slack: how many times the theory's step is tried first.
        guard_draws: draws of ε in the epoch's look at the full data.
    """

    objective: Elbo
    control: AbstractControl
    sampler: AbstractSampler
    slack: float = 4.0
    rate: float | None = None
    naive_steps: int = 0
    guard_draws: int = eqx.field(static=True, default=4)
    first_rounds: int = eqx.field(static=True, default=20)
    rounds: int = eqx.field(static=True, default=3)

    def init(self, key):
        objective = self.objective
        position = self._settle(objective.init(key))
        params = position.params
        memory, table = self.control.memory.init(objective, params, self.sampler)
        dtype = params.location.dtype
        guard = Guard(position, jnp.full(self.guard_draws, jnp.inf, dtype))
        zero = jnp.zeros((), dtype)
        state = NaturalState(
            position, memory, jnp.zeros_like(params.location), unmeasured(params), jnp.zeros_like(params.location), jnp.asarray(self.slack, dtype), guard,
            jnp.zeros((), jnp.int32), zero,
        )
        return state, table

    def open(self, table, schedule):
        return self.control.memory.open(table, schedule)

    def renew(self, state, table, step):
        memory = self.control.memory.recount(state.memory, table, self.objective, self.sampler)
        state = eqx.tree_at(lambda s: s.memory, state, memory)
        state = self._look_back(state, step == 0)
        params = state.position.params
        rounds = jnp.where(step == 0, self.first_rounds, self.rounds)
        epoch = step // self.sampler.steps_per_epoch(self.objective.num_data)
        due = (epoch & (epoch - 1)) == 0  # epochs 0, 1, 2, 4, 8, ...
        smoothness = jax.lax.cond(
            due,
            lambda before: measure(self.objective, self.sampler, params, before, rounds),
            lambda before: before,
            state.smoothness,
        )
        rate = jnp.minimum(state.slack * smoothness.step, 1)
        if self.rate is not None:
            rate = jnp.full_like(rate, self.rate)
        return eqx.tree_at(lambda s: (s.rate, s.smoothness), state, (rate, smoothness))

    def step(self, state, shared, row, batch, key):
        position, rate = state.position, state.rate
        params = position.params
        objective = self.objective
        draws = objective.draw(key, params, batch.data)
        recall = self.control.memory.read(state.memory, shared, row, objective, params, batch)
        loss, gradient, correction = controlled_gradient(objective, self.control, recall, params, batch, draws)
        gradient = jax.tree.map(jnp.add, gradient, correction)
        memory, row = self.control.memory.write(state.memory, recall, objective, params, batch)
        mean = self._summary(memory, params, batch)
        curvature = objective.noise.excess(objective.view, params, batch.data, batch.weights, draws.data)
        if mean.curvature is None:
            steps = self.sampler.steps_per_epoch(objective.num_data)
            weight = 1 / jnp.minimum(batch.step + 1, steps)
            curvature = state.curvature + weight * (curvature - state.curvature)
            averaged = curvature
        else:
            curvature, averaged = mean.curvature + curvature, state.curvature
        target = curvature + objective.prior.curvature(params, draws.prior)
        precision, corrected = move_precision(position.precision, target, rate)
        location = position.location - rate * gradient.location / precision
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.all(jnp.isfinite(precision))
        moved = NaturalState(
            Position(location, precision), memory, averaged, state.smoothness, rate, state.slack, state.guard,
            state.halvings, state.drift,
        )
        return moved, row, Info(loss, norm, finite)

    def close(self, table, schedule, rows):
        return self.control.memory.close(table, schedule, rows)

    def params(self, state):
        return state.position.params

    def _settle(self, params: MeanFieldParams) -> Position:
        """The precision that suits the first location: a few rounds of s ← h, where a pass over the data gives h."""
        objective = self.objective
        position = Position(params.location, jnp.exp(-2 * params.log_scale))
        schedule = self.sampler.sweep(objective.num_data)
        for _ in range(SETTLING_ROUNDS):
            params = position.params
            summary = full_summary(objective, params, schedule)
            if summary.curvature is None:
                return position
            target = summary.curvature + objective.prior.curvature(params, jnp.zeros_like(params.location))
            position = Position(params.location, jnp.where(target > 0, target, position.precision))
        return position

    def _summary(self, memory, params, batch):
        state = memory[0] if isinstance(memory, tuple) else memory
        if state is None:
            return self.objective.summarise(self.objective.remember(params, batch.data), batch.data, batch.weights)
        return state

    def _look_back(self, state, is_first):
        values = full_values(
            self.objective, state.position.params, jax.random.key(0), num_draws=self.guard_draws, chunk_size=min(10_000, self.objective.num_data)
        )
        change = values - state.guard.values
        error = jnp.std(change) / self.guard_draws**0.5
        fell = ~is_first & ~(jnp.mean(change) <= 3 * error + 1e-6 * jnp.abs(jnp.mean(values)))
        now = Guard(state.position, values)
        guard = jax.tree.map(lambda old, new: jnp.where(fell, old, new), state.guard, now)
        return eqx.tree_at(
            lambda s: (s.position, s.guard, s.slack, s.halvings),
            state,
            (guard.position, guard, jnp.where(fell, state.slack / 2, state.slack), state.halvings + fell),
        )


def move_precision(precision, target, rate):
    """(1−γ) s + γ h where h is positive; elsewhere the improved rule of Lin, Schmidt and Khan (2020), which stays so.

    s + γ(h − s) + γ²(h − s)²/(2s), the second-order step along the manifold's geodesic.
    """
    change = rate * (target - precision)
    negative = target <= 0
    second = jnp.where(negative, change**2 / (2 * precision), 0)
    return precision + change + second, jnp.sum(negative)
