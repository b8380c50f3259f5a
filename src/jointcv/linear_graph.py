"""What a function of (z, datum) does to z: which of its values are linear in z, and where they stop being so.

Every value of the function's jaxpr is marked constant, linear in z (affine, strictly) or non-linear. Linear
values make a graph; it ends at the *sinks*, the linear values that a non-linear operation reads. The values
of least size that separate z from the sinks are a minimum vertex cut.

A primitive that is not known to be linear counts as non-linear; a function with its own derivative rule is
never taken apart.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var
from jaxtyping import Array, PyTree, Shaped

from jointcv.cut import Cuts, minimum_cuts
from jointcv.jaxprs import depends, flatten, needed, size
from jointcv.linear_rules import is_linear

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint")


class Sink(NamedTuple):
    """Where a linear value stops being one."""

    variable: Var
    eqn: JaxprEqn | None  # the non-linear operation it enters; None for the output


class Graph(NamedTuple):
    """The equations of a function of (z, datum) and the linear values among theirs."""

    constants: tuple[Array, ...]
    inputs: tuple[Var, ...]  # the constants' variables, then the datum's
    z: Var
    eqns: list[JaxprEqn]  # only those the output needs
    output: Any
    datum_structure: Any
    edges: list[tuple[Var, Var]]  # from a linear value to one computed from it
    sinks: list[Sink]

    @property
    def dim(self) -> int:
        """The size of z."""
        return size(self.z)

    def frontiers(self) -> Cuts:
        """The smallest sets of linear values through which z acts."""
        values = dict.fromkeys([self.z, *(out for _, out in self.edges)])
        sizes = {var: size(var) for var in values}
        return minimum_cuts(sizes, self.edges, [self.z], [sink.variable for sink in self.sinks])

    def reason(self, num_predictors: int) -> str:
        """Why frontiers of this size are no use, for a user to read."""
        sink = max(self.sinks, key=lambda sink: size(sink.variable))
        shape = sink.variable.aval.shape  # pyright: ignore
        what = (
            "the output is"
            if sink.eqn is None
            else f"'{sink.eqn.primitive.name}'{_source_line(sink.eqn)} acts on"
        )
        return (
            f"the likelihood of one datum knows z (size {self.dim}) through {num_predictors} linear "
            f"predictors, no fewer than z itself: {what} a value of size {size(sink.variable)}, shape {shape}"
        )


def trace_graph(
    function: Callable[..., Any], z: Shaped[Array | jax.ShapeDtypeStruct, "..."], datum: PyTree
) -> Graph:
    """Trace a scalar function for one datum; only the shapes and types of z and datum matter."""
    z, datum = jax.tree.map(strongly_typed, jax.eval_shape(lambda *inputs: inputs, z, datum))
    if z.ndim != 1:
        raise ValueError(f"z has shape {z.shape}; pass a flat vector and unravel it inside the function.")
    closed, result = jax.make_jaxpr(function, return_shape=True)(z, datum)
    if getattr(result, "shape", None) != ():
        raise ValueError(f"function(z, datum) returned {result}; it must return a scalar.")
    closed = flatten(closed, CALLS)
    position, *inputs = closed.jaxpr.invars
    (output,) = closed.jaxpr.outvars
    eqns = needed(closed.jaxpr.eqns, [output])
    edges, sinks = _mark(position, eqns, output)
    return Graph(
        constants=tuple(jnp.asarray(constant) for constant in closed.consts),
        inputs=(*closed.jaxpr.constvars, *inputs),
        z=position,
        eqns=eqns,
        output=output,
        datum_structure=jax.tree.structure(datum),
        edges=edges,
        sinks=sinks,
    )


def strongly_typed(struct):
    """A shape with the type that an array in its place would have."""
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype)


def _mark(z: Var, eqns: list[JaxprEqn], output) -> tuple[list[tuple[Var, Var]], list[Sink]]:
    linear, nonlinear, edges, sinks = {z}, set(), [], []
    for eqn in eqns:
        dependent = depends(eqn, linear)
        sources = {operand for operand, flag in zip(eqn.invars, dependent, strict=True) if flag}
        if any(depends(eqn, nonlinear)) or (sources and not is_linear(eqn, dependent)):
            nonlinear.update(eqn.outvars)
            sinks.extend(Sink(source, eqn) for source in sources)  # pyright: ignore
        elif sources:
            linear.update(eqn.outvars)
            edges.extend((source, out) for source in sources for out in eqn.outvars)
    if isinstance(output, Var) and output in linear:
        sinks.append(Sink(output, None))
    return edges, sinks


def _source_line(eqn: JaxprEqn) -> str:
    # There is no public way to print where an equation came from.
    from jax._src import source_info_util

    return f" at {source_info_util.summarize(eqn.source_info)}"
