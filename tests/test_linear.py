"""What one datum sees: the split is found, it is exact, and where there is none a reason is given."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from hypothesis import given, settings
from jax import lax
from jax.flatten_util import ravel_pytree

from jointcv.linear import NoSplit, Split, offenders, split, squares_hold, verify
from random_models import MODELS

jax.config.update("jax_enable_x64", True)


@pytest.fixture(autouse=True)
def mixed_types():
    """The models here are written as users write them, and NumPyro's own code mixes types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


NUM_DATA, FEATURES, CLASSES = 7, 4, 3
KEY = jax.random.key(0)
X = jax.random.normal(KEY, (NUM_DATA, FEATURES))
COUNTS = jnp.arange(NUM_DATA) % 3
BINARY = COUNTS % 2
REAL = jnp.sin(jnp.arange(float(NUM_DATA)))
FIRST = jnp.array([0, 1, 2, 3, 4, 5, 0])
SECOND = jnp.array([1, 2, 3, 4, 5, 0, 3])
THIRD = jnp.array([5, 0, 1, 1, 3, 2, 4])


def bernoulli(eta, y):
    return y * eta - jax.nn.softplus(eta)


def logistic(z, datum):
    x, y = datum
    return bernoulli(x @ z, y)


def logistic_with_intercept(z, datum):
    x, y = datum
    return bernoulli(x @ z[1:] + z[0], y)


def logistic_with_offset(z, datum):
    x, y, offset = datum
    return bernoulli(2.0 * (x @ z) + jnp.exp(offset) - 1.0, y)


def softmax(z, datum):
    x, y = datum
    return jax.nn.log_softmax(x @ z.reshape(FEATURES, CLASSES))[y]


def poisson(z, datum):
    x, y = datum
    return y * (x @ z) - jnp.exp(x @ z)


def linear_known_scale(z, datum):
    x, y = datum
    return -0.5 * ((y - x @ z) / 0.3) ** 2


def robust(z, datum):
    x, y = datum
    return dist.StudentT(4.0, x @ z[1:], jnp.exp(z[0])).log_prob(y)


def bradley_terry(z, datum):
    i, j, y = datum
    return bernoulli(z[i] - z[j], y)


def bradley_terry_with_draws(z, datum):
    i, j, y = datum
    a, b, draw = z[i], z[j], z[-1]
    return jax.nn.log_softmax(jnp.stack([a, b, 0.5 * (a + b) + draw]))[y]


def mixed_contrasts(z, datum):
    i, j, y = datum
    return jnp.sin(z[i] + z[j]) + y * jnp.exp(z[i] - z[j])


GROUPS = {"mean": jnp.zeros((FEATURES, 5)), "log_scale": jnp.zeros(5), "Z": jnp.zeros((6, FEATURES, 5))}


def movielens(z, datum):
    user, x, y = datum
    return dist.Categorical(logits=x @ ravel_pytree(GROUPS)[1](z)["Z"][user]).log_prob(y)


def crossed(z, datum):
    i, j, k, y = datum
    mu, a, b, c = z[0], z[1:7], z[7:13], z[13:19]
    return dist.Poisson(jnp.exp(mu + a[i] + b[j] + c[k])).log_prob(y)


def hierarchy(z, datum):
    i, y = datum
    return dist.Normal(z[0] + jnp.exp(z[1]) * z[2:][i], 1.0).log_prob(y)


def vmapped(z, datum):
    xs, y = datum
    return jnp.sum(jax.vmap(lambda x: bernoulli(x @ z, y))(xs))


def vmapped_gather(z, datum):
    indices, y = datum
    return bernoulli(jnp.sum(jax.vmap(lambda i: z[i])(indices)), y)


def jitted(z, datum):
    x, y = datum
    return jax.jit(lambda z: jax.jit(bernoulli)(jax.jit(jnp.dot)(x, z), y))(z)


def rematted(z, datum):
    x, y = datum
    return jax.checkpoint(lambda z: bernoulli(x @ z, y))(z)


def einsum(z, datum):
    x, y = datum
    return jax.nn.log_softmax(jnp.einsum("cf,f->c", z.reshape(CLASSES, FEATURES), x))[y]


def bilinear_einsum(z, datum):
    x, y = datum
    return bernoulli(jnp.einsum("i,ij,j->", x, z.reshape(FEATURES, FEATURES), x), y)


def numpyro_bernoulli(z, datum):
    x, y = datum
    return dist.Bernoulli(logits=x @ z).log_prob(y)


def numpyro_negative_binomial(z, datum):
    x, y = datum
    return dist.NegativeBinomial2(jnp.exp(x @ z[:-1]), jnp.exp(z[-1])).log_prob(y)


def random_walk(z, datum):
    i, y = datum
    return bernoulli(jnp.cumsum(z)[i], y)


def backwards(z, datum):
    i, y = datum
    return bernoulli(jnp.flip(lax.cumsum(z, reverse=True))[i], y)


def identified(z, datum):
    i, j, y = datum
    theta = jnp.concatenate([jnp.zeros(1), z, jnp.ones(1)])
    return bernoulli(theta[i] - jnp.pad(z, 1, constant_values=0.5)[j], y)


def missing_feature(z, datum):
    x, i, y = datum
    return bernoulli(jnp.sum(jnp.where(jnp.arange(FEATURES) == i, 1.0, x * z)), y)


def chosen_branch(z, datum):
    i, j, y = datum
    return bernoulli(jnp.where(i > 2, z[i], z[j]) + z[5] * 0.1, y)


def out_of_bounds(z, datum):
    i, y = datum
    return bernoulli(z.at[i - 3].get(mode="fill", fill_value=0.7), y)


def updated(z, datum):
    i, j, y = datum
    return bernoulli(lax.dynamic_update_slice(z, z[:1], (i,))[j] + 3.0 * z.T[1], y)


def stacked(z, datum):
    x, y = datum
    return bernoulli(jnp.stack([z[2], z[0], z[3], 0.5]) @ x + jnp.tile(z[1:2], 2)[1], y)


def unstacked(z, datum):
    x, y = datum
    first, *_, last = jnp.unstack(z.reshape(3, 2))
    return bernoulli(x[:2] @ first + x[2] * last[0], y)


def first_level_is_fixed(z, datum):
    i, y = datum
    return bernoulli(z.at[0].set(0.3).at[1].set(z[2])[i % 2] + z[5], y)


@jax.custom_jvp
def twice(x):
    return 2.0 * x


twice.defjvp(lambda primals, tangents: (twice(*primals), 2.0 * tangents[0]))


def custom_rule(z, datum):
    x, y = datum
    return bernoulli(twice(x @ z), y)


class Closure(eqx.Module):
    design: jax.Array

    def __call__(self, z, datum):
        i, y = datum
        return bernoulli(jax.jit(lambda z: self.design[i] @ z)(z), y)


class Found(NamedTuple):
    function: object
    dim: int
    data: tuple
    num_predictors: int
    squares: bool = True  # whether the squared map is exact for all of the data, and the supports disjoint


FOUND = [
    Found(logistic, FEATURES, (X, BINARY), 1),
    Found(logistic_with_intercept, FEATURES + 1, (X, BINARY), 1),
    Found(logistic_with_offset, FEATURES, (X, BINARY, REAL), 1),
    Found(softmax, FEATURES * CLASSES, (X, COUNTS), CLASSES),
    Found(poisson, FEATURES, (X, COUNTS), 1),
    Found(linear_known_scale, FEATURES, (X, REAL), 1),
    Found(robust, FEATURES + 1, (X, REAL), 2),
    Found(bradley_terry, 6, (FIRST, SECOND, BINARY), 1),
    Found(bradley_terry, 6, (FIRST, SECOND - 6, BINARY), 1),
    Found(bradley_terry_with_draws, 7, (FIRST, SECOND, COUNTS), 3),
    Found(mixed_contrasts, 6, (FIRST, SECOND, REAL), 2),
    Found(movielens, FEATURES * 5 + 5 + 6 * FEATURES * 5, (FIRST, X, COUNTS), 5),
    Found(crossed, 19, (FIRST, SECOND, THIRD, COUNTS), 1),
    Found(hierarchy, 8, (FIRST, REAL), 3),
    Found(vmapped, 4, (jnp.tile(X[:, None], (1, 2, 1)), BINARY), 2, False),
    Found(vmapped_gather, 6, (jnp.stack([FIRST, SECOND, THIRD], 1), BINARY), 1),
    Found(jitted, FEATURES, (X, BINARY), 1),
    Found(rematted, FEATURES, (X, BINARY), 1),
    Found(einsum, FEATURES * CLASSES, (X, COUNTS), CLASSES),
    Found(bilinear_einsum, FEATURES * FEATURES, (X, BINARY), 1),
    Found(numpyro_bernoulli, FEATURES, (X, BINARY), 1),
    Found(numpyro_negative_binomial, FEATURES + 1, (X, COUNTS), 2),
    Found(random_walk, 6, (FIRST, BINARY), 1),
    Found(backwards, 6, (FIRST, BINARY), 1),
    Found(identified, 4, (FIRST, SECOND, BINARY), 1),
    Found(missing_feature, FEATURES, (X, FIRST, BINARY), 1),
    Found(chosen_branch, 6, (jnp.minimum(FIRST, 4), jnp.minimum(SECOND, 4), BINARY), 1),
    Found(out_of_bounds, 2, (FIRST, BINARY), 1),
    Found(updated, 9, (FIRST + 3, SECOND + 3, BINARY), 1),
    Found(stacked, 5, (X, BINARY), 1),
    Found(unstacked, 6, (X, BINARY), 1),
    Found(first_level_is_fixed, 6, (FIRST, BINARY), 1),
    Found(custom_rule, FEATURES, (X, BINARY), 1),
    Found(Closure(X), FEATURES, (FIRST, BINARY), 1),
]


def row(data, index):
    return jax.tree.map(lambda leaf: leaf[index], data)


def found(function, z, data) -> Split:
    result = split(function, z, row(data, 0))
    assert isinstance(result, Split), result
    return result


def random_z(dim):
    return 0.5 * jax.random.normal(jax.random.key(1), (dim,))


def jacobians(parts, z, data):
    return jax.jit(jax.vmap(lambda datum: jax.jacobian(parts.predict)(z, datum)))(data)


def all_squared(parts, variance, data):
    return jax.jit(jax.vmap(parts.squared, in_axes=(None, 0)))(variance, data)


def name(value):
    return getattr(value.function, "__name__", type(value.function).__name__)


each_found = pytest.mark.parametrize("case", FOUND, ids=name)


@each_found
def test_split_is_small_and_exact(case):
    z = random_z(case.dim)
    parts = found(case.function, z, case.data)
    assert parts.num_predictors == case.num_predictors < case.dim
    assert verify(parts, case.function, z, case.data, KEY) is None
    eta = jax.jit(jax.vmap(parts.predict, in_axes=(None, 0)))(z, case.data)
    assert eta.shape == (NUM_DATA, case.num_predictors)
    values = jax.jit(jax.vmap(parts.outer))(eta, case.data)
    wanted = jax.jit(jax.vmap(case.function, in_axes=(None, 0)))(z, case.data)
    np.testing.assert_allclose(values, wanted, rtol=1e-12)


@each_found
def test_gradient_and_curvature_are_the_functions_own(case):
    z, datum = random_z(case.dim), row(case.data, 2)
    parts = found(case.function, z, case.data)

    def through(z):
        return parts.outer(parts.predict(z, datum), datum)

    for derivative in (jax.grad, jax.hessian):
        wanted = jax.jit(derivative(case.function))(z, datum)
        np.testing.assert_allclose(jax.jit(derivative(through))(z), wanted, rtol=1e-10, atol=1e-12)


@each_found
def test_offenders_are_those_of_the_jacobian(case):
    z = random_z(case.dim)
    parts = found(case.function, z, case.data)
    A = jacobians(parts, z, case.data)
    overlap = (jnp.sum(A != 0, axis=1) > 1).any(axis=1)
    offending = offenders(parts, z, case.data)
    assert not np.any(np.asarray(overlap) & ~offending)
    assert (squares_hold(parts, z, case.data) is None) == case.squares == (not offending.any())


@each_found
def test_squared_is_the_square_of_the_jacobian(case):
    z = random_z(case.dim)
    variance = jnp.exp(random_z(case.dim))
    parts = found(case.function, z, case.data)
    squared = all_squared(parts, variance, case.data)
    np.testing.assert_allclose(squared, jacobians(parts, z, case.data) ** 2 @ variance, rtol=1e-12)


@each_found
def test_split_goes_through_jit_as_an_argument(case):
    z, datum = random_z(case.dim), row(case.data, 1)
    parts = found(case.function, z, case.data)
    eta = eqx.filter_jit(lambda parts, z, datum: parts.predict(z, datum))(parts, z, datum)
    np.testing.assert_allclose(eta, parts.predict(z, datum), rtol=1e-12)


# No split


def ppca(z, datum):
    loadings, mean = z[:8].reshape(4, 2), z[8:]
    covariance = loadings @ loadings.T + jnp.eye(4)
    return dist.MultivariateNormal(mean, covariance).log_prob(datum)


def deep_network(z, datum):
    x, y = datum
    inner, outer, last = z[:3], z[3:12].reshape(3, 3), z[12:]
    return bernoulli(jnp.tanh(jnp.tanh(x * inner) @ outer) @ last, y)


def elementwise(z, datum):
    return jnp.sum(jnp.exp(z)) * datum


def looped(z, datum):
    return lax.fori_loop(0, 3, lambda i, total: total + z[i] * datum, 0.0)


def scanned(z, datum):
    return lax.scan(lambda total, zi: (total + zi * datum, None), 0.0, z)[0]


def branched(z, datum):
    return lax.cond(datum > 0, lambda: jnp.sum(z), lambda: z[0])


def thresholded(z, datum):
    return jnp.sum(jnp.where(z > datum, z, 0.0))


def rounded(z, datum):
    return jnp.sum(z.astype(int) * 1.0) * datum


@jax.custom_vjp
def straight_through(z, datum):
    return jnp.dot(jnp.sign(z), z) * datum


straight_through.defvjp(
    lambda z, datum: (straight_through(z, datum), datum),
    lambda datum, cotangent: (jnp.ones(5) * cotangent, None),
)


@pytest.mark.parametrize(
    ("function", "dim", "datum", "word"),
    [
        (ppca, 12, jnp.ones(4), "dot_general"),
        (deep_network, 15, (0.3, 1.0), "size 9"),
        (elementwise, 5, 1.0, "'exp'"),
        (looped, 5, 1.0, "scan"),
        (scanned, 5, 1.0, "'scan'"),
        (branched, 5, 1.0, "'cond'"),
        (thresholded, 5, 1.0, "size 5"),
        (rounded, 5, 1.0, "'convert_element_type'"),
        (straight_through, 5, 1.0, "'custom_vjp_call'"),
        (lambda z, datum: jnp.exp(z[0]) * jnp.cos(z[1]) * datum, 2, 1.0, "no fewer than z itself"),
        (lambda z, datum: datum, 5, 1.0, "does not depend on z"),
        (lambda z, datum: datum + 0.0 * lax.stop_gradient(jnp.sum(jnp.zeros(3))), 5, 1.0, "does not depend"),
    ],
)
def test_no_split_gives_a_reason(function, dim, datum, word):
    result = split(function, jnp.ones(dim), datum)
    assert isinstance(result, NoSplit)
    assert word in result.reason


def test_reason_names_primitive_size_and_source_line():
    result = split(elementwise, jnp.ones(5), 1.0)
    assert isinstance(result, NoSplit)
    for word in ("'exp'", "test_linear.py", "elementwise", "size 5", "5 linear predictors"):
        assert word in result.reason


def test_network_with_many_inputs_is_seen_through_its_hidden_layer():
    def network(z, datum):
        x, y = datum
        weights, bias, last = z[:20].reshape(10, 2), z[20:22], z[22:]
        return bernoulli(jnp.tanh(x @ weights + bias) @ last, y)

    data = (jnp.ones((3, 10)), jnp.ones(3))
    assert found(network, jnp.ones(24), data).num_predictors == 4


@pytest.mark.parametrize("bad", [jnp.ones((2, 2)), jnp.ones(())])
def test_z_must_be_flat(bad):
    with pytest.raises(ValueError, match="flat vector"):
        split(lambda z, datum: jnp.sum(z), bad, 1.0)


def test_function_must_be_scalar():
    with pytest.raises(ValueError, match="scalar"):
        split(lambda z, datum: z, jnp.ones(2), 1.0)


def test_datum_must_keep_its_structure():
    parts = found(logistic, jnp.ones(FEATURES), (X, BINARY))
    with pytest.raises(ValueError, match="structure"):
        parts.predict(jnp.ones(FEATURES), (X[0], 1, 2))


# Which data offend


def test_offenders_are_the_matches_of_a_player_with_himself():
    second = SECOND.at[jnp.array([2, 5])].set(FIRST[jnp.array([2, 5])])
    data, z = (FIRST, second, BINARY), random_z(6)
    parts = found(bradley_terry, z, data)
    np.testing.assert_array_equal(offenders(parts, z, data), np.isin(np.arange(NUM_DATA), [2, 5]))
    reason = squares_hold(parts, z, data)
    assert reason is not None
    for word in ("datum 2", "2 of 7", "one predictor by two paths"):
        assert word in reason
    variance = jnp.ones(6)
    squared = all_squared(parts, variance, data)
    wrong = squared[:, 0] != jnp.sum(jacobians(parts, z, data)[:, 0] ** 2, axis=-1)
    np.testing.assert_array_equal(wrong, offenders(parts, z, data))


def test_negative_and_clamped_indices_are_the_same_player():
    i, j = jnp.array([5, 0, 9, 1]), jnp.array([-1, 1, 5, -6])
    data = (i, j, jnp.ones(4))
    z = random_z(6)
    parts = found(bradley_terry, z, data)
    np.testing.assert_array_equal(offenders(parts, z, data), [True, False, True, False])


def test_many_chunks_agree_with_a_plain_comparison():
    def many(z, datum):
        return bernoulli(jnp.sum(z[datum]), 1.0)

    rng = np.random.default_rng(0)
    data, z = jnp.asarray(rng.integers(0, 5000, (3000, 40))), jnp.zeros(5000)
    parts = found(many, z, data)
    wanted = np.array([len(set(indices)) < 40 for indices in np.asarray(data)])
    assert 0 < wanted.sum() < 3000
    import jointcv.linear as linear

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "CHUNK", 40 * 700)
        np.testing.assert_array_equal(offenders(parts, z, data), wanted)


def test_predictors_that_share_a_coordinate_offend():
    def shared(z, datum):
        x, i, y = datum
        return jnp.sin(x @ z) + y * jnp.exp(z[i])

    data, z = (X, FIRST % 4, REAL), random_z(FEATURES)
    reason = squares_hold(found(shared, z, data), z, data)
    assert reason is not None
    assert "two predictors in datum 0 (7 of 7" in reason


def test_dense_rows_are_compared_once():
    def paired(z, datum):
        x, y = datum
        return bernoulli(x @ jnp.concatenate([z[:2], z[:2]]) + z[2], y)

    z = random_z(3)
    parts = found(paired, z, (X, BINARY))
    assert offenders(parts, z, (X, BINARY)).all()


def test_linear_without_squares_says_so():
    factor = jnp.tril(jnp.ones((FEATURES, FEATURES)))

    def whitened(z, datum):
        i, y = datum
        return bernoulli(jax.scipy.linalg.solve_triangular(factor, z, lower=True)[i], y)

    data, z = (FIRST % 4, BINARY), random_z(FEATURES)
    parts = found(whitened, z, data)
    assert verify(parts, whitened, z, data, KEY) is None
    assert "'triangular_solve'" in str(squares_hold(parts, z, data))
    assert offenders(parts, z, data).all()
    with pytest.raises(ValueError, match="triangular_solve"):
        parts.squared(z, row(data, 0))


def test_too_many_rows_are_refused_without_being_made(monkeypatch):
    import jointcv.linear as linear

    monkeypatch.setattr(linear, "MAX_ROWS", 3)
    z = random_z(FEATURES)
    assert "too many" in str(squares_hold(found(logistic, z, (X, BINARY)), z, (X, BINARY)))


# Constants, verification, types


def test_constants_are_leaves_and_not_baked_in():
    table = jax.random.normal(KEY, (500, FEATURES))
    numbers = np.arange(300.0)

    def function(z, datum):
        i, y = datum
        offset = lax.scan(
            lambda total, k: (total + numbers[0] + jnp.asarray(numbers)[k], None), 0.0, i[None]
        )[0]
        return bernoulli(jax.jit(lambda z: table[i] @ z)(z) + offset, y)

    z, data = random_z(FEATURES), (FIRST, BINARY)
    parts = found(function, z, data)
    assert {(500, FEATURES), (300,)} <= {leaf.shape for leaf in jax.tree.leaves(parts)}
    for method in (Split.predict, Split.squared):
        closed = jax.make_jaxpr(jax.jit(method))(parts, z, row(data, 0))
        assert all(np.size(constant) <= 1 for constant in closed.consts)
        assert "500,4]" in str(closed.jaxpr.invars[0].aval) + str([v.aval for v in closed.jaxpr.invars])
    other = eqx.tree_at(lambda parts: parts.constants, parts, tuple(0 * c for c in parts.constants))
    np.testing.assert_array_equal(jax.jit(Split.predict)(other, z, row(data, 0)), 0.0)


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (lambda z, datum: logistic(z, datum) + 1e-3, "value"),
        (lambda z, datum: lax.stop_gradient(logistic(z, datum)), "gradient"),
    ],
)
def test_verify_finds_what_differs(broken, word):
    z, data = random_z(FEATURES), (X, BINARY)
    assert word in str(verify(found(logistic, z, data), broken, z, data, KEY))


def test_verify_finds_a_predict_with_another_derivative():
    @jax.custom_jvp
    def clipped(x):
        return 2.0 * x

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), 0.5 * tangents[0]))
    z, data = random_z(FEATURES), (X, BINARY)

    def function(z, datum):
        x, y = datum
        return bernoulli(clipped(x @ z), y)

    assert "step" in str(verify(found(function, z, data), function, z, data, KEY))


def test_float32_stays_float32():
    z, data = random_z(FEATURES).astype(jnp.float32), (X.astype(jnp.float32), BINARY)
    parts = found(poisson, z, data)
    assert parts.predict(z, row(data, 0)).dtype == jnp.float32
    assert parts.squared(z, row(data, 0)).dtype == jnp.float32
    assert verify(parts, poisson, z, data, KEY) is None


def test_written_twice_counts_once():
    def function(z, datum):
        x, i, y = datum
        return y * (x @ z + z[i]) - jnp.exp(x @ z + z[i])

    assert found(function, random_z(FEATURES), (X, FIRST % 4, BINARY)).num_predictors == 1


def test_disjoint_supports_are_preferred():
    z, data = random_z(6), (FIRST, SECOND, REAL)
    parts = found(mixed_contrasts, z, data)
    A = jacobians(parts, z, data)
    assert (jnp.sum(A != 0, axis=1) <= 1).all()


# Random maps


@settings(max_examples=25, deadline=None, derandomize=True)
@given(function=MODELS)
def test_random_maps(function):
    z, data = random_z(function.dim), jax.random.normal(KEY, (3, 6))
    parts = found(function, z, data)
    assert parts.num_predictors <= 4
    assert verify(parts, function, z, data, KEY) is None
    A = jacobians(parts, z, data)
    offending = offenders(parts, z, data)
    overlap = (jnp.sum(jnp.abs(A) > 1e-12, axis=1) > 1).any(axis=1)
    assert not np.any(np.asarray(overlap) & ~offending)
    variance = jnp.exp(z)
    squared = all_squared(parts, variance, data)
    np.testing.assert_allclose(squared[~offending], (A**2 @ variance)[~offending], rtol=1e-9)


def test_split_needs_only_shapes():
    shapes = jax.eval_shape(lambda: (random_z(6), row((FIRST, SECOND, REAL), 0)))
    parts = split(mixed_contrasts, *shapes)
    assert isinstance(parts, Split) and parts.num_predictors == 2


def test_split_while_tracing():
    def traced(z, datum):
        parts = split(mixed_contrasts, z, datum)
        assert isinstance(parts, Split)
        return parts.outer(parts.predict(z, datum), datum)

    z, datum = random_z(6), row((FIRST, SECOND, REAL), 1)
    np.testing.assert_allclose(jax.jit(traced)(z, datum), mixed_contrasts(z, datum), rtol=1e-12)


def test_verify_allows_for_the_coarsest_type():
    def function(z, datum):
        x, y = datum
        return bernoulli((x.astype(jnp.float32) @ z.astype(jnp.float32)), y.astype(jnp.float32))

    z, data = random_z(FEATURES), (X, REAL)
    parts = found(function, z, data)
    assert parts.predict(z, row(data, 0)).dtype == jnp.float64
    assert verify(parts, function, z, data, KEY) is None


def test_the_split_itself_mixes_no_types():
    def function(z, datum):
        i, j, x, y = datum
        eta = z.astype(jnp.float32)[i] - jnp.cumsum(z[:4]).astype(jnp.float32)[j % 4]
        return jnp.sum(jax.nn.log_softmax(x @ z.reshape(4, 3))) * y + jnp.sin(eta).astype(z.dtype)

    z, data = random_z(12), (FIRST, SECOND, X, REAL)
    with jax.numpy_dtype_promotion("strict"):
        parts = found(function, z, data)
        assert parts.num_predictors == 4
        assert verify(parts, function, z, data, KEY) is None
        assert "7 of 7" in str(squares_hold(parts, z, data))
        all_squared(parts, z, data)


@each_found
def test_rows_are_the_support_of_the_jacobian(case):
    z = random_z(case.dim)
    parts = found(case.function, z, case.data)
    A = jacobians(parts, z, case.data)
    for index in range(NUM_DATA):
        entries = [
            np.asarray(rows).reshape(rows.shape[0], -1).T for rows in parts.rows(row(case.data, index))
        ]
        read = [set(entry[entry >= 0].tolist()) for rows in entries for entry in rows]
        assert read == [set(np.flatnonzero(predictor).tolist()) for predictor in A[index]]


def test_product_of_two_latents_is_not_linear():
    z, data = random_z(6), (FIRST, SECOND, REAL)
    parts = found(lambda z, datum: datum[2] * jnp.sin(z[datum[0]] * z[datum[1]]), z, data)
    assert parts.num_predictors == 2


def test_what_the_output_does_not_need_is_ignored():
    def function(z, datum):
        jnp.exp(z)
        return logistic(z, datum)

    assert found(function, random_z(FEATURES), (X, BINARY)).num_predictors == 1
