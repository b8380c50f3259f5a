"""ens:   ∇f(w; n, ε) + β c_cv + (1 − β) c_inc

With perfect parts ∇f + c_cv = ∇f(w; n) and ∇f + c_inc = ∇f(w; ε). The estimator is their weighted mean, and as n and
ε are independent

    V = β² V_n[∇f(w; n)] + (1 − β)² V_ε[∇f(w; ε)]

which is never below V_n V_ε / (V_n + V_ε): a mixture of two partial controls cannot control both sources.
"""

import equinox as eqx
import jax

from jointcv.checks import check_type
from jointcv.control.cv import MonteCarloCV
from jointcv.control.inc import SubsamplingCV
from jointcv.control.interface import AbstractControl
from jointcv.memory import WholeTable


class EnsembleCV(AbstractControl):
    """A weighted mean of the two partial controls.

    Args:
        weight: β in [0, 1]; 1 is `cv`, 0 is `inc`.
    """

    weight: float = eqx.field(static=True, default=0.5)
    memory: WholeTable = WholeTable()

    def __check_init__(self):
        if not isinstance(self.weight, int | float) or not 0 <= self.weight <= 1:
            raise ValueError(
                f"EnsembleCV(weight={self.weight!r}) does not lie in [0, 1]. Use 1 for cv, 0 for inc, or between."
            )

        check_type(
            "EnsembleCV(memory=...)", self.memory, WholeTable, "It needs all data at hand: use WholeTable()."
        )

    def correct(self, objective, recall, params, batch, draws):
        for_noise = MonteCarloCV().correct(objective, recall, params, batch, draws)
        for_data = SubsamplingCV().correct(objective, recall, params, batch, draws)
        return jax.tree.map(lambda cv, inc: self.weight * cv + (1 - self.weight) * inc, for_noise, for_data)
