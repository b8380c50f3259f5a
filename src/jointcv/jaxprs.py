"""Jaxprs taken apart: calls entered, equal equations merged, and the equations that some values need.

An *atom* is what an equation reads: a variable or a literal. Everything here maps jaxprs to jaxprs, except
`bind`, which computes.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var


def variables(atoms: Iterable) -> list[Var]:
    """The atoms without the literals."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def size(atom: Var | Literal) -> int:
    """The number of entries of a value."""
    return math.prod(atom.aval.shape)  # pyright: ignore


def read(atom, values: dict[Var, Any]):
    """The value of an atom."""
    return atom.val if isinstance(atom, Literal) else values[atom]


def depends(equation: JaxprEqn, known: Collection[Var]) -> list[bool]:
    """Which operands of an equation are among these variables."""
    return [isinstance(operand, Var) and operand in known for operand in equation.invars]


def reached(equations: Iterable[JaxprEqn], start: Iterable[Var]) -> set[Var]:
    """Everything that depends on `start`, itself included."""
    found = set(start)
    for equation in equations:
        if any(depends(equation, found)):
            found.update(equation.outvars)
    return found


def needed(equations: Sequence[JaxprEqn], outputs: Iterable, given: Iterable[Var] = ()) -> list[JaxprEqn]:
    """The equations that lead to `outputs`, in order, when the variables in `given` are inputs."""
    given = set(given)
    wanted = set(variables(outputs)) - given
    kept = []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            kept.append(equation)
            wanted.update(set(variables(equation.invars)) - given)
    return kept[::-1]


def piece(inputs: Sequence[Var], outputs: Sequence, equations: Sequence[JaxprEqn]) -> Jaxpr:
    """A jaxpr of some of the equations of another."""
    effects = frozenset().union(*(equation.effects for equation in equations))
    debug_info = DebugInfo("jointcv.jaxprs", "piece", None, None)
    return Jaxpr((), list(inputs), list(outputs), list(equations), effects, debug_info)


def bind(equation: JaxprEqn, operands: Sequence[Any], **changed) -> list[Any]:
    """The outputs of an equation at these operands and with these parameters changed."""
    inputs: list[Any] = [Var(atom.aval) for atom in equation.invars]  # a variable may be read twice
    outputs = [Var(out.aval) for out in equation.outvars]
    equation = equation.replace(invars=inputs, outvars=outputs, params=equation.params | changed)
    # eval_jaxpr keeps the user's source line and custom derivative rules.
    return eval_jaxpr(piece(inputs, outputs, [equation]), (), *operands)


def called(equation: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]]:
    """The jaxpr that a call evaluates, and its constants."""
    inner = equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]
    return (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())


def flatten(closed: ClosedJaxpr, calls: Collection[str] = ("jit",)) -> ClosedJaxpr:
    """The same jaxpr with calls entered and equal equations merged.

    Args:
        closed: a jaxpr; its inputs stay the same variables.
        calls: the primitives that are replaced by what they call.

    Returns:
        A jaxpr in which what was written twice is computed once, and a constant occurs once.
    """
    constants: dict[int, tuple[Var, Any]] = {}
    merged: dict[Any, list[Var]] = {}
    kept: list[JaxprEqn] = []

    def enter(jaxpr: Jaxpr, values: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        atoms = dict(zip(jaxpr.invars, arguments, strict=True))
        for variable, value in zip(jaxpr.constvars, values, strict=True):
            atoms[variable] = constants.setdefault(id(value), (Var(variable.aval), value))[0]

        def look(atom):
            return atom if isinstance(atom, Literal) else atoms[atom]

        for equation in jaxpr.eqns:
            operands = [look(atom) for atom in equation.invars]
            if equation.primitive.name in calls:
                results = enter(*called(equation), operands)
            else:
                results = once(equation, operands)
            atoms.update(zip(equation.outvars, results, strict=True))
        return [look(atom) for atom in jaxpr.outvars]

    def once(equation: JaxprEqn, operands: list[Any]) -> list[Var]:
        key = _identity(equation, operands)
        if key in merged:
            return merged[key]
        results = [Var(out.aval) for out in equation.outvars]
        kept.append(equation.replace(invars=operands, outvars=results))
        if key is not None:
            merged[key] = results
        return results

    outputs = enter(closed.jaxpr, closed.consts, closed.jaxpr.invars)
    constvars = [variable for variable, _ in constants.values()]
    jaxpr = closed.jaxpr.replace(constvars=constvars, outvars=outputs, eqns=kept)
    return ClosedJaxpr(jaxpr, [value for _, value in constants.values()])


def _identity(equation: JaxprEqn, operands: list[Any]) -> Any:
    """What equal equations have in common; None for one that must not be merged or cannot be compared."""
    if equation.effects:
        return None
    names = [(str(atom.aval), str(atom.val)) if isinstance(atom, Literal) else atom for atom in operands]
    try:
        return equation.primitive, tuple(names), frozenset(equation.params.items())
    except TypeError:  # a parameter that has no hash
        return None
