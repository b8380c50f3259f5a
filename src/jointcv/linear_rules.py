"""What `linear.py` knows of each primitive: when it is linear, its squared map, and which entries it reads.

For eta = A z + b a rule answers three questions about one equation of the jaxpr:

    accepts   is it linear in the operands that depend on z?
    squared   the same map with every coefficient squared, and b dropped
    rows      which coordinates of z reach each entry, as integers of shape (nnz, *shape); -1 stands for none

A primitive without an entry in `RULES` is taken to be non-linear, which is always safe.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jointcv.jaxprs import bind, called, depends, read

ABSENT = -1


class Rule(NamedTuple):
    """How one primitive treats operands that are linear in z; `dependent[i]` says whether operand i is."""

    accepts: Callable[[JaxprEqn, Sequence[bool]], bool]
    squared: Callable[[JaxprEqn, Sequence[Any], Sequence[bool]], Sequence[Any]] | None = None
    rows: Callable[[JaxprEqn, Sequence[Any], Sequence[bool]], Sequence[Any]] | None = None


def rule_of(eqn: JaxprEqn, dependent: Sequence[bool]) -> Rule | None:
    """The rule for this equation, or None if it is not linear in its dependent operands."""
    rule = RULES.get(eqn.primitive.name)
    floating = all(jnp.issubdtype(out.aval.dtype, jnp.floating) for out in eqn.outvars)  # pyright: ignore
    return rule if rule is not None and floating and rule.accepts(eqn, dependent) else None


def is_linear(eqn: JaxprEqn, dependent: Sequence[bool]) -> bool:
    """Whether every output of `eqn` is affine in its dependent operands."""
    body = custom_body(eqn)
    return rule_of(eqn, dependent) is not None if body is None else _body_is_linear(body, dependent)


def custom_body(eqn: JaxprEqn) -> Jaxpr | None:
    """The body of a function with its own derivative rule, else None."""
    if eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return None
    body, constants = called(eqn)
    return None if constants else body


def _body_is_linear(body: Jaxpr, dependent: Sequence[bool]) -> bool:
    linear = {var for var, is_dependent in zip(body.invars, dependent, strict=True) if is_dependent}
    for eqn in body.eqns:
        operands = depends(eqn, linear)
        if any(operands):
            if not is_linear(eqn, operands):
                return False
            linear.update(eqn.outvars)
    return all(isinstance(out, Var) and out in linear for out in body.outvars)


def missing_rule(jaxpr: Jaxpr, linear) -> str | None:
    """The name of a linear primitive that has no squared map or no rows."""
    linear = set(linear)
    for eqn in jaxpr.eqns:
        operands = depends(eqn, linear)
        if not any(operands):
            continue
        linear.update(eqn.outvars)
        body = custom_body(eqn)
        if body is not None:
            inside = {var for var, is_dependent in zip(body.invars, operands, strict=True) if is_dependent}
            name = missing_rule(body, inside)
            if name is not None:
                return name
            continue
        rule = rule_of(eqn, operands)
        if rule is None or rule.squared is None or rule.rows is None:
            return eqn.primitive.name
    return None


def interpret(which: str, jaxpr: Jaxpr, constants: dict[Var, Any], linear: dict[Var, Any]) -> list[Any]:
    """Evaluate a linear jaxpr, constants as they are and linear values by the rules called `which`.

    Args:
        which: "squared" or "rows", a field of `Rule`.
        jaxpr: every output is affine in the variables of `linear`.
        constants: the values of the inputs that do not depend on z.
        linear: what stands for the inputs that do.

    Returns:
        What stands for each output.
    """
    constants, linear = dict(constants), dict(linear)
    for eqn in jaxpr.eqns:
        dependent = depends(eqn, linear)
        if not any(dependent):
            values = [read(operand, constants) for operand in eqn.invars]
            constants.update(zip(eqn.outvars, bind(eqn, values), strict=True))
            continue
        values = [
            linear[operand] if is_dependent else read(operand, constants)  # pyright: ignore
            for operand, is_dependent in zip(eqn.invars, dependent, strict=True)
        ]
        body = custom_body(eqn)
        if body is None:
            rule = rule_of(eqn, dependent)
            assert rule is not None
            outputs = getattr(rule, which)(eqn, values, dependent)
        else:
            inputs = list(zip(body.invars, values, dependent, strict=True))
            known = {var: value for var, value, is_dependent in inputs if not is_dependent}
            outputs = interpret(which, body, known, {var: value for var, value, flag in inputs if flag})
        linear.update(zip(eqn.outvars, outputs, strict=True))
    return [linear[out] for out in jaxpr.outvars]  # pyright: ignore


def _shape(eqn: JaxprEqn) -> tuple[int, ...]:
    return eqn.outvars[0].aval.shape  # pyright: ignore


def _spread(rows, shape: tuple[int, ...]):
    """Rows of a scalar, where an elementwise primitive broadcasts it."""
    return jnp.broadcast_to(rows, (rows.shape[0], *shape))


# When is it linear?


def _any(eqn, dependent):
    return True


def _exactly_one(eqn, dependent):
    return sum(dependent) == 1 and all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars)


def _only(first: int, last: int | None, step: int = 1):
    """Linear in operands first..last; the others (indices, predicates, divisors) must be constant."""

    def accepts(eqn, dependent):
        positions = range(len(dependent))[first:last:step]
        return not any(flag for i, flag in enumerate(dependent) if i not in positions)

    return accepts


def _first_power(eqn, dependent):
    return eqn.params["y"] == 1


def _from_floating(eqn, dependent):
    return jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)


# Sums: add, sub


def _squared_sum(eqn, values, dependent):
    terms = [
        jnp.broadcast_to(v, _shape(eqn))
        for v, is_dependent in zip(values, dependent, strict=True)
        if is_dependent
    ]
    return [sum(terms[1:], terms[0])]


def _rows_sum(eqn, values, dependent):
    terms = [
        _spread(v, _shape(eqn)) for v, is_dependent in zip(values, dependent, strict=True) if is_dependent
    ]
    return [jnp.concatenate(terms)]


# Elementwise multiples: mul, div, neg, convert_element_type


def _squared_multiple(eqn, values, dependent):
    return bind(eqn, [v if flag else v * v for v, flag in zip(values, dependent, strict=True)])


def _squared_neg(eqn, values, dependent):
    return list(values)


def _rows_multiple(eqn, values, dependent):
    return [_spread(values[list(dependent).index(True)], _shape(eqn))]


# Moves: every entry of the output is one entry of an input, or a constant


def _move(first: int, last: int | None, step: int = 1) -> Rule:
    """A primitive that moves the entries of operands first..last, steered by its other operands."""
    moved = slice(first, last, step)

    def squared(eqn, values, dependent):
        values = [
            jnp.zeros_like(v) if i in positions(eqn) and not dependent[i] else v for i, v in enumerate(values)
        ]
        return bind(eqn, values, **_fill(eqn, 0.0))

    def rows(eqn, values, dependent):
        nnz = max(v.shape[0] for v, is_dependent in zip(values, dependent, strict=True) if is_dependent)
        values = [
            _pad(v, nnz) if dependent[i] else _none(v) if i in positions(eqn) else v
            for i, v in enumerate(values)
        ]
        axes = [0 if is_dependent else None for is_dependent in dependent]
        return jax.vmap(lambda *v: bind(eqn, v, **_fill(eqn, ABSENT)), in_axes=axes)(*values)

    def positions(eqn):
        return range(len(eqn.invars))[moved]

    return Rule(_only(first, last, step), squared, rows)


def _fill(eqn, value) -> dict[str, Any]:
    """A gather may fill what lies out of bounds with a constant, which is an offset."""
    return {"fill_value": value} if eqn.params.get("fill_value") is not None else {}


def _pad(rows, nnz: int):
    missing = jnp.full((nnz - rows.shape[0], *rows.shape[1:]), ABSENT, rows.dtype)
    return jnp.concatenate([rows, missing])


def _none(value):
    return jnp.full(jnp.shape(value), ABSENT, jnp.int32)


# Contractions: reduce_sum, cumsum, dot_general


def _squared_same(eqn, values, dependent):
    return bind(eqn, values)


def _rows_reduce_sum(eqn, values, dependent):
    axes = [axis + 1 for axis in eqn.params["axes"]]
    moved = jnp.moveaxis(values[0], axes, range(1, len(axes) + 1))
    return [moved.reshape(-1, *_shape(eqn)) if moved.size else _no_rows(_shape(eqn))]


def _rows_cumsum(eqn, values, dependent):
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    source = jnp.moveaxis(values[0], axis + 1, 0)
    position = jnp.arange(source.shape[0])
    reaches = position[:, None] >= position if reverse else position[:, None] <= position
    reaches = reaches.reshape(len(position), *([1] * (source.ndim - 1)), len(position))
    spread = jnp.moveaxis(jnp.where(reaches, source[..., None], ABSENT), -1, axis + 2)
    return [spread.reshape(-1, *_shape(eqn)) if spread.size else _no_rows(_shape(eqn))]


def _rows_dot_general(eqn, values, dependent):
    contracted, batch = eqn.params["dimension_numbers"]
    side = list(dependent).index(True)
    rows, other = values[side], values[1 - side]
    free = [a for a in range(rows.ndim - 1) if a not in contracted[side] and a not in batch[side]]
    order = [*contracted[side], *batch[side], *free]
    moved = jnp.transpose(rows, [0, *(axis + 1 for axis in order)])
    lengths = [rows.shape[axis + 1] for axis in order]
    here = lengths[len(contracted[side]) :]
    num_batch, num_other = len(batch[side]), jnp.ndim(other) - len(contracted[side]) - len(batch[side])
    ones = [1] * num_other
    layout = (
        [*here[:num_batch], *here[num_batch:], *ones]
        if side == 0
        else [*here[:num_batch], *ones, *here[num_batch:]]
    )
    nnz = rows.shape[0] * math.prod(lengths[: len(contracted[side])])
    return [_spread(moved.reshape(nnz, *layout), _shape(eqn))]


def _no_rows(shape):
    return jnp.full((1, *shape), ABSENT, jnp.int32)


_MULTIPLE = (_squared_multiple, _rows_multiple)

RULES: dict[str, Rule] = {
    "add": Rule(_any, _squared_sum, _rows_sum),
    "sub": Rule(_any, _squared_sum, _rows_sum),
    "neg": Rule(_any, _squared_neg, _rows_multiple),
    "mul": Rule(_exactly_one, *_MULTIPLE),
    "div": Rule(_only(0, 1), *_MULTIPLE),
    "integer_pow": Rule(_first_power, *_MULTIPLE),
    "convert_element_type": Rule(_from_floating, *_MULTIPLE),
    "dot_general": Rule(_exactly_one, _squared_multiple, _rows_dot_general),
    "reduce_sum": Rule(_any, _squared_same, _rows_reduce_sum),
    "cumsum": Rule(_any, _squared_same, _rows_cumsum),
    "triangular_solve": Rule(_only(1, None)),
    **{
        name: _move(0, 1)
        for name in (
            "broadcast_in_dim",
            "copy",
            "copy_p",
            "dynamic_slice",
            "gather",
            "name",
            "reshape",
            "rev",
            "slice",
            "split",
            "squeeze",
            "tile",
            "transpose",
            "unstack",
        )
    },
    **{name: _move(0, None) for name in ("concatenate", "stack")},
    "pad": _move(0, 2),
    "select_n": _move(1, None),
    "dynamic_update_slice": _move(0, 2),
    "scatter": _move(0, 3, 2),
}
