"""What one datum sees: function(z, datum) = outer(eta, datum), eta = A z + b.

The function is traced for one datum and every value of its jaxpr is marked constant, linear in z (affine,
strictly) or non-linear. Whatever the non-linear operations learn of z they learn through the linear values
that enter them, so these could be eta. They are rarely the smallest choice: y eta - exp(eta) takes in two
values but knows one number. The *frontier* is a minimum vertex cut between z and the non-linear operations,
with capacities the sizes of the values. What lies before it is `predict`, what lies behind it is `outer`.

Nothing is guessed. A primitive that is not known to be linear counts as non-linear; a function with its own
derivative rule is never taken apart; a function that cannot be split gives a reason instead.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jaxtyping import Array, Bool, Float, PyTree, Scalar, Shaped

from jointcv.linear_rules import apply, depends, interpret, is_linear, missing_rule, piece, read

INLINED = ("jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint")
MAX_ROWS = 2**27  # integers held at once while the rows of A are compared
CHUNK = 2**22  # integers compared at once


class NoSplit(eqx.Module):
    """The function could not be split; `reason` says why, for a user to read."""

    reason: str = eqx.field(static=True)


class Split(eqx.Module):
    """A function of (z, datum) as outer(predict(z, datum), datum), with predict affine in z.

    Arrays that the function closes over are leaves, so a Split passes through `jit` as an argument.
    """

    constants: tuple[Array, ...]
    num_predictors: int = eqx.field(static=True)
    affine: Jaxpr = eqx.field(static=True)  # (*constants, *datum, z) -> the frontier
    remainder: Jaxpr = eqx.field(static=True)  # (*constants, *datum, *frontier) -> scalar
    datum_structure: Any = eqx.field(static=True)

    def predict(self, z: Float[Array, " dim"], datum: PyTree) -> Float[Array, " K"]:
        """The predictors eta = A z + b of one datum."""
        frontier = eval_jaxpr(self.affine, (), *self._inputs(datum), self._position(z))
        return self._join(frontier)

    def outer(self, eta: Float[Array, " K"], datum: PyTree) -> Scalar:
        """The function at predictors eta, sign unchanged."""
        variables = self.affine.outvars
        ends = np.cumsum([_size(var) for var in variables])[:-1]
        parts = [
            part.reshape(var.aval.shape).astype(var.aval.dtype)  # pyright: ignore
            for var, part in zip(variables, jnp.split(jnp.asarray(eta), ends), strict=True)
        ]
        return eval_jaxpr(self.remainder, (), *self._inputs(datum), *parts)[0]

    def squared(self, variance: Float[Array, " dim"], datum: PyTree) -> Float[Array, " K"]:
        """sum_i A_ki^2 variance_i, for data of which `squares_hold`."""
        missing = missing_rule(self.affine, {self.affine.invars[-1]})
        if missing is not None:
            raise ValueError(_no_square(missing))
        return self._join(self._interpret("squared", self._position(variance), datum))

    def rows(self, datum: PyTree) -> list[Array]:
        """The coordinates of z in every entry of the frontier, along a leading axis; -1 stands for none."""
        coordinates = jnp.arange(self.affine.invars[-1].aval.shape[0], dtype=jnp.int32)  # pyright: ignore
        return self._interpret("rows", coordinates[None], datum)

    def _interpret(self, which: str, position, datum) -> list[Any]:
        known = dict(zip(self.affine.invars, self._inputs(datum), strict=False))
        return interpret(which, self.affine, known, {self.affine.invars[-1]: position})

    def _inputs(self, datum) -> list[Any]:
        leaves, structure = jax.tree.flatten(datum)
        if structure != self.datum_structure:
            raise ValueError(
                f"datum has structure {structure}; the function was split for {self.datum_structure}."
            )
        variables = self.affine.invars[len(self.constants) : -1]
        return [*self.constants, *(_cast(leaf, var) for leaf, var in zip(leaves, variables, strict=True))]

    def _position(self, z):
        return _cast(z, self.affine.invars[-1])

    def _join(self, frontier) -> Array:
        dtype = self.affine.invars[-1].aval.dtype  # pyright: ignore
        return jnp.concatenate([jnp.ravel(value).astype(dtype) for value in frontier])


def split(
    function: Callable[..., Any], z: Shaped[Array | jax.ShapeDtypeStruct, "..."], datum: PyTree
) -> Split | NoSplit:
    """Split a function of (z, datum) into an affine map of z and the rest.

    Args:
        function: `function(z, datum)`, a scalar.
        z: a flat vector; only its shape and type matter.
        datum: one datum, a pytree of arrays. Among equally small splits one is preferred in which no
            coordinate of z reaches two predictors of this datum.

    Returns:
        A Split with fewer predictors than z has entries, or a NoSplit with the reason.

    Example:
        >>> import jax.numpy as jnp
        >>> poisson = lambda z, datum: datum["y"] * (datum["x"] @ z) - jnp.exp(datum["x"] @ z)
        >>> split(poisson, jnp.zeros(3), {"x": jnp.ones(3), "y": jnp.array(2.0)}).num_predictors
        1
    """
    graph = _trace(function, z, datum)
    marked = _mark(graph)
    if not marked.sinks:
        return NoSplit("the function does not depend on z")
    dim = _size(graph.z)
    latest, earliest = (_split_at(graph, frontier) for frontier in _minimum_cuts(graph.z, marked))
    if latest.num_predictors >= dim:
        return NoSplit(_reason(dim, latest.num_predictors, marked))
    if latest.num_predictors == 1 or _is_tidy(latest, datum) or not _is_tidy(earliest, datum):
        return latest
    return earliest


def offenders(split: Split, z: Float[Array, " dim"], data: PyTree) -> Bool[np.ndarray, " N"]:
    """Which data have a coordinate of z that reaches their predictors more than once.

    Of the others `split.squared` is exact and the predictors share no coordinate. A coefficient that happens
    to be zero counts as present. If A cannot be read at all, every datum offends.

    Args:
        split: what `split` returned.
        z: a flat vector; only its shape matters.
        data: a pytree of arrays with leading axis N.
    """
    num_data = jax.tree.leaves(data)[0].shape[0]
    layout = _row_layout(split, _take(data, 0))
    if isinstance(layout, str):
        return np.ones(num_data, bool)
    if not layout.vary:
        return np.full(num_data, _repeats(_pooled_rows(split, data, np.zeros(1, int)))[0])
    chunk = max(1, min(num_data, CHUNK // layout.size))
    found = []
    for start in range(0, num_data, chunk):
        indices = np.minimum(np.arange(start, start + chunk), num_data - 1)  # one shape, one compilation
        found.append(_repeats(_pooled_rows(split, data, indices)))
    return np.concatenate(found)[:num_data]


def rows_vary(split: Split, datum: PyTree) -> bool:
    """Whether the coordinates of z that a datum sees depend on the datum, as those of theta[i] do."""
    layout = _row_layout(split, datum)
    return isinstance(layout, str) or layout.vary


def squares_hold(split: Split, z: Float[Array, " dim"], data: PyTree) -> str | None:
    """Check that for every datum `split.squared` is exact and the predictors have disjoint supports.

    Args:
        split: what `split` returned.
        z: a flat vector; only its shape matters.
        data: a pytree of arrays with leading axis N.

    Returns:
        None if so, else the reason, with the first datum that offends and how many do.
    """
    layout = _row_layout(split, _take(data, 0))
    if isinstance(layout, str):
        return layout
    offending = offenders(split, z, data)
    if not offending.any():
        return None
    first = int(np.argmax(offending))
    twice = any(_repeats(_entries_first(np.asarray(rows))).any() for rows in split.rows(_take(data, first)))
    fault = "one predictor by two paths" if twice else "two predictors"
    count = f"{offending.sum()} of {len(offending)} data offend"
    return f"a coordinate of z reaches {fault} in datum {first} ({count})"


def verify(
    split: Split, function: Callable[..., Scalar], z: Float[Array, " dim"], data: PyTree, key
) -> str | None:
    """Compare value and gradient of a split with its function at four random data and points near z.

    Returns:
        None if they agree and `predict` is affine, else the reason.
    """
    tolerance = math.sqrt(_coarsest(split.affine))
    num_data = jax.tree.leaves(data)[0].shape[0]
    for trial in jax.random.split(key, 4):
        at, where, direction = jax.random.split(trial, 3)
        index = int(jax.random.randint(where, (), 0, num_data))
        point = z + 0.5 * jax.random.normal(at, z.shape, z.dtype)
        step = jax.random.normal(direction, z.shape, z.dtype)
        for what, (found, wanted) in _comparisons(split, function, point, step, _take(data, index)).items():
            if not _close(found, wanted, tolerance):
                return f"{what} differs at datum {index}: {found} from the split, {wanted} from the function"
    return None


@eqx.filter_jit
def _comparisons(split, function, z, step, datum) -> dict[str, tuple[Array, Array]]:
    def through(z):
        return split.outer(split.predict(z, datum), datum)

    value, gradient = jax.value_and_grad(through)(z)
    wanted_value, wanted_gradient = jax.value_and_grad(function)(z, datum)
    eta, tangent = jax.jvp(lambda z: split.predict(z, datum), (z,), (step,))
    return {
        "the value": (value, wanted_value),
        "the gradient": (gradient, wanted_gradient),
        "a step of the predictors": (split.predict(z + step, datum), eta + tangent),
    }


def _coarsest(jaxpr: Jaxpr) -> float:
    """The largest rounding error of the types that z passes through."""
    types = [var.aval.dtype for eqn in jaxpr.eqns for var in eqn.outvars]  # pyright: ignore
    types = [dtype for dtype in types if jnp.issubdtype(dtype, jnp.floating)]
    return max(float(jnp.finfo(dtype).eps) for dtype in (*types, jaxpr.invars[-1].aval.dtype))  # pyright: ignore


def _close(found, wanted, tolerance) -> bool:
    found, wanted = np.asarray(found), np.asarray(wanted)
    finite = np.abs(wanted[np.isfinite(wanted)])
    return np.allclose(
        found, wanted, rtol=tolerance, atol=tolerance * max(1.0, finite.max(initial=0.0)), equal_nan=True
    )


# Tracing


class _Graph(NamedTuple):
    constants: tuple[Array, ...]
    inputs: tuple[Var, ...]  # the constants' variables, then the datum's
    z: Var
    eqns: list[JaxprEqn]  # only those the output needs
    output: Any
    datum_structure: Any


def _trace(function, z, datum) -> _Graph:
    """The function's equations, calls inlined and repetitions merged."""
    z, datum = jax.tree.map(_strongly_typed, jax.eval_shape(lambda *inputs: inputs, z, datum))
    if z.ndim != 1:
        raise ValueError(f"z has shape {z.shape}; pass a flat vector and unravel it inside the function.")
    leaves, structure = jax.tree.flatten(datum)
    closed, result = jax.make_jaxpr(function, return_shape=True)(z, datum)
    if getattr(result, "shape", None) != ():
        raise ValueError(f"function(z, datum) returned {result}; it must return a scalar.")

    def inlined(constants, leaves, z):
        return _run_inlined(closed.jaxpr, constants, [z, *leaves], {})[0]

    flat = jax.make_jaxpr(inlined)(list(closed.consts), leaves, z)
    *inputs, position = flat.jaxpr.invars
    constants = tuple(jnp.asarray(constant) for constant in (*flat.consts, *closed.consts))
    output = flat.jaxpr.outvars[0]
    eqns = _needed(flat.jaxpr.eqns, [output])
    return _Graph(constants, (*flat.jaxpr.constvars, *inputs), position, eqns, output, structure)


def _strongly_typed(struct):
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype)


def _run_inlined(jaxpr: Jaxpr, constants, arguments, seen: dict) -> list[Any]:
    """Evaluate under a trace, entering calls; an equation met before (in `seen`) is not evaluated again."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(operand, values) for operand in eqn.invars]
        if eqn.primitive.name in INLINED:
            inner = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
            body, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            outputs = _run_inlined(body, consts, operands, seen)
        else:
            outputs = _apply_once(eqn, operands, seen)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(out, values) for out in jaxpr.outvars]


def _apply_once(eqn: JaxprEqn, operands, seen: dict):
    names = tuple(
        ("literal", str(operand.aval), str(value)) if isinstance(operand, Literal) else id(value)
        for operand, value in zip(eqn.invars, operands, strict=True)
    )
    try:
        key = (eqn.primitive, names, tuple(sorted(eqn.params.items(), key=lambda item: item[0])))
        hash(key)
    except TypeError:
        return apply(eqn, operands)
    if eqn.effects:
        return apply(eqn, operands)
    if key not in seen:
        seen[key] = (apply(eqn, operands), operands)  # the operands stay alive, so their ids stay theirs
    return seen[key][0]


def _needed(eqns: Iterable[JaxprEqn], outputs, given=frozenset()) -> list[JaxprEqn]:
    """The equations that the outputs need, in order, when the variables in `given` are inputs."""
    wanted = {out for out in outputs if isinstance(out, Var)} - given
    kept = []
    for eqn in reversed(list(eqns)):
        if any(out in wanted for out in eqn.outvars):
            kept.append(eqn)
            wanted.update(
                operand for operand in eqn.invars if isinstance(operand, Var) and operand not in given
            )
    return kept[::-1]


# Marking


class _Sink(NamedTuple):
    variable: Var  # a linear value
    eqn: JaxprEqn | None  # the non-linear operation it enters; None for the output


class _Marked(NamedTuple):
    edges: list[tuple[Var, Var]]  # from a linear value to one computed from it
    sinks: list[_Sink]


def _mark(graph: _Graph) -> _Marked:
    linear, nonlinear, edges, sinks = {graph.z}, set(), [], []
    for eqn in graph.eqns:
        dependent = depends(eqn, linear)
        sources = {operand for operand, flag in zip(eqn.invars, dependent, strict=True) if flag}
        if any(depends(eqn, nonlinear)) or (sources and not is_linear(eqn, dependent)):
            nonlinear.update(eqn.outvars)
            sinks.extend(_Sink(source, eqn) for source in sources)  # pyright: ignore
        elif sources:
            linear.update(eqn.outvars)
            edges.extend((source, out) for source in sources for out in eqn.outvars)
    if isinstance(graph.output, Var) and graph.output in linear:
        sinks.append(_Sink(graph.output, None))
    return _Marked(edges, sinks)


# The minimum cut


def _minimum_cuts(z: Var, marked: _Marked) -> list[list[Var]]:
    """The minimum vertex cuts nearest to the output and nearest to z.

    A variable v is an edge (v, "in") -> (v, "out") of capacity its size; all other edges are unbounded.
    """
    variables = dict.fromkeys([z, *(out for _, out in marked.edges)])
    capacity: dict[Any, dict[Any, float]] = {"sink": {}}
    for var in variables:
        capacity[var, "in"] = {(var, "out"): _size(var)}
        capacity[var, "out"] = {}
    for source, out in marked.edges:
        capacity[source, "out"][out, "in"] = math.inf
    for sink in marked.sinks:
        capacity[sink.variable, "out"]["sink"] = math.inf
    residual = _saturate(capacity, (z, "in"), "sink")
    after = _reachable(_reversed(residual), "sink")
    before = _reachable(residual, (z, "in"))
    latest = [var for var in variables if (var, "out") in after and (var, "in") not in after]
    earliest = [var for var in variables if (var, "in") in before and (var, "out") not in before]
    return [latest, earliest]


def _saturate(capacity, source, sink):
    """The residual capacities after a maximum flow, by shortest augmenting paths."""
    residual = {node: dict(edges) for node, edges in capacity.items()}
    for node, edges in capacity.items():
        for other in edges:
            residual[other].setdefault(node, 0)
    while sink in (parents := _reachable(residual, source)):
        path, node = [], sink
        while node != source:
            path.append((parents[node], node))
            node = parents[node]
        flow = min(residual[tail][head] for tail, head in path)
        for tail, head in path:
            residual[tail][head] -= flow
            residual[head][tail] += flow
    return residual


def _reachable(residual: Mapping, source) -> dict[Any, Any]:
    """The nodes within reach of the source, each with the node before it."""
    parents, queue = {source: None}, deque([source])
    while queue:
        node = queue.popleft()
        for other, capacity in residual[node].items():
            if capacity > 0 and other not in parents:
                parents[other] = node
                queue.append(other)
    return parents


def _reversed(residual: Mapping) -> dict[Any, dict[Any, float]]:
    backwards: dict[Any, dict[Any, float]] = {node: {} for node in residual}
    for node, edges in residual.items():
        for other, capacity in edges.items():
            backwards[other][node] = capacity
    return backwards


def _split_at(graph: _Graph, frontier: list[Var]) -> Split:
    before = _needed(graph.eqns, frontier)
    behind = _needed(graph.eqns, [graph.output], frozenset(frontier))
    assert not any(any(depends(eqn, {graph.z})) for eqn in behind) or graph.z in frontier
    return Split(
        constants=graph.constants,
        num_predictors=sum(map(_size, frontier)),
        affine=piece([*graph.inputs, graph.z], frontier, before),
        remainder=piece([*graph.inputs, *frontier], [graph.output], behind),
        datum_structure=graph.datum_structure,
    )


def _reason(dim: int, num_predictors: int, marked: _Marked) -> str:
    sink = max(marked.sinks, key=lambda sink: _size(sink.variable))
    shape = sink.variable.aval.shape  # pyright: ignore
    what = (
        "the output is"
        if sink.eqn is None
        else f"'{sink.eqn.primitive.name}'{_source_line(sink.eqn)} acts on"
    )
    return (
        f"the likelihood of one datum knows z (size {dim}) through {num_predictors} linear predictors, "
        f"no fewer than z itself: {what} a value of size {_size(sink.variable)}, shape {shape}"
    )


def _source_line(eqn: JaxprEqn) -> str:
    # There is no public way to print where an equation came from.
    from jax._src import source_info_util

    return f" at {source_info_util.summarize(eqn.source_info)}"


# The rows of A


class _RowLayout(NamedTuple):
    size: int  # integers a datum
    vary: bool  # whether they depend on the datum


def _row_layout(split: Split, datum) -> _RowLayout | str:
    missing = missing_rule(split.affine, {split.affine.invars[-1]})
    if missing is not None:
        return _no_square(missing)
    leaves, structure = jax.tree.flatten(datum)
    traced = jax.make_jaxpr(lambda leaves: split.rows(jax.tree.unflatten(structure, leaves)))(leaves).jaxpr
    largest = max(math.prod(out.aval.shape) for eqn in traced.eqns for out in eqn.outvars)  # pyright: ignore
    if largest > MAX_ROWS:
        return f"the predictors of one datum read too many coordinates of z to compare ({largest} integers)"
    varying = set(traced.invars)
    for eqn in traced.eqns:
        if any(depends(eqn, varying)):
            varying.update(eqn.outvars)
    vary = any(out in varying for out in traced.outvars if isinstance(out, Var))
    return _RowLayout(max(1, sum(map(_size, traced.outvars))), vary)


@eqx.filter_jit
def _pooled_rows(split: Split, data, indices) -> Array:
    """All coordinates the predictors of each datum are made of, (len(indices), size)."""

    def pooled(datum):
        return jnp.concatenate([jnp.ravel(rows) for rows in split.rows(datum)])

    return jax.vmap(pooled)(_take(data, indices))


def _repeats(coordinates) -> Bool[np.ndarray, " rows"]:
    """Which rows hold a coordinate twice."""
    ordered = np.sort(np.asarray(coordinates), axis=-1)
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=-1)


def _entries_first(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(rows.shape[0], -1).T


def _is_tidy(split: Split, datum) -> bool:
    """Whether no coordinate of z reaches two predictors of this datum, as far as it is known."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer) for leaf in jax.tree.leaves(datum)):
        return False
    return not offenders(split, jnp.zeros(0), jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], datum))[0]


def _no_square(primitive: str) -> str:
    return f"'{primitive}' is linear, but there is no rule for the squares of its coefficients"


def _take(data, index):
    return jax.tree.map(lambda leaf: leaf[index], data)


def _size(variable) -> int:
    return math.prod(variable.aval.shape)


def _cast(value, variable):
    dtype = variable.aval.dtype
    return value if isinstance(value, jax.Array) and value.dtype == dtype else jnp.asarray(value, dtype)
