"""What one datum sees: function(z, datum) = outer(eta, datum), eta = A z + b.

Whatever the non-linear operations of a function learn of z they learn through the linear values that enter
them, so these could be eta. They are rarely the smallest choice: y eta - exp(eta) takes in two values but
knows one number. The *frontier* is a minimum vertex cut between z and the non-linear operations, with
capacities the sizes of the values (`linear_graph`). What lies before it is `predict`, what lies behind it is
`outer`.

Nothing is guessed: a function that cannot be split gives a reason instead.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Var
from jaxtyping import Array, Bool, Float, PyTree, Scalar, Shaped

from jointcv.jaxprs import depends, flatten, needed, piece, reached, size, variables
from jointcv.linear_graph import CALLS, Graph, strongly_typed, trace_graph
from jointcv.linear_rules import interpret, missing_rule

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
        frontier = self.affine.outvars
        ends = np.cumsum([size(var) for var in frontier])[:-1]
        parts = [
            part.reshape(var.aval.shape).astype(var.aval.dtype)  # pyright: ignore
            for var, part in zip(frontier, jnp.split(jnp.asarray(eta), ends), strict=True)
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
        wanted = self.affine.invars[len(self.constants) : -1]
        return [*self.constants, *(_cast(leaf, var) for leaf, var in zip(leaves, wanted, strict=True))]

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
        A Split with fewer predictors than z has entries (or with one, of one), or a NoSplit with the reason.

    Examples:
        >>> import jax.numpy as jnp
        >>> poisson = lambda z, datum: datum["y"] * (datum["x"] @ z) - jnp.exp(datum["x"] @ z)
        >>> split(poisson, jnp.zeros(3), {"x": jnp.ones(3), "y": jnp.array(2.0)}).num_predictors
        1
    """
    graph = trace_graph(function, z, datum)
    if not graph.sinks:
        return NoSplit("the function does not depend on z")
    latest, earliest = (_split_at(graph, frontier) for frontier in graph.frontiers())
    if latest.num_predictors >= graph.dim > 1:  # one coordinate is one predictor, and may have quadrature
        return NoSplit(graph.reason(latest.num_predictors))
    if latest.num_predictors == 1 or _is_tidy(latest, datum) or not _is_tidy(earliest, datum):
        return latest
    return earliest


def _split_at(graph: Graph, frontier: list[Var]) -> Split:
    before = needed(graph.eqns, frontier)
    behind = needed(graph.eqns, [graph.output], frontier)
    assert not any(any(depends(eqn, {graph.z})) for eqn in behind) or graph.z in frontier
    return Split(
        constants=graph.constants,
        num_predictors=sum(map(size, frontier)),
        affine=piece([*graph.inputs, graph.z], frontier, before),
        remainder=piece([*graph.inputs, *frontier], [graph.output], behind),
        datum_structure=graph.datum_structure,
    )


def state(
    predict: Callable[..., PyTree], loss: Callable[..., Scalar], z: Float[Array, " dim"], datum: PyTree
) -> Split:
    """The split of −loss(predict(z, datum), datum) just there. Only shapes and types of z and datum matter.

    Whether `predict` is affine is for `verify` to say.
    """
    z, datum = jax.tree.map(strongly_typed, jax.eval_shape(lambda *inputs: inputs, z, datum))
    before, eta = jax.make_jaxpr(predict, return_shape=True)(z, datum)
    behind = jax.make_jaxpr(lambda eta, datum: -loss(eta, datum))(eta, datum)
    before, behind = flatten(before, CALLS), flatten(behind, CALLS)
    position, *inputs = before.jaxpr.invars
    frontier = before.jaxpr.outvars
    varying = reached(before.jaxpr.eqns, [position])
    if not all(isinstance(out, Var) and out in varying for out in frontier):
        raise ValueError("predict has an output in which there is no z. Leave it to loss.")
    constvars = [*before.jaxpr.constvars, *behind.jaxpr.constvars]
    num_parts = len(frontier)
    behind_frontier, behind_inputs = behind.jaxpr.invars[:num_parts], behind.jaxpr.invars[num_parts:]
    return Split(
        constants=tuple(jnp.asarray(constant) for constant in (*before.consts, *behind.consts)),
        num_predictors=sum(map(size, frontier)),
        affine=piece([*constvars, *inputs, position], frontier, before.jaxpr.eqns),
        remainder=piece(
            [*constvars, *behind_inputs, *behind_frontier], behind.jaxpr.outvars, behind.jaxpr.eqns
        ),
        datum_structure=jax.tree.structure(datum),
    )


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
    largest = max(size(out) for eqn in traced.eqns for out in eqn.outvars)
    if largest > MAX_ROWS:
        return f"the predictors of one datum read too many coordinates of z to compare ({largest} integers)"
    vary = not reached(traced.eqns, traced.invars).isdisjoint(variables(traced.outvars))
    return _RowLayout(max(1, sum(map(size, traced.outvars))), vary)


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


def _cast(value, variable):
    dtype = variable.aval.dtype
    return value if isinstance(value, jax.Array) and value.dtype == dtype else jnp.asarray(value, dtype)
