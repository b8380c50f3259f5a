"""What a task's json file says of its rows: what is true of all, and which run wrote which of them."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from jointcv.paper.estimators import Setting
from jointcv.paper.files import add_run, surroundings
from jointcv.paper.tasks import Budget, Task

COMMON_NOTES = (
    "elbo is that of the full data, with exact expectations (quadrature) for one predictor a datum, noise in "
    "the predictors for more, and the prior in closed form; PPCA draws z. Draws are common to all runs",
    "runs of one seed share minibatches and noise across step sizes",
    "an epoch of a full-batch estimator is one step; the natural gradient's step size stands as 0",
    "milliseconds are processor time of a run alone, not vmapped, on one core: the median of three "
    "repetitions and their range. Processor time, because the machine is shared",
    "variance rows: trace_location and trace_scale are the estimator's at its own place after so many steps, "
    "at its best step size; v_total, v_data and v_noise are V_{n,eps}, V_n and V_eps of the naive gradient "
    "of the location there; small differences of V_n between rows are sampling noise",
    "inc and ens run on small tasks only: each step is a pass over all data",
    "oracle calls: gradients and Hessian products a step over data; f~ counts once",
)


@dataclasses.dataclass(frozen=True)
class Record:
    """The json file of a task that runs with a budget."""

    path: Path
    task: Task
    budget_name: str
    budget: Budget
    setting: Setting

    def add(
        self, stage: str, estimator: str, began: float, step_sizes: Sequence[float], seeds: Sequence[int]
    ) -> None:
        """Say that a stage has written an estimator's rows.

        Args:
            stage: of the run.
            estimator: whose rows.
            began: the time by `time.perf_counter` when it set out.
            step_sizes: of the rows.
            seeds: of the rows.
        """
        run = surroundings() | {
            "stage": stage,
            "budget": self.budget_name,
            "configuration": dataclasses.asdict(self.budget),
            "estimators": {estimator: {"step_sizes": list(step_sizes), "seeds": list(seeds)}},
            "seconds": round(time.perf_counter() - began, 1),
        }
        add_run(self.path, self._facts(), run)

    def _facts(self) -> dict:
        problem = self.setting.problem
        return {
            "task": self.task.name,
            "num_data": problem.num_data,
            "dim": problem.dim,
            "batch": self.setting.batch,
            "natural_batch": self.setting.natural_batch,
            "optimizer": self.task.optimizer.__name__,
            "dtype": str(problem.dtype),
            "notes": [*self.task.notes, *COMMON_NOTES],
        }
