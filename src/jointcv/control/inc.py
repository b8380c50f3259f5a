"""inc:   ∇f(w; n, ε) + (1/N) Σ_m ∇f(w^m; m, ε) − ∇f(w^n; n, ε)

Controls the noise of n, with the same ε everywhere: a pass over all data at every step. Its variance can never get
below V_ε[∇f(w; ε)].
"""

import jax
import jax.numpy as jnp

from jointcv.checks import check_type
from jointcv.control.interface import AbstractControl
from jointcv.memory import WholeTable


class SubsamplingCV(AbstractControl):
    """Control of the subsampling noise alone, by the gradients at the places where the data were last seen."""

    memory: WholeTable = WholeTable()

    def __check_init__(self):
        check_type(
            "SubsamplingCV(memory=...)",
            self.memory,
            WholeTable,
            "It needs all data at hand: use WholeTable().",
        )

    def correct(self, objective, recall, params, batch, draws):
        everywhere = jnp.full(objective.num_data, 1 / objective.num_data, batch.weights.dtype)
        mean = objective.gradient(recall.table, params, objective.data, everywhere, draws)
        mean = objective.lift(objective.pull(mean, params, objective.data, draws))
        here = objective.gradient(recall.entry, params, batch.data, batch.weights, draws)
        return jax.tree.map(jnp.subtract, mean, here)
