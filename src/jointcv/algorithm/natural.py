"""Natural gradient steps for a mean field, with a step size from theory. With the precision s = 1/σ²

    s ← (1−γ) s + γ h,   h ≈ E_q diag ∇²[Σ_n −log p(x_n|z) − log p(z)]
    μ ← μ − γ ĝ_μ / s    with the new s and the controlled location gradient ĝ_μ

SAGA with minibatches of B converges for γ = 1/(4𝓛), with 𝓛(B) of `jointcv.smoothness` in the metric s, for every
coordinate its own. That bound is cautious, so the step begins at `slack` times it and grows, behind a guard: once an
epoch the objective on the full data is looked at, and has it risen beyond its noise (or a step not been finite), the
epoch is taken back, the slack halved, and from then on it grows more slowly. Also once an epoch the running means are
summed anew.

Steps in a diagonal metric are slow along collinear predictors. So before epochs 0, 1, 2, 4, 8, … the location takes a
Newton step on all data (`jointcv.algorithm.newton`) where the objective falls by it, and everything is seen anew there.
Under a whole view it does not: the Hessian is seldom definite, and a precision that lags behind holds back the steps.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

from jointcv.algorithm.gradient import controlled_gradient
from jointcv.algorithm.interface import AbstractAlgorithm, Info, check_parts, choose
from jointcv.algorithm.newton import newton_step
from jointcv.checks import as_static, check_count, check_number, check_type
from jointcv.control import AbstractControl
from jointcv.elbo import Elbo
from jointcv.evaluate import full_summary, full_values, take_batch
from jointcv.family import MeanFieldParams
from jointcv.memory import NoMemory, WholeTable
from jointcv.noise import PaperNoise
from jointcv.sampler import AbstractSampler
from jointcv.smoothness import Smoothness, measure, unmeasured
from jointcv.view import LinearView

SETTLING_ROUNDS = 3
FIRST_ROUNDS, ROUNDS = 10, 4  # of power iteration, at first and from then on
GUARD_CHUNK = 10_000
FRACTIONS = (1.0, 0.5, 0.25)  # of a Newton step that are tried
MOST_SLACK = 6.0


class Position(eqx.Module):
    """Where the family is: μ and s."""

    location: Float[Array, "*stack dim"]
    precision: Float[Array, "*stack dim"]

    @property
    def params(self) -> MeanFieldParams:
        return MeanFieldParams(self.location, -jnp.log(self.precision) / 2)


class Guard(eqx.Module):
    """The end of the best epoch so far, the objective there for a few fixed draws of ε, and what it has cost.

    Attributes:
        position: where the epoch ended.
        values: of the objective there, on all data.
        slack: how many times the theory's step is taken.
        halvings: epochs taken back.
        products: Hessian products of Newton steps, a pass over the data each.
        broken: whether a step of this epoch was not finite.
    """

    position: Position
    values: Float[Array, "*stack draws"]
    slack: Float[Array, "*stack"]
    halvings: Int[Array, "*stack"]
    products: Int[Array, "*stack"]
    broken: Bool[Array, "*stack"]


class NaturalState(eqx.Module):
    """What the next step needs.

    Attributes:
        position: μ and s.
        memory: the control's.
        average: a running average of the data's part of h where no memory keeps it, under a whole view.
        rate: γ of every coordinate, until the next measurement.
        smoothness: the last measurement.
        guard: where to go back to.
        drift: how far the running mean of the gradient had moved from its sum, relative, when last summed anew.
    """

    position: Position
    memory: PyTree[Array]
    average: Float[Array, "*stack dim"]
    rate: Float[Array, "*stack dim"]
    smoothness: Smoothness
    guard: Guard
    drift: Float[Array, "*stack"]


class NaturalDescent(AbstractAlgorithm):
    """Steps in the metric of q, with any control; what `NaturalGradient` builds.

    Args:
        objective: the negative ELBO of a mean field.
        control: the zero-mean correction of its gradient.
        sampler: which data a step sees.
        slack: how many times the theory's step is tried first.
        rate: one γ for all coordinates in the place of the theory's; then nothing is measured or guarded.
        decay: γ falls as 1/(1 + decay·epoch).
        guard_draws: draws of ε in the guard's look at the full data.
        products: Hessian products, a pass over the data each, that a Newton step before epoch e may take: so many
            times e + 1, so that they cost no more than the epochs. 0 for no such steps.
    """

    objective: Elbo
    control: AbstractControl
    sampler: AbstractSampler
    slack: float = 2.0
    rate: float | None = None
    decay: float = 0.0
    guard_draws: int = eqx.field(static=True, default=4)
    products: int = eqx.field(static=True, default=4)

    def __check_init__(self):
        check_type("objective", self.objective, Elbo, "Use jointcv.assemble(problem, ...)[0].")
        check_type(
            "control", self.control, AbstractControl, "Use JointCV(), MonteCarloCV(), NaiveGradient() …"
        )
        check_parts(self.objective, self.sampler, self.control)
        _check_steps("NaturalDescent", self.slack, self.rate, self.decay)

    def init(self, key):
        start_key, settle_key = jax.random.split(key)
        position, average = self._settle(self.objective.init(start_key), settle_key)
        params = position.params
        memory, table = self.control.memory.init(self.objective, params, self.sampler)
        dtype = params.location.dtype
        guard = Guard(
            position=position,
            values=jnp.zeros(self.guard_draws, dtype),
            slack=jnp.asarray(self.slack, dtype),
            halvings=jnp.zeros((), jnp.int32),
            products=jnp.zeros((), jnp.int32),
            broken=jnp.zeros((), bool),
        )
        rate = jnp.zeros_like(params.location)
        state = NaturalState(position, memory, average, rate, unmeasured(params), guard, jnp.zeros((), dtype))
        return state, table

    def open(self, table, schedule):
        return self.control.memory.open(table, schedule)

    def renew(self, state, table, step):
        state = self._recount(state, table)
        epoch = step // self.sampler.steps_per_epoch(self.objective.num_data)
        if self.rate is not None:
            rate = jnp.full_like(state.rate, self.rate) / (1 + self.decay * epoch.astype(state.rate.dtype))
            return eqx.tree_at(lambda s: s.rate, state, rate), table
        state = self._look_back(state, epoch)
        state, table = jax.lax.cond(
            (epoch & (epoch - 1)) == 0,  # epochs 0, 1, 2, 4, 8, ...
            lambda state, table: self._take_stock(state, epoch),
            lambda state, table: (state, table),
            *(state, table),
        )
        rate = jnp.minimum(state.guard.slack * state.smoothness.step, 1)
        return eqx.tree_at(lambda s: s.rate, state, rate), table

    def step(self, state, shared, row, batch, key):
        objective, params = self.objective, state.position.params
        draws = objective.draw(key, params, batch.data)
        recall = self.control.memory.read(state.memory, shared, row, objective, params, batch)
        loss, gradient, correction = controlled_gradient(
            objective, self.control, recall, params, batch, draws
        )
        controlled = jax.tree.map(jnp.add, gradient, correction)
        change = self.control.memory.change(recall, objective, params, batch)
        gradient, change = objective.pull_both(controlled, change, params, batch.data, draws)
        memory, row = self.control.memory.write(recall, change, objective, params, batch)

        target, average = self._curvature(state, memory, params, batch, draws)
        precision, corrected = move_precision(state.position.precision, target, state.rate)
        location = state.position.location - state.rate * gradient.location / precision

        norm = optax.tree.norm(gradient.location)
        position = Position(location, precision)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & objective.admits(position.params)
        go_on = finite & ~state.guard.broken if self.rate is None else finite
        position = choose(go_on, position, state.position)
        guard = eqx.tree_at(lambda guard: guard.broken, state.guard, ~go_on)
        moved = NaturalState(position, memory, average, state.rate, state.smoothness, guard, state.drift)
        notes = {
            "rate": jnp.median(state.rate) if self.rate is None else state.rate[0],
            "corrected": corrected,
        }
        notes |= {"halvings": guard.halvings, "products": guard.products}
        notes |= {"drift": state.drift, "epoch_elbo": -jnp.mean(guard.values)}
        # A step that is not finite is the guard's to take back, if it has a place where the objective is finite.
        guarded = jnp.all(jnp.isfinite(guard.values)) & (self.rate is None)
        return moved, row, Info(loss, norm, finite | guarded, notes)

    def close(self, table, schedule, rows):
        return self.control.memory.close(table, schedule, rows)

    def keep(self, moved, state, alive):
        position = choose(alive, moved.position, state.position)
        return eqx.tree_at(lambda state: state.position, moved, position)

    def params(self, state):
        return state.position.params

    def result(self, state):
        if self.rate is not None:
            return state.position.params
        return self._look_back(state, jnp.ones((), jnp.int32)).position.params

    def _settle(self, params: MeanFieldParams, key) -> tuple[Position, Float[Array, " dim"]]:
        """The precision that suits the first location: a few rounds of s ← h, each a pass over the data."""
        objective = self.objective
        position = Position(params.location, jnp.exp(-2 * params.log_scale))
        for round_key in jax.random.split(key, SETTLING_ROUNDS):
            params = position.params
            noise = jax.random.normal(round_key, params.location.shape, params.location.dtype)
            data_part, floor = self._pass_curvature(params, round_key)
            target = data_part + objective.prior.curvature(params, noise)
            floor = position.precision if floor is None else floor
            position = Position(params.location, jnp.where(target > floor, target, floor))
        return position, data_part

    def _pass_curvature(self, params: MeanFieldParams, key):
        """The data's part of h from one pass; and its root mean square over the minibatches, where each has its own.

        At a saddle h may be nothing or less where minibatches are curved. A precision that followed it there would
        make one coordinate so much wider than the others that its curvature in the metric holds back all of them.
        """
        objective = self.objective
        schedule = self.sampler.sweep(objective.num_data)
        summary = full_summary(objective, params, schedule)
        if summary.curvature is not None:
            return summary.curvature, None

        def add(total, step):
            batch = take_batch(objective, step, 0, params.location.dtype)
            draws = objective.draw(jax.random.fold_in(key, step.unit), params, batch.data)
            excess = objective.noise.excess(objective.view, params, batch.data, batch.weights, draws.data)
            share = jnp.sum(batch.share)
            return (total[0] + share * excess, total[1] + share * excess**2), None

        zeros = jnp.zeros_like(params.location)
        (mean, square), _ = jax.lax.scan(add, (zeros, zeros), schedule)
        return mean, jnp.sqrt(square)

    def _curvature(self, state, memory, params, batch, draws):
        """h, and the running average that stands in for a memory of it."""
        objective = self.objective
        summary = self.control.memory.summary(memory)
        if summary is None:
            entry = objective.remember(params, batch.data)
            summary = objective.summarise(entry, batch.data, batch.weights)
        excess = objective.noise.excess(objective.view, params, batch.data, batch.weights, draws.data)
        prior = objective.prior.curvature(params, draws.prior)
        if summary.curvature is not None:
            return summary.curvature + excess + prior, state.average
        weight = 1 / self.sampler.steps_per_epoch(objective.num_data)
        average = state.average + weight * (excess - state.average)
        return average + prior, average

    def _recount(self, state: NaturalState, table) -> NaturalState:
        """The running mean summed anew, and how far it had drifted."""
        before = self.control.memory.summary(state.memory)
        memory = self.control.memory.recount(state.memory, table, self.objective, self.sampler)
        after = self.control.memory.summary(memory)
        if before is None:
            return state
        drift = jnp.linalg.norm(after.gradient - before.gradient)
        scale = optax.tree.norm(after) + jnp.finfo(drift.dtype).tiny
        return eqx.tree_at(lambda s: (s.memory, s.drift), state, (memory, drift / scale))

    def _take_stock(self, state: NaturalState, epoch: Int[Scalar, ""]) -> tuple[NaturalState, PyTree[Array]]:
        """A Newton step, all data seen anew where it leads, and the steps that theory allows there."""
        if self.products and isinstance(self.objective.view, LinearView):
            state = self._leap(state, epoch)
        params = state.position.params
        memory, table = self.control.memory.init(self.objective, params, self.sampler)
        rounds = jnp.where(epoch == 0, FIRST_ROUNDS, ROUNDS)
        smoothness = measure(self.objective, self.sampler, params, state.smoothness, rounds)
        return eqx.tree_at(lambda s: (s.memory, s.smoothness), state, (memory, smoothness)), table

    def _leap(self, state: NaturalState, epoch: Int[Scalar, ""]) -> NaturalState:
        """As much of a Newton step as the objective falls by, of these fractions; none if it does not."""
        guard, position = state.guard, state.position
        key = jax.random.fold_in(jax.random.key(1), epoch)
        newton = newton_step(self.objective, position.params, key, self.products * (epoch + 1))

        def shorten(carry, fraction):
            best, values, found = carry
            tried = Position(position.location + fraction * newton.step, position.precision)
            tried_values = self._full_values(tried)
            mean, error = self._change(guard.values, tried_values)
            fell = (mean + error < 0) & ~found
            better = choose(fell, (tried, tried_values), (best, values))
            return (*better, found | fell), None

        # The guard's values are those of this position.
        start = (position, guard.values, jnp.zeros((), bool))
        fractions = jnp.asarray(FRACTIONS, guard.values.dtype)
        (position, values, _), _ = jax.lax.scan(shorten, start, fractions)
        products = guard.products + newton.products
        guard = Guard(position, values, guard.slack, guard.halvings, products, guard.broken)
        return eqx.tree_at(lambda s: (s.position, s.guard), state, (position, guard))

    def _full_values(self, position: Position) -> Float[Array, " draws"]:
        """The objective on all data, for draws that are always the same."""
        chunk_size = min(GUARD_CHUNK, self.objective.num_data)
        return full_values(
            self.objective,
            position.params,
            jax.random.key(0),
            num_draws=self.guard_draws,
            chunk_size=chunk_size,
        )

    def _change(self, before: Float[Array, " draws"], after: Float[Array, " draws"]) -> tuple[Scalar, Scalar]:
        """Mean and standard error, over the draws, of how the objective has changed."""
        change = after - before
        error = jnp.std(change, ddof=1) / self.guard_draws**0.5 if self.guard_draws > 1 else 0.0
        return jnp.mean(change), jnp.asarray(error, change.dtype)

    def _look_back(self, state: NaturalState, epoch: Int[Scalar, ""]) -> NaturalState:
        """Take the epoch back and halve the slack where the full-data objective rose beyond its noise."""
        values, guard = self._full_values(state.position), state.guard
        change, error = self._change(guard.values, values)
        rounding = 10 * jnp.finfo(values.dtype).eps * jnp.abs(jnp.mean(values))
        rose = ~(change <= 3 * error + rounding) & (epoch > 0)
        back = rose | guard.broken
        best = jax.tree.map(
            lambda old, new: jnp.where(back, old, new),
            (guard.position, guard.values),
            (state.position, values),
        )
        position, values = best
        halvings = guard.halvings + back.astype(guard.halvings.dtype)
        growth = 2 ** (1 / (2 * (1 + halvings.astype(values.dtype))))
        wider = jnp.where(epoch > 0, jnp.minimum(guard.slack * growth, MOST_SLACK), guard.slack)
        slack = jnp.where(back, guard.slack / 2, wider)
        broken = jnp.zeros((), bool)
        guard = Guard(position, values, slack, halvings, guard.products, broken)
        return eqx.tree_at(lambda s: (s.position, s.guard), state, (position, guard))


class NaturalGradient(eqx.Module):
    """Natural steps in the place of an optimiser: `jcv.fit(problem, optimizer=jcv.NaturalGradient(), key=key)`.

    Args:
        slack: how many times the theory's step is tried first; halved behind the guard when it is too much.
        rate: a step set by hand, without measurement and guard.
        decay: for a step set by hand: it falls as 1/(1 + decay·epoch).
        products: Hessian products, a pass over the data each, that a Newton step before epoch e = 0, 1, 2, 4, 8, …
            may take: so many times e + 1, so that they cost no more than the epochs. 0 for no such steps.
    """

    slack: float = 2.0
    rate: float | None = None
    decay: float = 0.0
    products: int = eqx.field(static=True, default=4)

    def __check_init__(self):
        _check_steps("NaturalGradient", self.slack, self.rate, self.decay)
        check_count("NaturalGradient(products=...): products", self.products, "Hessian products", least=0)

    def build(self, objective: Elbo, control: AbstractControl, sampler: AbstractSampler) -> NaturalDescent:
        """The algorithm for an objective."""
        return NaturalDescent(
            objective=objective,
            control=control,
            sampler=sampler,
            slack=self.slack,
            rate=self.rate,
            decay=self.decay,
            products=self.products,
        )


def _check_steps(kind: str, slack, rate, decay) -> None:
    for name, value in (("slack", slack), ("decay", decay), *((("rate", rate),) if rate is not None else ())):
        check_number(
            f"{kind}({name}=...): {name}", as_static(value), "Leave it out, or use a positive number."
        )
    if slack <= 0:
        raise ValueError(f"{kind}(slack={slack}) is no step. Use a positive number.")
    if rate is not None and not 0 < rate <= 1:
        raise ValueError(f"{kind}(rate={rate}) does not lie in (0, 1]. Leave it out, or use a smaller step.")
    if decay < 0:
        raise ValueError(f"{kind}(decay={decay}) would let the step grow. Use 0 or more.")


def move_precision(precision, target, rate):
    """(1−γ) s + γ h where h is positive, and a rule that stays so where it is not; how often it was not.

    s + γ(h − s) + γ²(h − s)²/(2s) is the improved Bayesian learning rule of Lin, Schmidt and Khan (2020).
    """
    change = rate * (target - precision)
    negative = target <= 0
    second = jnp.where(negative, change**2 / (2 * precision), 0)
    return precision + change + second, jnp.sum(negative)


def suits(objective, control: AbstractControl) -> bool:
    """Whether natural steps are the default: a linear view of the data, and a memory that tells their curvature."""
    return (
        isinstance(objective.view, LinearView)
        and objective.view.has_squares
        and objective.view.is_curved
        and not isinstance(objective.noise, PaperNoise)
        and not isinstance(control.memory, NoMemory | WholeTable)
    )
