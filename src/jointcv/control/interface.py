"""A control is a formula: what to add to ∇f(w; n, ε), with mean zero over n and ε."""

from abc import abstractmethod
from typing import Any

import equinox as eqx

from jointcv.memory import Recall
from jointcv.objective import AbstractObjective, Cotangent, Draws, Params
from jointcv.sampler import Batch


class AbstractControl(eqx.Module):
    """A zero-mean correction; what it remembers of the data is the business of its
    memory, an `AbstractMemory` (None: `fit` chooses)."""

    memory: eqx.AbstractVar[Any]

    @abstractmethod
    def correct(
        self, objective: AbstractObjective, recall: Recall, params: Params, batch: Batch, draws: Draws
    ) -> Cotangent:
        """What to add to the gradient of this batch with this noise, as a cotangent like that gradient itself.

        Args:
            objective: f and its approximation f~.
            recall: what the memory says of the batch.
            params: the current w.
            batch: the data and their weights.
            draws: the step's ε, the one that the gradient has.
        """
