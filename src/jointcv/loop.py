"""The compiled loop: epochs of steps, with the table out of the carry.

    schedule of the epoch → rows of the table for the coming steps → scan of steps → rows back into the table

Keys come from the numbers of epoch and step, so that neither the length of a chunk nor resuming changes a result.
"""

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key, PyTree, Scalar

from jointcv.algorithm.interface import AbstractAlgorithm, Info
from jointcv.evaluate import float_type, take_batch
from jointcv.sampler import Schedule


class Run(eqx.Module):
    """A run between two steps: all that going on needs.

    Attributes:
        key: the run's key; never changes.
        step: how many steps have been taken.
        alive: whether all of them were finite; a run that is not alive keeps the last good state.
        state: the algorithm's.
        table: the algorithm's, as large as the data.
    """

    key: Key[Array, "*stack"]
    step: Int[Scalar, "*stack"]
    alive: Bool[Scalar, "*stack"]
    state: PyTree[Array]
    table: PyTree[Array]


@eqx.filter_jit
def start(algorithm: AbstractAlgorithm, key: Key[Array, ""]) -> Run:
    """A run before its first step."""
    start_key, run_key = jax.random.split(key)
    state, table = algorithm.init(start_key)
    return Run(run_key, jnp.zeros((), jnp.int32), jnp.ones((), bool), state, table)


@eqx.filter_jit
def result(algorithm: AbstractAlgorithm, run: Run):
    """The parameters to hand out if the run ends here."""
    return algorithm.result(run.state)


def epoch_schedule(algorithm: AbstractAlgorithm, key: Key[Array, ""], epoch) -> Schedule:
    """The minibatches of an epoch of the run with this key."""
    return algorithm.sampler.epoch(jax.random.fold_in(key, 2 * epoch), algorithm.objective.num_data)


def advance(algorithm: AbstractAlgorithm, run: Run, schedule: Schedule) -> tuple[Run, Info]:
    """The steps of a schedule, all within one epoch."""
    begins = (schedule.place[0] == 0) & run.alive
    state, table = jax.lax.cond(
        begins,
        lambda state, table: algorithm.renew(state, table, run.step),
        lambda state, table: (state, table),
        *(run.state, run.table),
    )
    shared, rows = algorithm.open(table, schedule)
    dtype = float_type(algorithm.params(run.state))
    noise_key = jax.random.fold_in(run.key, 1)

    def step(carry, inputs):
        state, alive, number, taken = carry
        plan, row = inputs
        batch = take_batch(algorithm.objective, plan, number, dtype)
        moved, row, info = algorithm.step(state, shared, row, batch, jax.random.fold_in(noise_key, number))
        alive = alive & info.finite & algorithm.objective.admits(algorithm.params(moved))
        state = algorithm.keep(moved, state, alive)
        info = eqx.tree_at(lambda info: info.finite, info, alive)
        # The number does not depend on `alive`: under vmap what hangs on it alone is then done once for all runs.
        return (state, alive, number + 1, taken + alive.astype(taken.dtype)), (row, info)

    carry = (state, run.alive, run.step, run.step)
    (state, alive, _, taken), (rows, infos) = jax.lax.scan(step, carry, (schedule, rows))
    return Run(run.key, taken, alive, state, algorithm.close(table, schedule, rows)), infos


def advance_epochs(algorithm: AbstractAlgorithm, run: Run, num_epochs: int) -> tuple[Run, Info]:
    """Whole epochs, from the start of one."""
    steps = algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)

    def epoch(run, _):
        return advance(algorithm, run, epoch_schedule(algorithm, run.key, run.step // steps))

    run, infos = jax.lax.scan(epoch, run, None, length=num_epochs)
    return run, jax.tree.map(lambda leaf: leaf.reshape(-1), infos)


class Chunk(eqx.Module):
    """Steps that run without the host: whole epochs, or a part of one."""

    first: int
    length: int
    num_epochs: int


def plan_chunks(first: int, last: int, steps_per_epoch: int, chunk_size: int) -> Iterator[Chunk]:
    """Chunks of at most `chunk_size` steps that never straddle an epoch unless they are whole epochs."""
    step = first
    while step < last:
        place = step % steps_per_epoch
        whole = min(last - step, chunk_size) // steps_per_epoch
        if place == 0 and whole > 0:
            chunk = Chunk(step, whole * steps_per_epoch, whole)
        else:
            chunk = Chunk(step, min(chunk_size, steps_per_epoch - place, last - step), 0)
        yield chunk
        step += chunk.length


@eqx.filter_jit(donate="all-except-first")
def _run_epochs(static, run: Run) -> tuple[Run, Info]:
    algorithm, num_epochs = static
    return advance_epochs(algorithm, run, num_epochs)


@eqx.filter_jit(donate="all-except-first")
def _run_part(static, run: Run) -> tuple[Run, Info]:
    algorithm, schedule, first, length = static
    return advance(algorithm, run, schedule.cut(first, length))


_schedule = eqx.filter_jit(epoch_schedule)


def run_chunk(algorithm: AbstractAlgorithm, run: Run, chunk: Chunk, schedule: Schedule | None):
    """A chunk on the device. `schedule` is that of the chunk's epoch if the last chunk was of the same one.

    Returns:
        The run after it, what its steps told, and the epoch's schedule for the next part of it.
    """
    if chunk.num_epochs:
        run, infos = _run_epochs((algorithm, chunk.num_epochs), run)
        return run, infos, None
    steps = algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)
    epoch, place = divmod(chunk.first, steps)
    if schedule is None or place == 0:
        schedule = _schedule(algorithm, run.key, jnp.asarray(epoch))
    run, infos = _run_part((algorithm, schedule, jnp.asarray(place), chunk.length), run)
    return run, infos, schedule
