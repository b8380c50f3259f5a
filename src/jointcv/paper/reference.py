"""The paper's own numbers and settings, to stand beside ours.

Wang, Geffner and Domke, "Joint control variate for faster black-box variational inference" (AISTATS 2024).
Times are of one RTX 2080 Ti.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

FLOAT_BYTES = 4.0
MNIST_TARGET = -2.5e4
MNIST_TARGET_SECONDS: Mapping[str, float] = MappingProxyType({"joint": 300.0, "naive": 600.0, "cv": 600.0})

ESTIMATORS = (
    "naive",
    "cv",
    "inc",
    "ens",
    "joint",
    "joint-svrg",
    "smiso",
    "full-naive",
    "full-cv",
    "ours",
    "natural",
)

# Best first; also by what its Table 1 says of the noise that is left.
ORDER = ("joint", "cv", "naive")

VARIANCE_BOUNDS: Mapping[str, str] = MappingProxyType(
    {
        "naive": "V_{n,ε}",
        "cv": "V_n",
        "inc": "V_ε",
        "ens": "β²V_n + (1−β)²V_ε",
        "joint": "none",
        "joint-svrg": "none",
        "smiso": "none (biased)",
        "full-naive": "V_ε",
        "full-cv": "none",
        "ours": "none",
        "natural": "none",
    }
)


@dataclass(frozen=True)
class Variances:
    """One row of Table 1: the trace of the gradient's variance at the end point of the optimisation.

    Attributes:
        total: V_{n,ε}[∇f(w; n, ε)], of the naive gradient.
        data: V_n[∇f(w; n)], what cv cannot go below.
        noise: V_ε[∇f(w; ε)], what inc cannot go below.
    """

    total: float
    data: float
    noise: float


@dataclass(frozen=True)
class PaperTask:
    """A task as the paper has it.

    Attributes:
        name: as in the names of files.
        title: as in captions.
        num_data: N.
        num_dims: D, the size of z.
        view_size: K, what one datum sees of z through a linear map; None where it sees all.
        batch_size: data a step.
        optimizer: of the main figures.
        runs: seeds.
        variances: the row of Table 1.
        milliseconds: a step's time by estimator, from Table 3.
    """

    name: str
    title: str
    num_data: int
    num_dims: int | None
    view_size: int | None
    batch_size: int
    optimizer: str
    runs: int | None
    variances: Variances | None = None
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def paper_bytes(self) -> float:
        """The paper's table: a location for every datum."""
        return math.nan if self.num_dims is None else FLOAT_BYTES * self.num_data * self.num_dims

    @property
    def our_bytes(self) -> float:
        """Ours: the view of every datum, else a location for every fixed minibatch."""
        if self.num_dims is None:
            return math.nan
        if self.view_size is not None:
            return FLOAT_BYTES * self.num_data * self.view_size
        return FLOAT_BYTES * math.ceil(self.num_data / self.batch_size) * self.num_dims


def _milliseconds(**times: float) -> Mapping[str, float]:
    return MappingProxyType({name.replace("_", "-"): time for name, time in times.items()})


TASKS: Mapping[str, PaperTask] = MappingProxyType(
    {
        task.name: task
        for task in (
            PaperTask("sonar", "Sonar", 208, 60, 1, 5, "SGD", 10, Variances(4.04e4, 2.02e4, 1.16e4)),
            PaperTask(
                "australian", "Australian", 690, 14, 1, 5, "SGD", 10, Variances(9.16e4, 8.61e4, 2.07e3)
            ),
            PaperTask(
                "mnist",
                "MNIST",
                60_000,
                7_840,
                10,
                100,
                "Adam",
                5,
                Variances(4.21e8, 3.21e8, 1.75e4),
                _milliseconds(naive=10.4, cv=12.8, inc=328.0, joint=17.6, full_naive=201.0, full_cv=360.0),
            ),
            PaperTask(
                "ppca",
                "PPCA",
                60_000,
                12_544,
                None,
                100,
                "Adam",
                5,
                Variances(1.69e10, 1.68e10, 3.73e7),
                _milliseconds(naive=12.8, cv=18.5, inc=897.0, joint=31.2, full_naive=740.0, full_cv=1606.0),
            ),
            PaperTask(
                "tennis",
                "Tennis",
                169_405,
                5_525,
                1,
                100,
                "Adam",
                5,
                Variances(9.96e7, 9.59e7, 8.56e4),
                _milliseconds(naive=10.2, cv=14.6, inc=588.0, joint=29.6, full_naive=203.0, full_cv=246.0),
            ),
            PaperTask(
                "movielens",
                "MovieLens",
                100_000,
                85_050,
                5,
                100,
                "Adam",
                5,
                Variances(1.78e9, 1.69e9, 1.75e6),
                _milliseconds(naive=16.3, cv=19.6, joint_svrg=24.4, full_naive=267.0, full_cv=702.0),
            ),
            PaperTask("dropout", "Dropout on CIFAR-10", 50_000, None, None, 100, "SGD", None),
        )
    }
)
