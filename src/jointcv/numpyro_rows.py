"""One run of a NumPyro model, (z, indices) -> outputs, taken apart into rows, constants and what z acts on.

The run has a single symbolic index. Every value of its jaxpr then depends on

    the index but not on z    row values: computed once for all n, they become the data
    neither                   constants: computed once, they become leaves of the callables
    z                         what log_likelihood(z, datum) and log_prior(z) evaluate.

Among the values that separate the model's arrays from z, a minimum cut picks the cheapest to store.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, Var
from jaxtyping import Array

from jointcv.cut import minimum_cuts
from jointcv.jaxprs import needed, piece, reached, size, variables

LAST_RESORT = 2**60  # bytes


class Program(eqx.Module):
    """A part of a jaxpr as a function of its inputs; its constants are leaves."""

    jaxpr: Jaxpr = eqx.field(static=True)  # (*constants, *inputs) -> outputs
    names: tuple[str, ...] = eqx.field(static=True)
    constants: list[Array]

    def __call__(self, *inputs) -> dict[str, Array]:
        outputs = eval_jaxpr(self.jaxpr, (), *self.constants, *jax.tree.leaves(inputs))
        return dict(zip(self.names, outputs, strict=True))


class Run(NamedTuple):
    """The jaxpr of one run, (z, indices) -> outputs, with the position of each site's outputs."""

    closed: ClosedJaxpr
    slots: dict[str, dict[str, int]]

    @property
    def _index(self) -> Var:
        return self.closed.jaxpr.invars[-1]

    @property
    def _latents(self) -> list[Var]:
        return self.closed.jaxpr.invars[:-1]

    def _outputs(self, group: str, names: Iterable[str]) -> list:
        return [self.closed.jaxpr.outvars[self.slots[group][name]] for name in names]

    def depends_on_index(self, group: str, name: str) -> bool:
        by_index = reached(self.closed.jaxpr.eqns, [self._index])
        return not by_index.isdisjoint(variables(self._outputs(group, [name])))

    def program(self, group: str, names: Sequence[str]) -> Program:
        """These outputs as a function of z and the indices."""
        return self._part(self.closed.jaxpr.invars, {}, self._outputs(group, names), names)

    def split_rows(
        self, group: str, names: Sequence[str], num_data: int
    ) -> tuple[Program, tuple[Array, ...]]:
        """These outputs as a function of z and of row values, and those of all data.

        They are finite wherever that can be: a model may itself replace what is missing in its arguments.
        """
        avoid: set[Var] = set()
        while True:
            program, wanted = self.split(group, names, num_data, avoid)
            rows = self.rows(wanted, num_data)
            missing = {v for v, row in zip(wanted, rows, strict=True) if not jnp.all(jnp.isfinite(row))}
            if missing or avoid:  # a whole argument among the constants would only hide what is missing in it
                constants = zip(program.jaxpr.invars, program.constants, strict=False)
                missing |= {v for v, constant in constants if jnp.any(jnp.isnan(constant))}
            if missing <= avoid:
                return program, rows
            avoid |= missing

    def split(
        self, group: str, names: Sequence[str], num_data: int, avoid: Collection[Var] = ()
    ) -> tuple[Program, list[Var]]:
        """These outputs as a function of z and of row values, and which values of the run those are."""
        jaxpr, outputs = self.closed.jaxpr, self._outputs(group, names)
        equations = needed(jaxpr.eqns, outputs)
        by_z, by_index = reached(jaxpr.eqns, self._latents), reached(jaxpr.eqns, [self._index])
        uses = [variables(outputs)] + [
            variables(e.invars) for e in equations if not by_z.isdisjoint(e.outvars)
        ]
        known = [e for e in equations if by_z.isdisjoint(e.outvars)]
        inputs = [self._index, *jaxpr.constvars]
        values = [*inputs, *(variable for equation in known for variable in equation.outvars)]
        # A row value is stored N times, a constant once; twice its size makes rows win where it is a tie. The
        # eight bytes that every value costs besides keep the values few.
        price = {v: (_num_bytes(v) + 8) * (num_data if v in by_index else 2) for v in values}
        price |= {v: LAST_RESORT * (1 if v in by_index else 2) for v in avoid}
        edges = [(operand, out) for e in known for operand in variables(e.invars) for out in e.outvars]
        cut = minimum_cuts(price, edges, inputs, {v for use in uses for v in use} - by_z).latest
        rows = [v for v in cut if v in by_index]
        constants = self._constants([v for v in cut if v not in by_index])
        return self._part([*self._latents, *rows], constants, outputs, names), rows

    def rows(self, wanted: list[Var], num_data: int) -> tuple[Array, ...]:
        """These values for every index, stacked."""
        by_index = reached(self.closed.jaxpr.eqns, [self._index])
        equations = [e for e in needed(self.closed.jaxpr.eqns, wanted) if not by_index.isdisjoint(e.outvars)]
        fixed = {v for e in equations for v in variables(e.invars)} - by_index
        names = [str(number) for number in range(len(wanted))]
        one = self._part([self._index], self._constants(fixed), wanted, names)

        @eqx.filter_jit
        def stack(one, indices):
            return jax.lax.map(lambda index: one(index[None]), indices, batch_size=min(num_data, 4096))

        stacked = stack(one, jnp.arange(num_data, dtype=self._index.aval.dtype))  # type: ignore[attr-defined]
        return tuple(stacked[name] for name in names)

    def _constants(self, wanted: Iterable[Var]) -> dict[Var, Array]:
        wanted = list(wanted)
        names = [str(number) for number in range(len(wanted))]
        values = eqx.filter_jit(self._part([], {}, wanted, names))()
        return dict(zip(wanted, (values[name] for name in names), strict=True))

    def _part(self, inputs: Sequence[Var], constants: dict[Var, Array], outputs: list, names) -> Program:
        """The program from these inputs, with these values known, to these outputs."""
        jaxpr = self.closed.jaxpr
        equations = needed(jaxpr.eqns, outputs, [*inputs, *constants])
        used = {v for e in equations for v in variables(e.invars)} | set(variables(outputs))
        known = dict(zip(jaxpr.constvars, self.closed.consts, strict=True)) | constants
        known = {v: value for v, value in known.items() if v in used and v not in inputs}
        part = piece([*known, *inputs], outputs, equations)
        return Program(part, tuple(names), [jnp.asarray(value) for value in known.values()])


def _num_bytes(variable: Var) -> int:
    aval: Any = variable.aval
    return size(variable) * getattr(aval.dtype, "itemsize", 8)
