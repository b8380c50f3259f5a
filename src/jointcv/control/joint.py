"""joint:   ∇f(w; n, ε) + (1/N) Σ_m E_ε ∇f~(w^m; m, ε) − ∇f~(w^n; n, ε)

The running mean and w^n come from the memory: a table is the SAGA form, an anchor the SVRG form. Both sources of
noise are controlled, and V = V_{n,ε}[∇f(w; n, ε) − ∇f~(w^n; n, ε)] has no floor.
"""

import jax
import jax.numpy as jnp

from jointcv.checks import check_type
from jointcv.control.interface import AbstractControl
from jointcv.memory import AbstractMemory


class JointCV(AbstractControl):
    """Control of the Monte Carlo and the subsampling noise at once.

    Args:
        memory: where each datum was last seen: `PerDatum()`, `PerBatch()`, `Snapshots()` or `Anchor()`;
            chosen by `fit` where it is not given.
    """

    memory: AbstractMemory | None = None

    def __check_init__(self):
        remedy = "Pass a memory such as JointCV(PerDatum()), or none to have one chosen."
        check_type("JointCV(memory=...)", self.memory, AbstractMemory | None, remedy)

    def correct(self, objective, recall, params, batch, draws):
        expected = objective.expected(recall.mean, params)
        sampled = objective.sampled(recall.entry, params, batch.data, batch.weights, draws)
        return jax.tree.map(jnp.subtract, expected, sampled)
