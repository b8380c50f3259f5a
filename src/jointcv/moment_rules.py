"""Read a log density's jaxpr as far as its values have Gaussian expectations in closed form:

    value(z) = offset + A z + Σ_t W_t [Π_k (b_k + B_k z) ⊙ exp(b + B z)]_t + open(z)

The matrices are sparse and concrete: a prior has no data, so that all is known when it is read. Linear
operations act on the closed and the open part alike; what is not known to stay closed is open as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from scipy import sparse

from jointcv.jaxprs import bind, called

BUDGET = 10_000_000  # entries of any one matrix or constant
MAX_FACTORS = 4
MAX_TERMS = 16
FULL = slice(None)


class NotClosedError(Exception):
    """A value leaves the closed form."""


def _require(condition) -> None:
    if not condition:
        raise NotClosedError


# Closed forms: the algebra. Rows are the elements of a value, in C order.


@dataclass(frozen=True, eq=False)
class Affine:
    """offset + matrix @ z, one row an element."""

    offset: np.ndarray
    matrix: sparse.csr_array

    @property
    def dim(self) -> int:
        return int(self.matrix.shape[1])  # pyright: ignore[reportOptionalSubscript]

    def take(self, rows) -> "Affine":
        return Affine(self.offset[rows], _take(self.matrix, rows))

    def map(self, operator: sparse.csr_array) -> "Affine":
        return Affine(operator @ self.offset, _tidy(operator @ self.matrix))

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(self.offset + other.offset, _tidy(self.matrix + other.matrix))


@dataclass(frozen=True, eq=False)
class Product:
    """Π_k factors_k ⊙ exp(exponent), element by element."""

    shape: tuple[int, ...]
    factors: tuple[Affine, ...]
    exponent: Affine | None

    def take(self, rows, shape) -> "Product":
        exponent = None if self.exponent is None else self.exponent.take(rows)
        return Product(shape, tuple(factor.take(rows) for factor in self.factors), exponent)

    def __mul__(self, other: "Product") -> "Product":
        _require(len(self.factors) + len(other.factors) <= MAX_FACTORS)
        if self.exponent is None or other.exponent is None:
            exponent = self.exponent or other.exponent
        else:
            exponent = self.exponent + other.exponent
        return Product(self.shape, self.factors + other.factors, exponent)


@dataclass(frozen=True)
class Term:
    """weights @ product."""

    weights: sparse.csr_array
    product: Product

    def elementwise(self, shape) -> tuple[np.ndarray, Product]:
        """The same as w ⊙ product, if no element sums several products."""
        counts = np.diff(self.weights.indptr)
        _require((counts <= 1).all())
        weights, rows = np.zeros(counts.size), np.zeros(counts.size, int)
        weights[counts == 1], rows[counts == 1] = self.weights.data, self.weights.indices
        if self.product.shape == shape and np.array_equal(rows, np.arange(rows.size)):
            return weights, self.product
        return weights, self.product.take(rows, shape)


@dataclass(frozen=True, eq=False)
class Closed:
    """affine + Σ terms."""

    shape: tuple[int, ...]
    affine: Affine
    terms: tuple[Term, ...] = ()

    @property
    def is_constant(self) -> bool:
        return self.affine.matrix.nnz == 0 and not self.terms

    @property
    def is_zero(self) -> bool:
        return self.is_constant and not self.affine.offset.any()

    @property
    def columns(self) -> np.ndarray:
        """The coordinates of z that matter."""
        mask = np.zeros(self.affine.dim, bool)
        mask[self.affine.matrix.indices] = True
        for term in self.terms:
            for affine in (*term.product.factors, term.product.exponent):
                if affine is not None:
                    mask[affine.matrix.indices] = True
        return mask

    def take(self, rows, shape) -> "Closed":
        rows = np.asarray(rows).ravel()
        if rows.size == self.affine.offset.size and np.array_equal(rows, np.arange(rows.size)):
            return Closed(shape, self.affine, self.terms)
        terms = tuple(Term(_take(term.weights, rows), term.product) for term in self.terms)
        return Closed(shape, self.affine.take(rows), terms)

    def map(self, operator: sparse.csr_array, shape) -> "Closed":
        terms = tuple(Term(_tidy(operator @ term.weights), term.product) for term in self.terms)
        return Closed(shape, self.affine.map(operator), terms)

    def scale(self, constant) -> "Closed":
        values = np.broadcast_to(constant, self.shape).ravel()
        _require(np.isfinite(values).all())
        return self.map(_diagonal(values), self.shape)

    def expand(self, shape) -> "Closed":
        if self.shape == tuple(shape):
            return self
        rows = np.arange(self.affine.offset.size).reshape(self.shape)
        return self.take(np.broadcast_to(rows, shape), tuple(shape))

    def __add__(self, other: "Closed") -> "Closed":
        return Closed(self.shape, self.affine + other.affine, self.terms + other.terms)

    def __neg__(self) -> "Closed":
        return self.scale(-1.0)

    def __mul__(self, other: "Closed") -> "Closed":
        if other.is_constant:
            return self.scale(other.affine.offset.reshape(other.shape))
        if self.is_constant:
            return other.scale(self.affine.offset.reshape(self.shape))
        mine, theirs = self._products(), other._products()
        _require(len(mine) * len(theirs) <= MAX_TERMS)
        pairs = [(v * w, left * right) for v, left in mine for w, right in theirs]
        zero = constant(np.zeros(self.shape), self.affine.dim)
        return sum((_weighted(weights, product) for weights, product in pairs), zero)

    def _products(self) -> list[tuple[np.ndarray, Product]]:
        products = [term.elementwise(self.shape) for term in self.terms]
        if self.affine.matrix.nnz or self.affine.offset.any():
            products.append((np.ones(self.affine.offset.size), Product(self.shape, (self.affine,), None)))
        return products


def constant(value, dim: int) -> Closed:
    value = np.asarray(value, float)
    return Closed(value.shape, Affine(value.ravel(), sparse.csr_array((value.size, dim))))


def position(dim: int) -> Closed:
    return Closed((dim,), Affine(np.zeros(dim), _diagonal(np.ones(dim))))


def exponential(closed: Closed) -> Closed:
    _require(not closed.terms)
    return _weighted(np.ones(closed.affine.offset.size), Product(closed.shape, (), closed.affine))


def logarithm(closed: Closed) -> Closed:
    """log of a value whose every element is one positive constant times one exponential of an affine form."""
    offset, shape, dim = closed.affine.offset, closed.shape, closed.affine.dim
    _require(closed.affine.matrix.nnz == 0 and (offset >= 0).all())
    total = constant(_log_of_positive(offset).reshape(shape), dim)
    counts = (offset > 0).astype(int)
    for term in closed.terms:
        weights, product = term.elementwise(shape)
        _require(not product.factors and (weights >= 0).all())
        assert product.exponent is not None  # a product of nothing is a constant
        present = _diagonal(weights > 0)
        log_weights = constant(_log_of_positive(weights).reshape(shape), dim)
        total = total + Closed(shape, product.exponent.map(present)) + log_weights
        counts += weights > 0
    _require((counts == 1).all())
    return total


def _log_of_positive(values: np.ndarray) -> np.ndarray:
    return np.log(np.where(values > 0, values, 1.0))


def _weighted(weights: np.ndarray, product: Product) -> Closed:
    """weights ⊙ product, as an affine form where it is one."""
    shape, factors, exponent = product.shape, product.factors, product.exponent
    if exponent is not None and exponent.matrix.nnz == 0:
        with np.errstate(over="ignore"):
            weights, exponent = weights * np.exp(exponent.offset), None
    dim = next(affine.dim for affine in (*factors, product.exponent) if affine is not None)
    if exponent is None and len(factors) <= 1:
        one = constant(np.ones(shape), dim)
        return (Closed(shape, factors[0]) if factors else one).scale(weights.reshape(shape))
    term = Term(_tidy(_diagonal(weights)), Product(shape, factors, exponent))
    return Closed(shape, constant(np.zeros(shape), dim).affine, (term,))


def _take(matrix: sparse.csr_array, rows) -> sparse.csr_array:
    _require(np.diff(matrix.indptr)[rows].sum() <= BUDGET)
    return matrix[rows]


def _diagonal(values) -> sparse.csr_array:
    size = len(values)
    return sparse.csr_array((np.asarray(values, float), np.arange(size), np.arange(size + 1)), (size, size))


def _tidy(matrix) -> sparse.csr_array:
    matrix = sparse.csr_array(matrix)
    _require(matrix.nnz <= BUDGET)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix


# Values: what an equation of the jaxpr computes, and how to compute it again.


@dataclass(frozen=True, eq=False)
class Slot:
    """One output of one equation; without an equation a known value, or z itself."""

    aval: Any
    equation: Any = None
    inputs: tuple["Slot", ...] = ()
    index: int = 0
    value: Any = None
    outputs: dict = field(default_factory=dict)  # shared by the outputs of one equation


@dataclass(eq=False)
class Value:
    """closed + open; `full` is their sum, computed as the density computes it."""

    full: Slot
    dim: int
    form: Closed | None = None
    open: Slot | None = None
    reach: np.ndarray | None = None  # what the open part depends on; nothing does not depend on z at all

    @property
    def is_constant(self) -> bool:
        return self.form is None and self.open is None

    @property
    def size(self) -> int:
        return int(np.prod(self.full.aval.shape))

    @cached_property
    def concrete(self) -> np.ndarray:
        """The value of a constant, computed when first asked for: many are only checks that nobody reads."""
        _require(self.is_constant and self.size <= BUDGET)
        return _eagerly(lambda: run(self.full))

    @cached_property
    def closed(self) -> Closed:
        if self.form is not None:
            return self.form
        _require(self.size <= BUDGET)
        return constant(np.zeros(self.full.aval.shape) if self.open else self.concrete, self.dim)

    @property
    def whole_reach(self) -> np.ndarray:
        reach = np.zeros(self.dim, bool) if self.reach is None else self.reach
        return reach if self.form is None else reach | self.form.columns


def run(slot: Slot, z=None):
    """Compute a slot; each equation once, in any depth of dependence."""
    done: dict[int, list] = {}
    stack = [slot]

    def look(item: Slot):
        if item.equation is None:
            return z if item.value is None else item.value
        return done[id(item.outputs)][item.index]

    while stack:
        item = stack[-1]
        missing = [i for i in item.inputs if i.equation is not None and id(i.outputs) not in done]
        if item.equation is None or id(item.outputs) in done:
            stack.pop()
        elif missing:
            stack += missing
        else:
            done[id(item.outputs)] = bind(item.equation, [look(i) for i in item.inputs])
            stack.pop()
    return look(slot)


def _eagerly(compute: Callable) -> Any:
    """Compute with constants now, also while something else is traced."""
    try:
        with jax.ensure_compile_time_eval():
            return jax.tree.map(np.asarray, compute())
    except (TypeError, ValueError, NotImplementedError):  # a tracer, or not to be run by itself
        raise NotClosedError from None


# Rules: the closed part of what an equation computes, from the closed parts it is given.


def _add(equation, left: Closed, right: Closed) -> Closed:
    shape = equation.outvars[0].aval.shape
    return left.expand(shape) + right.expand(shape)


def _subtract(equation, left: Closed, right: Closed) -> Closed:
    return _add(equation, left, -right)


def _multiply(equation, left: Closed, right: Closed) -> Closed:
    shape = equation.outvars[0].aval.shape
    return left.expand(shape) * right.expand(shape)


def _divide(equation, left: Closed, right: Closed) -> Closed:
    if right.is_constant:
        _require(right.affine.offset.all())
        inverse = constant(1.0 / right.affine.offset.reshape(right.shape), right.affine.dim)
    else:
        inverse = _power(right, -1.0)
    return _multiply(equation, left, inverse)


def _power(base: Closed, power) -> Closed:
    """Any power of an exponential; small whole powers of the rest."""
    try:
        return exponential(logarithm(base).scale(power))
    except NotClosedError:
        _require(np.ndim(power) == 0 and power in range(1, MAX_FACTORS + 1))
    result = base
    for _ in range(int(power) - 1):
        result = result * base
    return result


def _pow(equation, base: Closed, power: Closed) -> Closed:
    _require(power.is_constant)
    powers = power.affine.offset
    same = powers.size and (powers == powers[0]).all()
    shape = equation.outvars[0].aval.shape
    return _power(base.expand(shape), powers[0] if same else powers.reshape(power.shape))


def _absolute(equation, closed: Closed) -> Closed:
    for candidate in (closed, -closed):
        if low_bound(candidate) == 0.0:
            return candidate
    raise NotClosedError


def _sum(equation, closed: Closed) -> Closed:
    shape = equation.outvars[0].aval.shape
    kept = np.arange(int(np.prod(shape))).reshape(shape)
    rows = np.broadcast_to(np.expand_dims(kept, equation.params["axes"]), closed.shape).ravel()
    return closed.map(_adding_to(rows, kept.size), shape)


def _dot(equation, left: Closed, right: Closed) -> Closed:
    """Σ_k left_ik right_kj as an elementwise product and a sum."""
    (contract_left, contract_right), (batch_left, batch_right) = equation.params["dimension_numbers"]
    shape = equation.outvars[0].aval.shape

    def spread(closed: Closed, batch, contract, lone_axis: int) -> np.ndarray:
        rows = np.arange(closed.affine.offset.size).reshape(closed.shape)
        free = [axis for axis in range(rows.ndim) if axis not in (*batch, *contract)]
        sizes = [int(np.prod([closed.shape[axis] for axis in axes])) for axes in (batch, free, contract)]
        return np.expand_dims(rows.transpose([*batch, *free, *contract]).reshape(sizes), lone_axis)

    rows = [spread(left, batch_left, contract_left, 2), spread(right, batch_right, contract_right, 1)]
    full = np.broadcast_shapes(*(r.shape for r in rows))
    _require(np.prod(full, dtype=float) <= BUDGET)
    left, right = (c.take(np.broadcast_to(r, full), full) for c, r in zip((left, right), rows, strict=True))
    size = int(np.prod(shape))
    return (left * right).map(_adding_to(np.repeat(np.arange(size), full[-1]), size), shape)


def _by_basis(equation, *closeds: Closed) -> Closed:
    """An operation linear in its last operand, from what it does to a basis."""
    *constants, last = closeds
    size, shape = last.affine.offset.size, equation.outvars[0].aval.shape
    _require(all(c.is_constant for c in constants) and size * np.prod(shape, dtype=float) <= BUDGET)
    dtype = equation.invars[-1].aval.dtype
    fixed = [c.affine.offset.reshape(c.shape).astype(dtype) for c in constants]
    basis = np.eye(size, dtype=dtype).reshape(size, *last.shape)
    images = _eagerly(lambda: jax.vmap(lambda vector: bind(equation, [*fixed, vector])[0])(basis))
    return last.map(sparse.csr_array(images.astype(float).reshape(size, -1).T), shape)


def _adding_to(rows: np.ndarray, size: int) -> sparse.csr_array:
    """The operator that adds element i to row rows[i]."""
    ones, columns = np.ones(rows.size), np.arange(rows.size)
    return sparse.csr_array((ones, (rows, columns)), shape=(size, rows.size))


RULES: dict[str, Callable[..., Closed]] = {
    "add": _add,
    "add_any": _add,
    "sub": _subtract,
    "mul": _multiply,
    "div": _divide,
    "neg": lambda equation, closed: -closed,
    "convert_element_type": lambda equation, closed: closed,
    "reduce_sum": _sum,
    "dot_general": _dot,
    "cumsum": _by_basis,
    "triangular_solve": _by_basis,
    "exp": lambda equation, closed: exponential(closed),
    "log": lambda equation, closed: logarithm(closed),
    "square": lambda equation, closed: _power(closed, 2),
    "sqrt": lambda equation, closed: _power(closed, 0.5),
    "rsqrt": lambda equation, closed: _power(closed, -0.5),
    "integer_pow": lambda equation, closed: _power(closed, equation.params["y"]),
    "pow": _pow,
    "abs": _absolute,
}

LINEAR_IN = {  # operands an operation is jointly linear in
    **dict.fromkeys(["add", "add_any", "sub"], FULL),
    **dict.fromkeys(["neg", "convert_element_type", "reduce_sum", "cumsum"], FULL),
    "div": slice(0, 1),
    "triangular_solve": slice(1, 2),
}
BILINEAR = {"mul", "dot_general"}
REARRANGES = {  # operands whose elements it moves; the others say where to
    **dict.fromkeys(["reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose"], FULL),
    **dict.fromkeys(["slice", "split", "concatenate", "stack", "tile", "pad", "rev", "copy", "copy_p"], FULL),
    **dict.fromkeys(["gather", "dynamic_slice"], slice(0, 1)),
    "dynamic_update_slice": slice(0, 2),
    "scatter": slice(0, 3, 2),
    "select_n": slice(1, None),
}
COMPARES = {"gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal}


def rearrange(equation, values: Sequence[Value]) -> list[Closed]:
    """Move numbered elements to see where each one goes, then take the rows in that order."""
    _require(equation.params.get("fill_value") is None)
    carried = _carried(equation, values)
    starts = np.cumsum([0, *(values[i].size for i in carried)])
    total = int(starts[-1])
    _require(total <= BUDGET)
    inputs = [None if i in carried else value.concrete for i, value in enumerate(values)]
    for i, start in zip(carried, starts, strict=False):
        numbers = np.arange(start, start + values[i].size, dtype=np.int32)
        inputs[i] = numbers.reshape(values[i].full.aval.shape)
    orders = _eagerly(lambda: bind(equation, inputs))
    _require(all(order.size <= BUDGET and ((0 <= order) & (order < total)).all() for order in orders))
    rows = stack([values[i].closed for i in carried])
    return [rows.take(order, order.shape) for order in orders]


def stack(closeds: Sequence[Closed]) -> Closed:
    """The elements of several values, one after another."""
    if len(closeds) == 1:
        return closeds[0]
    offset = np.concatenate([closed.affine.offset for closed in closeds])
    matrix = _tidy(sparse.vstack([closed.affine.matrix for closed in closeds], format="csr"))
    starts = np.cumsum([0, *(closed.affine.offset.size for closed in closeds)])
    terms = [
        Term(_tidy(_adding_to(np.arange(start, stop), offset.size) @ term.weights), term.product)
        for closed, start, stop in zip(closeds, starts, starts[1:], strict=False)
        for term in closed.terms
    ]
    return Closed((offset.size,), Affine(offset, matrix), tuple(terms))


def low_bound(closed: Closed) -> float:
    """A closed value lies strictly between this and infinity, whatever z is."""
    try:
        logarithm(closed)
    except NotClosedError:
        return -np.inf
    return 0.0


def compare(equation, values: Sequence[Value]) -> np.ndarray:
    """A comparison that has the same outcome at every z, as the support checks of distributions have."""
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    _require(not any(value.open for value in values))
    if name == "is_finite":
        return np.ones(shape, bool)
    left, right = values
    if left is right and name in ("eq", "ne", "ge", "le"):
        return np.full(shape, name != "ne")
    if left.is_constant:
        left, right, name = right, left, name.translate(str.maketrans("gl", "lg"))
    _require(right.is_constant)
    low, bound = low_bound(left.closed), np.broadcast_to(right.concrete, shape)
    _require(((bound <= low) | (bound == np.inf)).all())
    if name in ("eq", "ne"):
        return np.full(shape, name == "ne")
    return np.array(COMPARES[name](0.0, np.where(bound == np.inf, 1.0, -1.0)))


# The interpreter.

INLINED = ("jit", "closed_call", "call")
# Kept whole unless everything in it closes: what it says of derivatives must stay.
ATOMIC = ("custom_jvp_call", "custom_vjp_call", "remat2")


def read(jaxpr: jex.ClosedJaxpr) -> tuple[Closed, Slot | None, np.ndarray]:
    """Read a log density's jaxpr, of the one input z.

    Returns:
        Its closed part, what computes the rest, and the coordinates of z the rest depends on.
    """
    (variable,) = jaxpr.jaxpr.invars
    dim = variable.aval.shape[0]
    nowhere = np.zeros(dim, bool)
    value = interpret(jaxpr.jaxpr, jaxpr.consts, [Value(Slot(variable.aval), dim, position(dim))], dim)[0]
    try:
        return value.closed, value.open, nowhere if value.reach is None else value.reach
    except NotClosedError:  # a constant that cannot be computed yet
        return constant(0.0, dim), value.full, nowhere


def interpret(jaxpr, constants, arguments: Sequence[Value], dim: int) -> list[Value]:
    known = dict(zip(jaxpr.invars, arguments, strict=True))
    for variable, value in zip(jaxpr.constvars, constants, strict=True):
        known[variable] = _constant_value(variable.aval, value, dim)

    def look(variable) -> Value:
        if isinstance(variable, jex.Literal):
            return _constant_value(variable.aval, variable.val, dim)
        return known[variable]

    for equation in jaxpr.eqns:
        results = apply(equation, [look(variable) for variable in equation.invars], dim)
        known.update(zip(equation.outvars, results, strict=True))
    return [look(variable) for variable in jaxpr.outvars]


def apply(equation, values: Sequence[Value], dim: int) -> list[Value]:
    """What an equation makes of its operands."""
    full = _slots(equation, [value.full for value in values])
    if all(value.is_constant for value in values):
        return [Value(slot, dim) for slot in full]
    name = equation.primitive.name
    if name in INLINED or name in ATOMIC:
        return _call(equation, values, full, dim)
    try:
        if name in COMPARES or name in ("eq", "ne", "is_finite"):
            return [_constant_value(full[0].aval, compare(equation, values), dim)]
        return _closed_and_open(equation, values, full, dim)
    except NotClosedError:
        return _all_open(full, values, dim)


def _call(equation, values, full, dim: int) -> list[Value]:
    name = equation.primitive.name
    results = interpret(*called(equation), values, dim)
    if name in ATOMIC and any(result.open for result in results):
        return _all_open(full, values, dim)
    return results


def _closed_and_open(equation, values, full, dim: int) -> list[Value]:
    name = equation.primitive.name
    _require(all(jnp.issubdtype(slot.aval.dtype, jnp.floating) for slot in full))
    carried = _carried(equation, values)
    is_open = any(value.open for value in values)
    if is_open and all(values[i].form is None and values[i].open for i in carried):
        closeds = [None] * len(full)
    elif name in REARRANGES:
        closeds = rearrange(equation, values)
    else:
        _require(name in RULES)
        closeds = [RULES[name](equation, *(value.closed for value in values))]
    _require(all(closed is None or np.isfinite(closed.affine.offset).all() for closed in closeds))
    if not is_open:
        return [Value(slot, dim, closed) for slot, closed in zip(full, closeds, strict=True)]
    inputs = [_open_part(v) if i in carried else v.full for i, v in enumerate(values)]
    reaches = [v.reach if i in carried else v.whole_reach for i, v in enumerate(values)]
    reach = np.logical_or.reduce([r for r in reaches if r is not None])
    parts = zip(full, closeds, _slots(equation, inputs), strict=True)
    return [Value(slot, dim, closed, part, reach) for slot, closed, part in parts]


def _carried(equation, values) -> list[int]:
    """The operands whose open parts pass through linearly; every open operand must be one."""
    name, positions = equation.primitive.name, range(len(values))
    opened = [i for i in positions if values[i].open]
    if name in BILINEAR:
        carried = opened if len(opened) == 1 else []
    else:
        carried = list(positions)[(LINEAR_IN | REARRANGES).get(name, slice(0))]
    _require(set(opened) <= set(carried))
    return carried


def _open_part(value: Value) -> Slot:
    aval = value.full.aval
    return value.open or Slot(aval, value=np.zeros(aval.shape, aval.dtype))


def _all_open(full, values, dim: int) -> list[Value]:
    reach = np.logical_or.reduce([value.whole_reach for value in values])
    return [Value(slot, dim, None, slot, reach) for slot in full]


def _slots(equation, inputs: Sequence[Slot]) -> list[Slot]:
    outputs: dict = {}
    return [Slot(v.aval, equation, tuple(inputs), i, None, outputs) for i, v in enumerate(equation.outvars)]


def _constant_value(aval, value, dim: int) -> Value:
    return Value(Slot(aval, value=value), dim)
