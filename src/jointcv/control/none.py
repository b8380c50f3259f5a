"""naive:   ∇f(w; n, ε) as it is."""

import jax
import jax.numpy as jnp

from jointcv.control.interface import AbstractControl
from jointcv.memory import NoMemory


class NaiveGradient(AbstractControl):
    """No control: both kinds of noise."""

    memory: NoMemory = NoMemory()

    def correct(self, objective, recall, params, batch, draws):
        return objective.lift(jax.tree.map(jnp.zeros_like, params))
