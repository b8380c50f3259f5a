"""cv:   ∇f(w; n, ε) + E_ε ∇f~(w; n, ε) − ∇f~(w; n, ε)

Controls the noise of ε. Its variance can never get below V_n[∇f(w; n)].
"""

import jax
import jax.numpy as jnp

from jointcv.control.interface import AbstractControl
from jointcv.memory import NoMemory


class MonteCarloCV(AbstractControl):
    """Control of the Monte Carlo noise alone, by the approximation at the current parameters."""

    memory: NoMemory = NoMemory()

    def correct(self, objective, recall, params, batch, draws):
        entry = objective.remember(params, batch.data)
        expected = objective.expected(objective.summarise(entry, batch.data, batch.weights), params)
        sampled = objective.sampled(entry, params, batch.data, batch.weights, draws)
        return jax.tree.map(jnp.subtract, expected, sampled)
