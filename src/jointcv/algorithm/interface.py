"""An algorithm: a state, a table that grows with the data, and a step."""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Scalar

from jointcv.checks import check_type
from jointcv.control import AbstractControl
from jointcv.objective import AbstractObjective, Params
from jointcv.sampler import AbstractSampler, Batch, Schedule

State = PyTree[Array]
Table = PyTree[Array]
Rows = PyTree[Array]


class Info(eqx.Module):
    """What a step tells: its estimate of the objective, the norm of its gradient, whether it was finite, and notes."""

    loss: Float[Scalar, ""]
    gradient_norm: Float[Scalar, ""]
    finite: Bool[Scalar, ""]
    notes: dict[str, Array] = eqx.field(default_factory=dict)


class AbstractAlgorithm(eqx.Module):
    """A rule that moves parameters. The table stays out of the compiled loop's carry; see `jointcv.memory`."""

    objective: eqx.AbstractVar[AbstractObjective]
    sampler: eqx.AbstractVar[AbstractSampler]

    @abstractmethod
    def init(self, key: Key[Array, ""]) -> tuple[State, Table]:
        """The first state and table."""

    @abstractmethod
    def open(self, table: Table, schedule: Schedule) -> tuple[Table, Rows]:
        """What coming steps of one epoch share of the table, and a row for each."""

    @abstractmethod
    def step(
        self, state: State, shared: Table, row: Rows, batch: Batch, key: Key[Array, ""]
    ) -> tuple[State, Rows, Info]:
        """One step."""

    @abstractmethod
    def close(self, table: Table, schedule: Schedule, rows: Rows) -> Table:
        """The steps' rows back in the table."""

    @abstractmethod
    def renew(self, state: State, table: Table, step: Int[Scalar, ""]) -> tuple[State, Table]:
        """What is due once an epoch, before its first step."""

    @abstractmethod
    def keep(self, moved: State, state: State, alive: Bool[Scalar, ""]) -> State:
        """`moved` while the run is alive; after that, at least the last good parameters, and for good."""

    @abstractmethod
    def params(self, state: State) -> Params:
        """The parameters that a state stands for."""

    def result(self, state: State) -> Params:
        """The parameters to hand out when a run ends here."""
        return self.params(state)


def check_parts(
    objective: AbstractObjective, sampler: AbstractSampler, control: AbstractControl | None
) -> None:
    """ValueError where an algorithm is made of what does not go together; `control` is None where it has none."""
    check_type("objective", objective, AbstractObjective, "Use jointcv.assemble(problem, ...)[0].")
    check_type("sampler", sampler, AbstractSampler, "Use Reshuffle(100), FixedBatches(100) …")
    if sampler.batch_size is not None and sampler.batch_size > objective.num_data:
        raise ValueError(
            f"sampler={sampler!r} wants more than the data (N = {objective.num_data}). Use at most N a batch."
        )
    if control is not None:
        if control.memory is None:
            raise ValueError("control=JointCV() has no memory. Say which, such as JointCV(PerDatum()).")
        control.memory.check(sampler)


def choose(alive: Bool[Scalar, ""], moved: PyTree[Array], state: PyTree[Array]) -> PyTree[Array]:
    """`moved` where the run is alive, else `state`."""
    return jax.tree.map(lambda new, old: jnp.where(alive, new, old), moved, state)
