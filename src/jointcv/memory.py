"""Where each datum was last seen, and the running mean over the data of what the mean of f~ depends on.

    read    (entry of each datum in the batch, mean)
    change  (1/N) Σ_{n in batch} [summary(now) − summary(entry)]
    write   mean ← mean + change,   entry ← now

A memory knows indices and places, not gradients: `objective.remember` and `objective.summarise` say what is kept.
Its *table* grows with the data and stays out of the compiled loop's carry: rows for the coming steps are taken out
before the loop (`open`), go through it, and are put back after it (`close`).
"""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jointcv.checks import check_count
from jointcv.evaluate import float_type, full_summary, take_batch, zero_summary
from jointcv.objective import AbstractObjective, Params
from jointcv.sampler import AbstractSampler, Batch, FixedBatches, Reshuffle, Schedule

State = PyTree[Array]
Table = PyTree[Array]
Rows = PyTree[Array]


class Recall(eqx.Module):
    """What a memory says of a batch.

    Attributes:
        entry: what is remembered of the batch's data.
        mean: the mean summary over all data, each at its own remembered place.
        place: where a memory without a table stands; None otherwise.
        table: every datum's entry, from a memory that has them all at hand; None otherwise.
    """

    entry: PyTree[Array]
    mean: PyTree[Array]
    place: PyTree[Array] = None
    table: PyTree[Array] = None


class AbstractMemory(eqx.Module):
    """Index → where the datum was last seen."""

    @abstractmethod
    def check(self, sampler: AbstractSampler) -> None:
        """ValueError where this memory cannot follow the sampler."""

    @abstractmethod
    def init(
        self, objective: AbstractObjective, params: Params, sampler: AbstractSampler
    ) -> tuple[State, Table]:
        """Every datum seen once at the first parameters."""

    @abstractmethod
    def open(self, table: Table, schedule: Schedule) -> tuple[Table, Rows]:
        """What coming steps of one epoch share, and a row for each."""

    @abstractmethod
    def read(
        self,
        state: State,
        shared: Table,
        row: Rows,
        objective: AbstractObjective,
        params: Params,
        batch: Batch,
    ) -> Recall:
        """What is remembered of the batch."""

    @abstractmethod
    def change(
        self, recall: Recall, objective: AbstractObjective, params: Params, batch: Batch
    ) -> PyTree[Array]:
        """What seeing the batch now changes in the running mean, before its pull-back."""

    @abstractmethod
    def write(
        self,
        recall: Recall,
        change: PyTree[Array],
        objective: AbstractObjective,
        params: Params,
        batch: Batch,
    ) -> tuple[State, Rows]:
        """The batch as it is seen now, with that change after its pull-back."""

    @abstractmethod
    def close(self, table: Table, schedule: Schedule, rows: Rows) -> Table:
        """The steps' rows back in the table."""

    @abstractmethod
    def recount(
        self, state: State, table: Table, objective: AbstractObjective, sampler: AbstractSampler
    ) -> State:
        """The running mean summed anew from the table, if that is as cheap as an epoch: in float32 it drifts."""

    @abstractmethod
    def summary(self, state: State) -> PyTree[Array]:
        """The running mean; None of a memory that has none."""


class NoMemory(AbstractMemory):
    """Nothing is remembered: for controls that do not look back."""

    def check(self, sampler):
        pass

    def init(self, objective, params, sampler):
        return None, None

    def open(self, table, schedule):
        return None, None

    def read(self, state, shared, row, objective, params, batch):
        return Recall(None, None)

    def change(self, recall, objective, params, batch):
        return None

    def write(self, recall, change, objective, params, batch):
        return None, None

    def close(self, table, schedule, rows):
        return None

    def recount(self, state, table, objective, sampler):
        return None

    def summary(self, state):
        return None


class PerDatum(AbstractMemory):
    """One entry for every datum (SAGA)."""

    def check(self, sampler):
        if not sampler.visits_once:
            raise ValueError(
                f"PerDatum() needs a sampler that sees a datum once an epoch; got {sampler!r}. "
                "Use Reshuffle(), or memory=WholeTable()."
            )

    def init(self, objective, params, sampler):
        return _see_all(objective, params, sampler, objective.num_data, _by_datum)

    def open(self, table, schedule):
        return None, take_rows(table, schedule.indices)

    def read(self, state, shared, row, objective, params, batch):
        return Recall(row, state)

    def change(self, recall, objective, params, batch):
        return _change(recall, objective, params, batch)

    def write(self, recall, change, objective, params, batch):
        return _add(recall.mean, change), objective.remember(params, batch.data)

    def close(self, table, schedule, rows):
        return put_rows(table, schedule.indices, rows)

    def recount(self, state, table, objective, sampler):
        return _sum_table(state, table, objective, sampler, _by_datum)

    def summary(self, state):
        return state


class PerBatch(AbstractMemory):
    """One entry for every fixed minibatch: N/B stored locations under a view of the whole z."""

    def check(self, sampler):
        if not isinstance(sampler, FixedBatches):
            raise ValueError(
                f"PerBatch() needs the same minibatches every epoch; got {sampler!r}. Use FixedBatches()."
            )

    def init(self, objective, params, sampler):
        return _see_all(objective, params, sampler, sampler.steps_per_epoch(objective.num_data), _by_batch)

    def open(self, table, schedule):
        return None, take_rows(table, schedule.unit)

    def read(self, state, shared, row, objective, params, batch):
        return Recall(row, state)

    def change(self, recall, objective, params, batch):
        return _change(recall, objective, params, batch)

    def write(self, recall, change, objective, params, batch):
        return _add(recall.mean, change), objective.remember(params, batch.data)

    def close(self, table, schedule, rows):
        return put_rows(table, schedule.unit, rows)

    def recount(self, state, table, objective, sampler):
        return _sum_table(state, table, objective, sampler, _by_batch)

    def summary(self, state):
        return state


class Slots(eqx.Module):
    """The iterates of the last epoch and of this one, and which of them saw each datum."""

    last: PyTree[Array]
    last_slot: Array
    current: PyTree[Array]
    current_slot: Array


class Snapshots(AbstractMemory):
    """The per-datum table in 2·N/B stored iterates and an index a datum: the same numbers, to the last bit."""

    def check(self, sampler):
        if not isinstance(sampler, Reshuffle):
            raise ValueError(
                f"Snapshots() needs a sampler that sees every datum once an epoch; got {sampler!r}. Use Reshuffle()."
            )

    def init(self, objective, params, sampler):
        _check_rows(objective, params)
        steps = sampler.steps_per_epoch(objective.num_data)
        iterates = jax.tree.map(lambda leaf: jnp.tile(leaf, (steps, *[1] * leaf.ndim)), params)
        slot = jnp.zeros(objective.num_data, jnp.int32)
        return full_summary(objective, params, sampler.sweep(objective.num_data)), Slots(
            iterates, slot, iterates, slot
        )

    def open(self, table, schedule):
        table = self._turn(table, schedule)
        return table.last, take_rows(table.last_slot, schedule.indices)

    def read(self, state, shared, row, objective, params, batch):
        places = take_rows(shared, row)

        def remember(place, datum):
            one = jax.tree.map(lambda leaf: leaf[None], datum)
            return jax.tree.map(lambda leaf: leaf[0], objective.remember(place, one))

        return Recall(jax.vmap(remember)(places, batch.data), state)

    def change(self, recall, objective, params, batch):
        return _change(recall, objective, params, batch)

    def write(self, recall, change, objective, params, batch):
        return _add(recall.mean, change), params

    def close(self, table, schedule, rows):
        table = self._turn(table, schedule)
        current = put_rows(table.current, schedule.place, rows)
        places = jnp.broadcast_to(schedule.place[:, None], schedule.indices.shape)
        slot = put_rows(table.current_slot, schedule.indices, places.astype(jnp.int32))
        return Slots(table.last, table.last_slot, current, slot)

    def recount(self, state, table, objective, sampler):
        return state

    def summary(self, state):
        return state

    def _turn(self, table, schedule):
        """At the first step of an epoch the current iterates become the last."""
        first = schedule.place[0] == 0

        def choose(new, old):
            return jax.tree.map(lambda new, old: jnp.where(first, new, old), new, old)

        last, last_slot = choose((table.current, table.current_slot), (table.last, table.last_slot))
        return Slots(last, last_slot, table.current, table.current_slot)


class WholeTable(AbstractMemory):
    """One entry for every datum, all at hand at every step: what `inc` reads and sampling with replacement needs.

    The table rides with the state. XLA copies it every step, so it is for small problems.
    """

    def check(self, sampler):
        pass

    def init(self, objective, params, sampler):
        mean, table = _see_all(objective, params, sampler, objective.num_data, _by_datum)
        return (mean, table), None

    def open(self, table, schedule):
        return None, None

    def read(self, state, shared, row, objective, params, batch):
        mean, table = state
        return Recall(take_rows(table, batch.indices), mean, table=table)

    def change(self, recall, objective, params, batch):
        return _change(recall, objective, params, batch)

    def write(self, recall, change, objective, params, batch):
        entry = objective.remember(params, batch.data)
        return (_add(recall.mean, change), put_rows(recall.table, batch.indices, entry)), None

    def close(self, table, schedule, rows):
        return None

    def recount(self, state, table, objective, sampler):
        mean, entries = state
        batches = Reshuffle(sampler.batch_size or objective.num_data)
        return _sum_table(mean, entries, objective, batches, _by_datum), entries

    def summary(self, state):
        return state[0]


class Anchor(AbstractMemory):
    """Every datum is remembered at one place, moved here by a full pass now and then (SVRG): memory of z's size.

    Args:
        every: steps between full passes; an epoch by default.
    """

    every: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.every is not None:
            check_count("Anchor(every=...): every", self.every, "steps")

    def check(self, sampler):
        pass

    def init(self, objective, params, sampler):
        return (params, full_summary(objective, params, sampler.sweep(objective.num_data))), None

    def open(self, table, schedule):
        return None, None

    def read(self, state, shared, row, objective, params, batch):
        batch_size = batch.indices.shape[0]
        every = self.every or -(-objective.num_data // batch_size)
        sweep = Reshuffle(batch_size).sweep(objective.num_data)

        def move(state):
            return params, full_summary(objective, params, sweep)

        place, mean = jax.lax.cond(batch.step % every == 0, move, lambda state: state, state)
        return Recall(objective.remember(place, batch.data), mean, place=place)

    def change(self, recall, objective, params, batch):
        return None

    def write(self, recall, change, objective, params, batch):
        return (recall.place, recall.mean), None

    def close(self, table, schedule, rows):
        return None

    def recount(self, state, table, objective, sampler):
        return state

    def summary(self, state):
        return state[1]


def take_rows(table: Table, indices) -> Rows:
    """Rows of every leaf; a padded index repeats the last row."""
    return jax.tree.map(lambda leaf: leaf.at[indices].get(mode="clip"), table)


def put_rows(table: Table, indices, rows: Rows) -> Table:
    """The table with these rows; a padded index writes nothing."""
    return jax.tree.map(lambda leaf, row: leaf.at[indices].set(row, mode="drop"), table, rows)


def _by_datum(schedule: Schedule):
    return schedule.indices


def _by_batch(schedule: Schedule):
    return schedule.unit


def _see_all(objective, params, sampler, size, index) -> tuple[State, Table]:
    """The mean summary and the table of `size` entries, every datum seen at these parameters."""
    if index is _by_datum:
        _check_rows(objective, params)
    schedule = sampler.sweep(objective.num_data)

    def see(mean, step):
        batch = take_batch(objective, step, 0, float_type(params))
        entry = objective.remember(params, batch.data)
        summary = objective.summarise(entry, batch.data, batch.share)
        return jax.tree.map(jnp.add, mean, summary), entry

    mean, entries = jax.lax.scan(see, zero_summary(objective, params), schedule)
    places = index(schedule)
    table = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape[places.ndim :]), leaf.dtype), entries)
    return mean, put_rows(table, places, entries)


def _sum_table(mean: State, table: Table, objective, sampler, index) -> State:
    """The mean summary of all that a table remembers."""
    schedule = sampler.sweep(objective.num_data)
    dtype = float_type(mean)

    def add(total, step):
        batch = take_batch(objective, step, 0, dtype)
        summary = objective.summarise(take_rows(table, index(step)), batch.data, batch.share)
        return jax.tree.map(jnp.add, total, summary), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, mean), schedule)[0]


def _check_rows(objective: AbstractObjective, params) -> None:
    """ValueError where the objective remembers one place for a whole batch."""
    for count in (2, 3):
        rows = jnp.zeros(count, int)
        entry = jax.eval_shape(lambda rows=rows: objective.remember(params, take_rows(objective.data, rows)))
        if any(leaf.shape[:1] != (count,) for leaf in jax.tree.leaves(entry)):
            raise ValueError(
                "the memory keeps an entry for every datum, but this objective remembers one place for a batch. Use "
                "memory=Anchor(), PerBatch() with FixedBatches(), or DoublyStochastic(per_datum=True)."
            )


def _change(recall: Recall, objective, params, batch: Batch) -> PyTree[Array]:
    """(1/N) Σ_{n in batch} [summary(now) − summary(entry)]."""
    entry = objective.remember(params, batch.data)
    return objective.change(entry, recall.entry, batch.data, batch.share)


def _add(mean: State, change: PyTree[Array]) -> State:
    return jax.tree.map(jnp.add, mean, change)
