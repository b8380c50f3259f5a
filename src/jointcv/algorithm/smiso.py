"""SMISO, stochastic MISO for a sum of expectations:

    w_n ← (1 − α) w_n + α (w̄ − γ ∇f(w̄; n, ε)),     w̄ = (1/N) Σ_n w_n

one set of parameters for every datum or, under fixed minibatches, for every minibatch. An SGD step of α|B|γ/N.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jointcv.algorithm.interface import AbstractAlgorithm, Info
from jointcv.evaluate import float_type
from jointcv.memory import put_rows, take_rows
from jointcv.objective import AbstractObjective, Params
from jointcv.sampler import AbstractSampler, FixedBatches, Schedule


class Smiso(AbstractAlgorithm):
    """Incremental surrogate minimisation; its table holds parameters, not gradients.

    Args:
        objective: what is minimised.
        sampler: `Reshuffle()` for parameters per datum, `FixedBatches()` for parameters per minibatch.
        rate: γ, the step of a surrogate.
        decay: α, how far a surrogate moves towards its new minimum.
    """

    objective: AbstractObjective
    sampler: AbstractSampler
    rate: float
    decay: float = 0.9

    def __check_init__(self):
        if not self.sampler.visits_once:
            raise ValueError(
                f"Smiso(sampler={self.sampler!r}) may see a datum twice in an epoch. Use Reshuffle() or FixedBatches()."
            )

    def init(self, key):
        params = self.objective.init(key)
        num_units = self.objective.num_data if self._per_datum else self._num_batches
        table = jax.tree.map(lambda leaf: jnp.tile(leaf, (num_units, *[1] * leaf.ndim)), params)
        return params, table

    def open(self, table, schedule):
        return None, take_rows(table, self._places(schedule))

    def step(self, state, shared, row, batch, key):
        draws = self.objective.draw(key, state, batch.data)
        if self._per_datum:
            gradient = jax.vmap(self._gradient, (None, 0, 0, None))(
                state, _single(batch.data), jnp.ones_like(batch.weights)[:, None], draws
            )
            share = batch.share
        else:
            gradient = jax.tree.map(
                lambda leaf: leaf[None], self._gradient(state, batch.data, batch.weights, draws)
            )
            share = jnp.full(1, 1 / self._num_batches, float_type(state))
            row = jax.tree.map(lambda leaf: leaf[None], row)
        moved = jax.tree.map(
            lambda own, mean, gradient: (1 - self.decay) * own + self.decay * (mean - self.rate * gradient),
            row,
            state,
            gradient,
        )
        mean = jax.tree.map(
            lambda mean, new, old: mean + jnp.tensordot(share, new - old, 1), state, moved, row
        )
        entry = self.objective.remember(state, batch.data)
        loss = self.objective.value(entry, state, batch.data, batch.weights, draws) + self.objective.rest(
            state, draws
        )
        weights = batch.weights if self._per_datum else jnp.ones_like(share)
        norm = optax.tree.norm(jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), gradient))
        if not self._per_datum:
            moved = jax.tree.map(lambda leaf: leaf[0], moved)
        return mean, moved, Info(loss, norm, jnp.isfinite(loss) & jnp.isfinite(norm))

    def close(self, table, schedule, rows):
        return put_rows(table, self._places(schedule), rows)

    def renew(self, state, table, step):
        return state

    def params(self, state):
        return state

    @property
    def _per_datum(self) -> bool:
        return not isinstance(self.sampler, FixedBatches)

    @property
    def _num_batches(self) -> int:
        return self.sampler.steps_per_epoch(self.objective.num_data)

    def _places(self, schedule: Schedule):
        return schedule.indices if self._per_datum else schedule.unit

    def _gradient(self, params: Params, data: PyTree[Array], weights, draws) -> Params:
        entry = self.objective.remember(params, data)
        return self.objective.gradient(entry, params, data, weights, draws)


def _single(data: PyTree[Array]) -> PyTree[Array]:
    """Every datum as a batch of one."""
    return jax.tree.map(lambda leaf: leaf[:, None], data)
