"""Jaxprs taken apart, and minimum cuts against all subsets."""

from itertools import chain, combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import eval_jaxpr

from jointcv.cut import minimum_cuts
from jointcv.jaxprs import bind, flatten, needed, piece, reached, variables

TABLE = jnp.arange(12.0).reshape(4, 3)


def twice_called(z, i):
    """The same row, scaled by the same literal, in two calls."""
    first, second = (jax.jit(lambda i, scale: scale * TABLE[i]) for _ in range(2))
    return jnp.dot(first(i, 2.0), z) + jnp.sum(second(i, 2.0))


def traced(function, *inputs):
    return jax.make_jaxpr(function)(*inputs)


def names(jaxpr):
    return [equation.primitive.name for equation in jaxpr.eqns]


def test_flat_jaxprs_compute_the_same_and_each_thing_once():
    inputs = (jnp.array([1.0, -2.0, 0.5]), jnp.array(2))
    flat = flatten(traced(twice_called, *inputs))
    assert "jit" not in names(flat.jaxpr) and names(flat.jaxpr).count("mul") == 1
    assert sum(name in ("gather", "dynamic_slice") for name in names(flat.jaxpr)) == 1
    assert [constant.shape for constant in flat.consts] == [(4, 3)]
    found = eval_jaxpr(flat.jaxpr, flat.consts, *inputs)[0]
    np.testing.assert_allclose(found, twice_called(*inputs), rtol=1e-15)


def test_only_the_calls_that_are_named_are_entered():
    closed = traced(jax.checkpoint(lambda x: jnp.sin(x)), 1.0)
    assert names(flatten(closed).jaxpr) == names(closed.jaxpr) != ["sin"]
    assert names(flatten(closed, names(closed.jaxpr)).jaxpr) == ["sin"]


def test_effects_are_not_merged():
    def noisy(x):
        jax.debug.print("x")
        jax.debug.print("x")
        return x

    assert len(flatten(traced(noisy, 1.0)).jaxpr.eqns) == 2


def test_outputs_that_are_inputs_or_literals():
    flat = flatten(traced(jax.jit(lambda x, y: (y, 3.0, x)), 1.0, 2.0))
    assert [float(value) for value in eval_jaxpr(flat.jaxpr, flat.consts, 1.0, 2.0)] == [2.0, 3.0, 1.0]


def test_needed_and_reached():
    jaxpr = traced(lambda x, y: (jnp.exp(jnp.sin(x)), jnp.cos(y) * x), 1.0, 2.0).jaxpr
    first, second = jaxpr.outvars
    assert [e.primitive.name for e in needed(jaxpr.eqns, [first])] == ["sin", "exp"]
    sine = jaxpr.eqns[0].outvars[0]
    rest = needed(jaxpr.eqns, [first], [sine])
    assert names(piece([sine], [first], rest)) == ["exp"]
    assert reached(jaxpr.eqns, jaxpr.invars[1:]) & {first, second} == {second}
    assert len(variables(chain.from_iterable(e.invars for e in jaxpr.eqns))) == 5


def test_bind_at_other_operands():
    (equation,) = traced(lambda x: lax.concatenate([x, x], 0), jnp.ones(2)).jaxpr.eqns
    (moved,) = bind(equation, [jnp.array([0, 1]), jnp.array([2, 3])])
    np.testing.assert_array_equal(moved, jnp.arange(4))
    (equation,) = traced(lambda x: lax.integer_pow(x, 3), 2.0).jaxpr.eqns
    assert [float(value) for value in bind(equation, [2.0], y=2)] == [4.0]


def separates(cut, edges, sources, sinks):
    """Whether no sink is left within reach."""
    open_ = set(sources) - cut
    for start, end in edges:  # in topological order
        if start in open_ and end not in cut:
            open_.add(end)
    return not open_ & set(sinks)


@pytest.mark.parametrize("seed", range(20))
def test_minimum_cuts_against_all_subsets(seed):
    rng = np.random.default_rng(seed)
    prices = {vertex: int(rng.integers(1, 4)) for vertex in range(8)}
    edges = [(i, j) for i in range(8) for j in range(i + 1, 8) if rng.random() < 0.4]
    sources, sinks = [0, 1], [5, 7]
    subsets = map(set, chain.from_iterable(combinations(prices, k) for k in range(9)))
    cuts = [cut for cut in subsets if separates(cut, edges, sources, sinks)]
    least = min(sum(prices[v] for v in cut) for cut in cuts)
    cheapest = [cut for cut in cuts if sum(prices[v] for v in cut) == least]
    latest, earliest = minimum_cuts(prices, edges, sources, sinks)
    assert set(latest) in cheapest and set(earliest) in cheapest
    for cut in cheapest:  # the earliest shields every other from the sources, every other shields the latest
        assert separates(set(earliest), edges, sources, cut)
        assert separates(cut, edges, sources, latest)
