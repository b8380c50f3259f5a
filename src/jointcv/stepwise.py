"""A run one step at a time, for loops that a user writes: the epoch's minibatches travel with the state.

In such a loop XLA may copy the table every step. `run_chunks` keeps it out of the loop, as `jointcv.fit` does; both
take the same steps.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar
from tqdm.auto import tqdm

from jointcv.algorithm.interface import AbstractAlgorithm
from jointcv.loop import Run, advance, epoch_schedule, plan_chunks, run_chunk, start
from jointcv.sampler import Schedule

CHUNK_SIZE = 1000


class Progress(eqx.Module):
    """Where a run stands, with the minibatches of the epoch that its next step belongs to."""

    run: Run
    schedule: Schedule


def begin(algorithm: AbstractAlgorithm, key) -> Progress:
    """Before the first step."""
    return _with_schedule(algorithm, start(algorithm, key))


@eqx.filter_jit
def step(algorithm: AbstractAlgorithm, progress: Progress) -> tuple[Progress, Float[Scalar, ""]]:
    """One step and its loss: NaN from the first step on that is not finite."""
    run = progress.run
    epoch, place = jnp.divmod(run.step, _steps_per_epoch(algorithm))
    schedule = jax.lax.cond(
        place == 0, lambda: epoch_schedule(algorithm, run.key, epoch), lambda: progress.schedule
    )
    run, info = advance(algorithm, run, schedule.cut(place, 1))
    return Progress(run, schedule), jnp.where(run.alive, info.loss[0], jnp.nan)


@eqx.filter_jit
def stable_step(algorithm: AbstractAlgorithm, progress: Progress) -> tuple[Progress, Float[Scalar, ""]]:
    """One step and its loss; a step that is not finite leaves only its number, and a loss of NaN."""
    before = progress.run
    progress, loss = step(algorithm, progress)

    def keep(new, old):
        return jax.tree.map(lambda new, old: jnp.where(progress.run.alive, new, old), new, old)

    state, table = keep((progress.run.state, progress.run.table), (before.state, before.table))
    run = Run(before.key, before.step + 1, before.alive, state, table)
    return Progress(run, progress.schedule), loss


@eqx.filter_jit
def run_steps(
    algorithm: AbstractAlgorithm, progress: Progress, num_steps: int, stable: bool
) -> tuple[Progress, Float[Array, " steps"]]:
    """Steps in one compiled loop."""
    one = stable_step if stable else step
    return jax.lax.scan(lambda progress, _: one(algorithm, progress), progress, None, length=num_steps)


def run_chunks(
    algorithm: AbstractAlgorithm, progress: Progress, num_steps: int, progress_bar: bool
) -> tuple[Progress, Float[Array, " steps"]]:
    """Steps in chunks, whole epochs where they fit, with the table out of the compiled loop."""
    run = jax.tree.map(lambda leaf: leaf.copy(), progress.run)  # chunks use up what they are given
    first, losses, schedule = int(run.step), [], None
    with tqdm(total=num_steps, disable=not progress_bar, unit="step") as bar:
        for chunk in plan_chunks(first, first + num_steps, _steps_per_epoch(algorithm), CHUNK_SIZE):
            alive = run.alive.copy()
            run, infos, schedule = run_chunk(algorithm, run, chunk, schedule)
            losses.append(jnp.where(jnp.cumprod(infos.finite) * alive, infos.loss, jnp.nan))
            bar.update(chunk.length)
            bar.set_postfix_str(f"avg. loss: {jnp.mean(losses[-1]):.4f}", refresh=False)
    return _with_schedule(algorithm, run), jnp.concatenate(losses)


@eqx.filter_jit
def _with_schedule(algorithm: AbstractAlgorithm, run: Run) -> Progress:
    return Progress(run, epoch_schedule(algorithm, run.key, run.step // _steps_per_epoch(algorithm)))


def _steps_per_epoch(algorithm: AbstractAlgorithm) -> int:
    return algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)
