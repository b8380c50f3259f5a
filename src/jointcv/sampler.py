"""Which data a step sees: an epoch's schedule of minibatches, padded and weighted so that shapes are static.

Σ_n weights_n h_n over a minibatch estimates (1/N) Σ_n h_n without bias.
"""

import math
from abc import abstractmethod
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, Scalar

from jointcv.checks import as_static, check_count


class Schedule(eqx.Module):
    """The minibatches of consecutive steps. A padded place has index N, weight 0 and share 0.

    Attributes:
        indices: which data each step sees.
        weights: what each datum counts in the step's estimate of a mean over all data.
        share: 1/N where this step visits the datum (once, were it drawn twice), else 0: what its visit
            changes in a running mean over all data.
        unit: which of the epoch's minibatches this is; fixed minibatches keep their number for ever.
        place: the step's place in its epoch.
    """

    indices: Int[Array, "*steps batch"]
    weights: Float[Array, "*steps batch"]
    share: Float[Array, "*steps batch"]
    unit: Int[Array, "*steps"]
    place: Int[Array, "*steps"]

    def cut(self, first, length: int) -> "Schedule":
        """`length` steps from `first` on; `first` may be traced."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, length), self)


class Batch(eqx.Module):
    """One step's minibatch: its place in the schedule, its data, and the number of the step in the run."""

    data: PyTree[Array]
    indices: Int[Array, " batch"]
    weights: Float[Array, " batch"]
    share: Float[Array, " batch"]
    step: Int[Scalar, ""]


class AbstractSampler(eqx.Module):
    """A rule that turns a key into an epoch's schedule."""

    batch_size: eqx.AbstractVar[int]
    visits_once: eqx.AbstractClassVar[bool]

    @abstractmethod
    def epoch(self, key: Key[Array, ""], num_data: int) -> Schedule:
        """The minibatches of one epoch."""

    def steps_per_epoch(self, num_data: int) -> int:
        return math.ceil(num_data / self.batch_size)

    def sweep(self, num_data: int) -> Schedule:
        """Every datum once, in order: a full pass in minibatches of this size."""
        return _partition(jnp.arange(num_data), self.batch_size)


class Reshuffle(AbstractSampler):
    """Every datum once an epoch, in minibatches drawn anew each epoch; the last one may be smaller."""

    visits_once: ClassVar[bool] = True
    batch_size: int = eqx.field(static=True, converter=as_static, default=100)

    def __check_init__(self):
        _check_batch_size(self)

    def epoch(self, key, num_data):
        return _partition(jax.random.permutation(key, num_data), self.batch_size)


class FixedBatches(AbstractSampler):
    """Minibatches fixed once (by `seed`), visited in a new order each epoch: the units of memory of a whole view."""

    visits_once: ClassVar[bool] = True
    batch_size: int = eqx.field(static=True, converter=as_static, default=100)
    seed: int = eqx.field(static=True, converter=as_static, default=0)

    def __check_init__(self):
        _check_batch_size(self)
        check_count("FixedBatches(seed=...): seed", self.seed, "a seed", least=0)

    def epoch(self, key, num_data):
        schedule = self.sweep(num_data)
        order = jax.random.permutation(key, self.steps_per_epoch(num_data))
        shuffled = jax.tree.map(lambda leaf: leaf[order], schedule)
        return eqx.tree_at(lambda s: s.place, shuffled, schedule.place)

    def sweep(self, num_data):
        order = np.random.default_rng(self.seed).permutation(num_data)
        schedule = _partition(jnp.asarray(order), self.batch_size)
        # A unit is drawn with probability 1/U whatever its size, so its data count U/N each.
        units = schedule.unit.shape[0]
        return eqx.tree_at(lambda s: s.weights, schedule, schedule.share * units)


class WithReplacement(AbstractSampler):
    """Every step draws its data independently and uniformly."""

    visits_once: ClassVar[bool] = False
    batch_size: int = eqx.field(static=True, converter=as_static, default=100)

    def __check_init__(self):
        _check_batch_size(self)

    def epoch(self, key, num_data):
        steps = self.steps_per_epoch(num_data)
        indices = jax.random.randint(key, (steps, self.batch_size), 0, num_data)
        weights = jnp.full(indices.shape, 1.0 / self.batch_size)
        earlier = jnp.tril(jnp.ones((self.batch_size, self.batch_size), bool), -1)
        repeated = jnp.any((indices[:, :, None] == indices[:, None, :]) & earlier, axis=-1)
        share = jnp.where(repeated, 0.0, 1.0 / num_data)
        return Schedule(indices, weights, share, jnp.arange(steps), jnp.arange(steps))


class FullBatch(AbstractSampler):
    """All data every step; what is left is Monte Carlo noise."""

    visits_once: ClassVar[bool] = True
    batch_size: int = eqx.field(static=True, default=0, init=False)

    def epoch(self, key, num_data):
        return self.sweep(num_data)

    def sweep(self, num_data):
        return _partition(jnp.arange(num_data), num_data)

    def steps_per_epoch(self, num_data):
        return 1


def _check_batch_size(sampler: AbstractSampler) -> None:
    check_count(f"{type(sampler).__name__}(batch_size=...): batch_size", sampler.batch_size, "data")


def _partition(order: Int[Array, " data"], batch_size: int) -> Schedule:
    num_data = order.shape[0]
    steps = math.ceil(num_data / batch_size)
    padding = steps * batch_size - num_data
    indices = jnp.pad(order, (0, padding), constant_values=num_data).reshape(steps, batch_size)
    present = (indices < num_data).astype(float)  # JAX's default precision
    weights = present / jnp.sum(present, axis=1, keepdims=True)
    share = present / num_data
    return Schedule(indices, weights, share, jnp.arange(steps), jnp.arange(steps))
