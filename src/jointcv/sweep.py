"""One compiled program for many runs: settings × seeds, with a record of each at checkpoints.

    runs[s, v] = advance(runs[s, v]),   the seed s decides data and noise, the value v the step size

Runs of one seed share their minibatches and their noise, which are drawn once for all of them.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree, Scalar
from tqdm.auto import tqdm

from jointcv.algorithm.interface import AbstractAlgorithm
from jointcv.evaluate import full_values
from jointcv.loop import Run, advance, epoch_schedule, start
from jointcv.objective import AbstractObjective


class AbstractDial(eqx.Module):
    """What differs between the runs of a sweep."""

    @abstractmethod
    def turn(
        self, algorithm: AbstractAlgorithm, state: PyTree[Array], value: Scalar
    ) -> tuple[AbstractAlgorithm, PyTree[Array]]:
        """The algorithm and the state of a run with this value."""


class LearningRate(AbstractDial):
    """The learning rate of a `GradientDescent` whose optimiser is made by `optax.inject_hyperparams`."""

    def turn(self, algorithm, state, value):
        rate = state.optimizer.hyperparams["learning_rate"]
        value = jnp.asarray(value, rate.dtype)
        return algorithm, eqx.tree_at(lambda s: s.optimizer.hyperparams["learning_rate"], state, value)


class SurrogateRate(AbstractDial):
    """The `rate` of an algorithm, such as `Smiso`."""

    def turn(self, algorithm, state, value):
        return eqx.tree_at(lambda a: a.rate, algorithm, value), state


class NoDial(AbstractDial):
    """Nothing: runs that differ in their seed alone."""

    def turn(self, algorithm, state, value):
        return algorithm, state


class FullElbo(eqx.Module):
    """What to record of parameters: the ELBO on the full data, for each of a few draws common to all runs.

    Args:
        objective: of the evaluation; it need not be the one that is descended.
        num_draws: of ε; 1 where the objective has no noise.
        chunk_size: data at once.
    """

    objective: AbstractObjective
    num_draws: int = eqx.field(static=True, default=16)
    chunk_size: int = eqx.field(static=True, default=10_000)

    def __call__(self, params: Any) -> Float[Array, " draws"]:
        size = min(self.chunk_size, self.objective.num_data)
        key = jax.random.key(20_000)
        return -full_values(self.objective, params, key, num_draws=self.num_draws, chunk_size=size)


class Checkpoint(eqx.Module):
    """A sweep at one moment; arrays lead with seeds and values.

    Attributes:
        epoch: epochs done.
        step: steps done.
        alive: whether a run was finite so far; one that is not keeps its last good state.
        record: what was recorded, in NumPy arrays.
    """

    epoch: int
    step: int
    alive: np.ndarray
    record: PyTree[np.ndarray]


def sweep(
    algorithm: AbstractAlgorithm,
    dial: AbstractDial,
    values: Sequence[float],
    keys: Key[Array, " seeds"],
    *,
    num_epochs: int,
    record: Callable[[Any], PyTree[Array]],
    at: Sequence[int] | None = None,
    final_record: Callable[[Any], PyTree[Array]] | None = None,
    progress: str | None = None,
) -> list[Checkpoint]:
    """Run an algorithm for every value and key.

    Args:
        algorithm: what runs.
        dial: what the values are put into.
        values: one run a value …
        keys: … and key.
        num_epochs: how long.
        record: a function of parameters, evaluated at the start, after the last epoch, and …
        at: … after these epochs; after all of them by default.
        final_record: the last record, if it is to be another one.
        progress: the label of a progress bar, if there is to be one.

    Returns:
        The checkpoints, the start among them.

    Examples:
        >>> checkpoints = jcv.sweep(algorithm, jcv.LearningRate(), [1e-2, 1e-3], keys, num_epochs=5,
        ...                         record=jcv.FullElbo(algorithm.objective))  # doctest: +SKIP
    """
    if not len(values):
        raise ValueError("values is empty: nothing to run. Pass at least one value.")
    stops = _stops(range(1, num_epochs + 1) if at is None else at, num_epochs)
    points = jnp.asarray(values, float)
    stack = _begin(algorithm, keys, len(values))
    steps = algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)
    checkpoints = [_look(algorithm, record, stack, steps)]
    with tqdm(total=num_epochs, desc=progress, disable=progress is None, unit="epoch") as bar:
        for epoch in range(1, num_epochs + 1):
            stack = _advance((algorithm, dial, points), stack)
            if epoch in stops:
                last = final_record is not None and epoch == num_epochs
                checkpoints.append(_look(algorithm, final_record if last else record, stack, steps))
            bar.update()
    return checkpoints


def _stops(at: Sequence[int], num_epochs: int) -> set[int]:
    stops = {*at, num_epochs}
    if min(stops) < 1 or max(stops) > num_epochs:
        raise ValueError(f"at={at!r} has epochs that are not among 1 … {num_epochs}. Drop them.")
    return stops


class _Stack(eqx.Module):
    """Runs, seeds then values leading; the number of the step is that of all of them."""

    key: Any
    step: Any
    alive: Any
    state: Any
    table: Any


@eqx.filter_jit
def _begin(algorithm, keys, num_values: int) -> _Stack:
    def one(key):
        run = start(algorithm, key)
        return run.key, run.alive, run.state, run.table

    key, *rest = jax.vmap(one)(keys)

    def spread(leaf):
        return jnp.broadcast_to(leaf[:, None], (leaf.shape[0], num_values, *leaf.shape[1:]))

    return _Stack(key, jnp.zeros((), jnp.int32), *jax.tree.map(spread, rest))


@eqx.filter_jit(donate="all-except-first")
def _advance(static, stack: _Stack) -> _Stack:
    algorithm, dial, points = static
    steps = algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)

    # The key is shared by the values and the step by all: what depends on them alone is done once.
    def cell(key, step, alive, state, table, value):
        turned, state = dial.turn(algorithm, state, value)
        schedule = epoch_schedule(turned, key, step // steps)
        run, _ = advance(turned, Run(key, step, alive, state, table), schedule)
        return run.alive, run.state, run.table

    over_values = jax.vmap(cell, (None, None, 0, 0, 0, 0))
    over_seeds = jax.vmap(over_values, (0, None, 0, 0, 0, None))

    rest = over_seeds(stack.key, stack.step, stack.alive, stack.state, stack.table, points)
    return _Stack(stack.key, stack.step + steps, *rest)


@eqx.filter_jit
def _record(record, params):
    shape = jax.tree.leaves(params)[0].shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), params)
    return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), jax.lax.map(record, flat))


def _look(algorithm, record, stack: _Stack, steps_per_epoch: int) -> Checkpoint:
    values = jax.tree.map(np.asarray, _record(record, algorithm.params(stack.state)))
    step = int(stack.step)
    return Checkpoint(step // steps_per_epoch, step, np.asarray(stack.alive), values)
