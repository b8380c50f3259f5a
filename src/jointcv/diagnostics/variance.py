"""Where the noise of a gradient comes from, at the end of a run, as traces of covariances.

    total  V_{n,ε}[∇f(w; n, ε)]                 the naive gradient
    data   V_n[E_ε ∇f(w; n, ε)]                 the floor of controls for ε alone
    noise  V_ε[E_n ∇f(w; n, ε)]                 the floor of controls for n alone
    own    V_{n,ε}[∇f(w; n, ε) + c]             what the run's own control leaves, its memory as it stands

`data` by freezing n: with independent ε, ε' the mean of (g(n,ε) − g(m,δ))·(g(n,ε') − g(m,δ'))/2 is V_n. `noise`
from gradients of the full data.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from jointcv.algorithm.gradient import GradientDescent, controlled_gradient
from jointcv.algorithm.natural import NaturalDescent
from jointcv.checks import check_count, check_key, check_type
from jointcv.elbo import Elbo
from jointcv.evaluate import float_type, full_gradient, take_batch
from jointcv.fit import Fit

MANY_DATA = 20_000
STEPS_PER_EPOCH = 50
BETWEEN_ANCHORS = 1  # the number of a step at which no anchor moves, for the memory is looked at as it stands


class Traces(eqx.Module):
    """Traces of the covariance of a gradient, in the location and in log σ."""

    location: Float[Array, ""]
    log_scale: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class VarianceReport:
    """Traces of gradient covariances at the end of a run, each as (location, log σ).

    Attributes:
        total: of the naive gradient.
        data: of its part from subsampling, the floor of `cv`.
        noise: of its part from ε, the floor of `inc`.
        own: of the run's own, controlled gradient.
        batch_size: data a step.
    """

    total: tuple[float, float]
    data: tuple[float, float]
    noise: tuple[float, float]
    own: tuple[float, float]
    batch_size: int

    def __str__(self):
        lines = [f"{'variance of the gradient':<34}{'location':>12}{'log σ':>12}"]
        for name, words in (
            ("total", "naive, V_{n,ε}"),
            ("data", "from subsampling, V_n"),
            ("noise", "from Monte Carlo, V_ε"),
            ("own", "with this run's control"),
        ):
            location, log_scale = getattr(self, name)
            lines.append(f"{words:<34}{location:>12.3g}{log_scale:>12.3g}")
        return "\n".join(lines)


def variance_report(
    fit: Fit, key: Key[Array, ""], *, num_draws: int = 500, full_draws: int = 50
) -> VarianceReport:
    """Decompose the variance of the gradient at the end of a run.

    Args:
        fit: a run of gradient descent or natural steps.
        key: of the draws.
        num_draws: minibatches drawn.
        full_draws: gradients of the full data drawn, for the part of ε.

    Returns:
        The traces, for the run's own kind of noise and minibatches.
    """
    check_type("fit", fit, Fit, "Pass what jointcv.fit returned.")
    check_key(key)
    num_draws = check_count("num_draws", num_draws, "minibatches", least=2)
    full_draws = check_count("full_draws", full_draws, "gradients", least=2)
    algorithm = fit.algorithm
    if not isinstance(algorithm, GradientDescent | NaturalDescent) or not isinstance(
        algorithm.objective, Elbo
    ):
        raise ValueError(
            f"fit={type(algorithm).__name__}(...) on {type(algorithm.objective).__name__} has no controlled gradient "
            "of an ELBO. Pass a run of gradient descent or natural steps on a Problem."
        )
    batch_key, full_key = jax.random.split(key)
    naive, again, own = _batch_gradients(algorithm, fit.run, fit.params, batch_key, num_draws)
    noise = _full_gradients(algorithm.objective, fit.params, full_key, full_draws)
    return VarianceReport(
        total=_floats(_trace(naive)),
        data=tuple(max(value, 0.0) for value in _floats(_shared_trace(naive, again))),  # pyright: ignore
        noise=_floats(_trace(noise)),
        own=_floats(_trace(own)),
        batch_size=algorithm.sampler.batch_size or algorithm.objective.num_data,
    )


@eqx.filter_jit
def _batch_gradients(algorithm, run, params, key, num_draws: int):
    """For each minibatch of some epochs two naive gradients of independent ε, and a controlled one."""
    objective, control = algorithm.objective, algorithm.control
    dtype = float_type(params)
    steps = algorithm.sampler.steps_per_epoch(objective.num_data)
    steps = min(steps, STEPS_PER_EPOCH) if objective.num_data > MANY_DATA else 1

    def one_step(inputs):
        plan, row, shared, key = inputs
        batch = take_batch(objective, plan, BETWEEN_ANCHORS, dtype)
        recall = control.memory.read(run.state.memory, shared, row, objective, params, batch)
        first_key, second_key = jax.random.split(key)
        draws = objective.draw(first_key, params, batch.data)
        _, naive, correction = controlled_gradient(objective, control, recall, params, batch, draws)
        own = jax.tree.map(jnp.add, naive, correction)
        naive, own = (objective.pull(one, params, batch.data, draws) for one in (naive, own))
        draws = objective.draw(second_key, params, batch.data)
        entry = objective.remember(params, batch.data)
        again = objective.gradient(entry, params, batch.data, batch.weights, draws)
        return naive, objective.pull(again, params, batch.data, draws), own

    def one_epoch(key):
        epoch_key, noise_key = jax.random.split(key)
        schedule = algorithm.sampler.epoch(epoch_key, objective.num_data).cut(0, steps)
        shared, rows = algorithm.open(run.table, schedule)
        keys = jax.random.split(noise_key, steps)
        return jax.lax.map(
            lambda inputs: one_step((inputs[0], inputs[1], shared, inputs[2])), (schedule, rows, keys)
        )

    return jax.lax.map(one_epoch, jax.random.split(key, max(2, -(-num_draws // steps))))


@eqx.filter_jit
def _full_gradients(objective, params, key, num_draws: int):
    return jax.lax.map(lambda key: full_gradient(objective, params, key), jax.random.split(key, num_draws))


def _trace(gradients: PyTree) -> Traces:
    def trace(leaf):
        return jnp.sum(jnp.var(leaf.reshape(-1, leaf.shape[-1]), axis=0, ddof=1))

    return Traces(trace(gradients.location), trace(gradients.log_scale))


def _shared_trace(first: PyTree, second: PyTree) -> Traces:
    """The trace of the covariance between two gradients of one minibatch, pairing it with one of another epoch.

    Those of one epoch are disjoint, and so not independent.
    """

    def trace(one, other):
        return jnp.mean(jnp.sum((one - jnp.roll(one, 1, 0)) * (other - jnp.roll(other, 1, 0)), axis=-1)) / 2

    return Traces(trace(first.location, second.location), trace(first.log_scale, second.log_scale))


def _floats(traces: Traces) -> tuple[float, float]:
    return float(traces.location), float(traces.log_scale)
