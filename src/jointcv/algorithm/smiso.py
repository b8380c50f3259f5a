"""SMISO, stochastic MISO for a sum of expectations:

    w_n ← (1 − α) w_n + α (w̄ − γ ∇f(w̄; n, ε)),     w̄ = (1/N) Σ_n w_n

one set of parameters for every datum or, under fixed minibatches, for every minibatch. An SGD step of α|B|γ/N.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree, Scalar

from jointcv.algorithm.interface import AbstractAlgorithm, Info, check_parts, choose
from jointcv.checks import check_number
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
        check_parts(self.objective, self.sampler, None)
        check_number("Smiso(rate=...): rate", self.rate, "Use a positive number.")
        check_number("Smiso(decay=...): decay", self.decay, "Use 0.9.")
        if isinstance(self.decay, int | float) and not 0 < self.decay <= 1:
            raise ValueError(f"Smiso(decay={self.decay!r}) does not lie in (0, 1]. Use 0.9.")
        if isinstance(self.rate, int | float) and not self.rate > 0:
            raise ValueError(f"Smiso(rate={self.rate!r}) is no step. Use a positive number.")
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
        if self._per_datum:
            parts, ones = jnp.arange(batch.weights.size), jnp.ones_like(batch.weights)[:, None]
            each = jax.vmap(self._evaluate, (None, 0, 0, None, 0))
            losses, gradient = each(state, _single(batch.data), ones, key, parts)
            share, weights = batch.share, batch.weights
        else:
            each = self._evaluate(state, batch.data, batch.weights, key, jnp.zeros((), jnp.int32))
            losses, gradient, row = jax.tree.map(lambda leaf: leaf[None], (*each, row))
            share = jnp.full(1, 1 / self._num_batches, float_type(state))
            weights = jnp.ones_like(share)
        moved = jax.tree.map(
            lambda own, mean, gradient: (1 - self.decay) * own + self.decay * (mean - self.rate * gradient),
            row,
            state,
            gradient,
        )
        mean = jax.tree.map(
            lambda mean, new, old: mean + jnp.tensordot(share, new - old, 1), state, moved, row
        )
        loss = weights @ losses
        norm = optax.tree.norm(jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), gradient))
        if not self._per_datum:
            moved = jax.tree.map(lambda leaf: leaf[0], moved)
        return mean, moved, Info(loss, norm, jnp.isfinite(loss) & jnp.isfinite(norm))

    def close(self, table, schedule, rows):
        return put_rows(table, self._places(schedule), rows)

    def renew(self, state, table, step):
        return state, table

    def keep(self, moved, state, alive):
        return choose(alive, moved, state)

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

    def _evaluate(self, params: Params, data: PyTree[Array], weights, key, part) -> tuple[Scalar, Params]:
        """f(w̄; n, ε) and its gradient; data share the ε of z and have their own where it is drawn per datum."""
        objective = self.objective
        draws = objective.draw(key, params, data, part)
        entry = objective.remember(params, data)
        loss = objective.value(entry, params, data, weights, draws) + objective.rest(params, draws)
        gradient = objective.gradient(entry, params, data, weights, draws)
        return loss, objective.pull(gradient, params, data, draws)


def _single(data: PyTree[Array]) -> PyTree[Array]:
    """Every datum as a batch of one."""
    return jax.tree.map(lambda leaf: leaf[:, None], data)
