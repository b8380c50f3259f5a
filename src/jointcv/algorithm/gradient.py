"""Stochastic gradient descent with a control:  w ← w + optimizer(∇f(w; n, ε) + c)."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jointcv.algorithm.interface import AbstractAlgorithm, Info, check_parts, choose
from jointcv.checks import check_count, check_type
from jointcv.control import AbstractControl
from jointcv.evaluate import float_type
from jointcv.objective import AbstractObjective, Cotangent, Params
from jointcv.sampler import AbstractSampler, Batch


class DescentState(eqx.Module):
    """What the next step needs."""

    params: Params
    optimizer: PyTree[Array]
    memory: PyTree[Array]


class GradientDescent(AbstractAlgorithm):
    """Any control with any optax optimiser.

    Args:
        objective: what is minimised.
        control: the zero-mean correction of its gradient.
        sampler: which data a step sees.
        optimizer: an optax transformation.
        naive_steps: the first steps go without correction while the memory fills (the paper's first epoch).
    """

    objective: AbstractObjective
    control: AbstractControl
    sampler: AbstractSampler
    optimizer: optax.GradientTransformation = eqx.field(static=True)
    naive_steps: int = 0

    def __check_init__(self):
        check_type(
            "control", self.control, AbstractControl, "Use JointCV(), MonteCarloCV(), NaiveGradient() …"
        )
        check_type(
            "optimizer", self.optimizer, optax.GradientTransformation, "Use optax.sgd(1e-3) or another."
        )
        check_count("naive_steps", self.naive_steps, "steps", least=0)
        check_parts(self.objective, self.sampler, self.control)

    def init(self, key):
        params = self.objective.init(key)
        memory, table = self.control.memory.init(self.objective, params, self.sampler)
        return DescentState(params, self.optimizer.init(params), memory), table

    def open(self, table, schedule):
        return self.control.memory.open(table, schedule)

    def step(self, state, shared, row, batch, key):
        params = state.params
        recall = self.control.memory.read(state.memory, shared, row, self.objective, params, batch)
        draws = self.objective.draw(key, params, batch.data)
        loss, gradient, correction = controlled_gradient(
            self.objective, self.control, recall, params, batch, draws
        )
        gradient = add_after(self.naive_steps, batch, gradient, correction)
        change = self.control.memory.change(recall, self.objective, params, batch)
        gradient, change = self.objective.pull_both(gradient, change, params, batch.data, draws)
        optimizer = optax.with_extra_args_support(self.optimizer)
        updates, optimizer = optimizer.update(gradient, state.optimizer, params, value=loss)
        memory, row = self.control.memory.write(recall, change, self.objective, params, batch)
        moved = DescentState(optax.apply_updates(params, updates), optimizer, memory)
        norm = optax.tree.norm(gradient)
        return moved, row, Info(loss, norm, jnp.isfinite(loss) & jnp.isfinite(norm))

    def close(self, table, schedule, rows):
        return self.control.memory.close(table, schedule, rows)

    def renew(self, state, table, step):
        return state, table

    def keep(self, moved, state, alive):
        # The optimiser and the memory of a dead run are of no use: to keep them would copy them every step.
        return DescentState(choose(alive, moved.params, state.params), moved.optimizer, moved.memory)

    def params(self, state):
        return state.params


def controlled_gradient(objective: AbstractObjective, control, recall, params: Params, batch: Batch, draws):
    """The step's estimate of f; and ∇f(w; n, ε) and the control's correction, as cotangents."""
    entry = objective.remember(params, batch.data)
    loss = objective.value(entry, params, batch.data, batch.weights, draws) + objective.rest(params, draws)
    gradient = objective.gradient(entry, params, batch.data, batch.weights, draws)
    return loss, gradient, control.correct(objective, recall, params, batch, draws)


def add_after(naive_steps: int, batch: Batch, gradient: Cotangent, correction: Cotangent) -> Cotangent:
    """The gradient, corrected once the naive steps are over."""
    active = (batch.step >= naive_steps).astype(float_type(gradient))
    return jax.tree.map(lambda gradient, correction: gradient + active * correction, gradient, correction)
