"""ens:   ∇f(w; n, ε) + β c_cv + (1 − β) c_inc

With perfect parts, V = (1 − β)² V[∇f_cv's noise that inc leaves] + β² V[the noise that cv leaves]: a mixture of two
partial controls cannot control both sources.
"""

import equinox as eqx
import jax

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
        if not 0 <= self.weight <= 1:
            raise ValueError(f"EnsembleCV(weight={self.weight}) must lie in [0, 1].")

    def correct(self, objective, recall, params, batch, draws):
        for_noise = MonteCarloCV().correct(objective, recall, params, batch, draws)
        for_data = SubsamplingCV().correct(objective, recall, params, batch, draws)
        return jax.tree.map(lambda cv, inc: self.weight * cv + (1 - self.weight) * inc, for_noise, for_data)
