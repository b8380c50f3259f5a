"""Closed expectations of log densities against quadrature, formulas and sampling."""

import dataclasses
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.flatten_util import ravel_pytree
from jax.scipy import stats
from numpyro.infer.util import initialize_model

from jointcv.moments import read_moments, verify_moments

jax.config.update("jax_enable_x64", True)

KEY = jax.random.key(7)
ROOT = np.linalg.cholesky(np.cov(np.random.default_rng(0).normal(size=(4, 30))) + np.eye(4))
DESIGN = np.random.default_rng(1).normal(size=(5, 3))


def log_scale(density):
    """The log density of z where exp(z) has this one."""
    return lambda z: density.log_prob(jnp.exp(z)).sum() + z.sum()


def hierarchical(z):
    return dist.Normal(z[0], jnp.exp(z[1])).log_prob(z[2:]).sum() + dist.Normal(0.0, 2).log_prob(z[:2]).sum()


def numpyro_density(model):
    """log density of a flat unconstrained z, and its dimension."""
    info = initialize_model(jax.random.key(0), model)
    flat, unravel = ravel_pytree(info.param_info.z)
    return lambda z: -info.potential_fn(unravel(z)), flat.size


def scales():
    numpyro.sample("half", dist.HalfNormal(2.0))
    numpyro.sample("gamma", dist.Gamma(2.0, 3.0))
    numpyro.sample("inverse", dist.InverseGamma(2.0, 1.5))
    numpyro.sample("flat", dist.ImproperUniform(dist.constraints.real, (), ()))


def groups():
    mean = numpyro.sample("mean", dist.Normal(0.5, 1.5))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("group", 2):
        numpyro.sample("effect", dist.Normal(mean, scale))


def random_walk():
    numpyro.sample("walk", dist.GaussianRandomWalk(0.3, num_steps=4))


def masked():
    with numpyro.handlers.scale(scale=3.0), numpyro.plate("group", 3):
        numpyro.sample("x", dist.Normal(1.0, 2.0).mask(jnp.array([True, False, True])))


# name: (log density, dimension); all of it has a closed expectation
CLOSED = {
    "standard normal": (lambda z: dist.Normal(0.0, 1).log_prob(z).sum(), 3),
    "normal": (lambda z: dist.Normal(jnp.arange(3.0), jnp.array([0.5, 1.0, 2.0])).log_prob(z).sum(), 3),
    "by hand": (lambda z: -0.5 * jnp.vdot(z, z), 3),
    "scipy": (lambda z: stats.norm.logpdf(z[:2], z[2], jnp.exp(z[3])).sum(), 4),
    "cholesky": (lambda z: dist.MultivariateNormal(jnp.ones(4), scale_tril=jnp.asarray(ROOT)).log_prob(z), 4),
    "precision": (
        lambda z: dist.MultivariateNormal(0.3, precision_matrix=jnp.asarray(ROOT @ ROOT.T)).log_prob(z),
        4,
    ),
    "quadratic form": (lambda z: z @ jnp.asarray(ROOT @ ROOT.T) @ z - jnp.sum(z @ ROOT), 4),
    "latent mean of a multivariate normal": (
        lambda z: dist.MultivariateNormal(z[0] * jnp.ones(3), scale_tril=ROOT[:3, :3]).log_prob(z[1:]),
        4,
    ),
    "hierarchical": (hierarchical, 4),
    "latent precision": (
        lambda z: dist.Normal(z[0], 1 / jnp.sqrt(jnp.exp(z[1]))).log_prob(z[2:]).sum(),
        4,
    ),
    "product of scales": (
        lambda z: dist.Normal(0.0, jnp.exp(z[0]) * jnp.exp(z[1])).log_prob(z[2:]).sum(),
        4,
    ),
    "scale of itself": (lambda z: dist.Normal(z[1], jnp.exp(z[0] - 0.3 * z[1])).log_prob(z[0]), 2),
    "half normal": (log_scale(dist.HalfNormal(2.0)), 3),
    "exponential": (log_scale(dist.Exponential(0.7)), 3),
    "gamma": (log_scale(dist.Gamma(2.0, 3.0)), 3),
    "inverse gamma": (log_scale(dist.InverseGamma(2.0, 0.5)), 3),
    "log normal": (log_scale(dist.LogNormal(1.0, 0.5)), 3),
    "weibull": (log_scale(dist.Weibull(2.0, 1.5)), 3),
    "gumbel": (lambda z: dist.Gumbel(1.0, 0.8).log_prob(z).sum(), 3),
    "gamma with a latent rate": (
        lambda z: dist.Gamma(2.0, jnp.exp(z[0])).log_prob(jnp.exp(z[1:])).sum() + z.sum(),
        3,
    ),
    "half normal with a latent scale": (
        lambda z: dist.HalfNormal(jnp.exp(z[0])).log_prob(jnp.exp(z[1:])).sum() + z.sum(),
        3,
    ),
    "cubic and quartic": (lambda z: jnp.sum((z - 0.3 * z[0]) ** 3 - 0.1 * z**4) - z[0] * z[1] * z[2], 3),
    "tilted square": (lambda z: -jnp.sum((z[:2] + z[1:]) ** 2 * jnp.exp(0.3 * z[:2] - 0.2 * z[1:])), 3),
    "regression": (lambda z: dist.Normal(jnp.asarray(DESIGN) @ z, 0.8).log_prob(jnp.ones(5)).sum(), 3),
    "mixed scales": (
        lambda z: dist.Normal(0.0, jnp.concatenate([jnp.exp(z[:1]), jnp.ones(1)])).log_prob(z[1:]).sum(),
        3,
    ),
    "selected": (
        lambda z: (
            dist.Normal(0.0, jnp.exp(z[:2])[jnp.array([1, 0, 1])]).log_prob(jnp.stack([z[2]] * 3)).sum()
        ),
        3,
    ),
    "irregular": (
        lambda z: -jnp.sum(jnp.exp(0.5 * z)[jnp.array([0, 1, 3])]) - jnp.sum(z[jnp.array([3, 0])] ** 2),
        4,
    ),
    "updated": (lambda z: -jnp.sum(jnp.zeros(4).at[1:4].set(z).at[0].set(z[2]) ** 2 * jnp.arange(4.0)), 3),
    "padded and reversed": (lambda z: -jnp.sum(jnp.cumsum(jnp.pad(z[::-1], 1, constant_values=0.5)) ** 2), 3),
    "inside jit, remat and custom_jvp": (
        lambda z: jax.jit(jax.checkpoint(lambda x: -jnp.sum(jnp.exp(x) + jax.nn.relu(1.0) * x**2)))(z),
        3,
    ),
    "vmapped": (lambda z: jax.vmap(dist.Normal(z[2], jnp.exp(z[3])).log_prob)(z[:2]).sum(), 4),
    "constant": (lambda z: jnp.log(2.0), 2),
    "numpyro scales": numpyro_density(scales),
    "numpyro groups": numpyro_density(groups),
    "numpyro random walk": numpyro_density(random_walk),
    "numpyro scale and mask": numpyro_density(masked),
}


def normal_part(z):
    return dist.Normal(0.2, 1.5).log_prob(z[:2]).sum()


def cauchy_groups():
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    with numpyro.plate("group", 2):
        numpyro.sample("effect", dist.Normal(0.0, scale))


# name: (log density, dimension, its closed part, the coordinates of the rest)
PARTLY = {
    "student": (
        lambda z: normal_part(z) + dist.StudentT(3.0).log_prob(z[2:]).sum(),
        4,
        lambda z: normal_part(z) + dist.StudentT(3.0).log_prob(jnp.zeros(2)).sum(),
        [2, 3],
    ),
    "student with a latent scale": (
        lambda z: dist.StudentT(3.0, 0.0, jnp.exp(z[0])).log_prob(z[1]),
        2,
        lambda z: dist.StudentT(3.0).log_prob(0.0) - z[0],
        [0, 1],
    ),
    "half cauchy": (
        lambda z: normal_part(z) + log_scale(dist.HalfCauchy(1.0))(z[2:]),
        3,
        lambda z: normal_part(z) + jnp.log(2 / jnp.pi) + z[2],
        [2],
    ),
    "laplace": (
        lambda z: normal_part(z) + dist.Laplace(0.0, 2.0).log_prob(z[1:]).sum(),
        3,
        lambda z: normal_part(z) - 2 * jnp.log(4.0),
        [1, 2],
    ),
    "beta": (
        lambda z: normal_part(z) + dist.Beta(2.0, 3.0).log_prob(jax.nn.sigmoid(z[2])),
        3,
        normal_part,
        [2],
    ),
    "not differentiated": (
        lambda z: normal_part(z) - jnp.sum(z[2:] * jax.lax.stop_gradient(z[2:])),
        4,
        normal_part,
        [2, 3],
    ),
    "one row of several": (
        lambda z: -jnp.sum(jnp.stack([z[:2] ** 2, jnp.tanh(z[1:])]).mean(0) * jnp.arange(2.0)),
        3,
        lambda z: -0.5 * z[1] ** 2,
        [1, 2],
    ),
    "a branch": (
        lambda z: normal_part(z) + jnp.where(z[2] > 0, z[2], 2.0 * z[2]),
        3,
        normal_part,
        [2],
    ),
    "sum of exponentials": (
        lambda z: normal_part(z) - jnp.log(jnp.exp(z[2]) + jnp.exp(z[3])) + jnp.exp(z[2]),
        4,
        lambda z: normal_part(z) + jnp.exp(z[2]),
        [2, 3],
    ),
    "a loop": (
        lambda z: normal_part(z) + jax.lax.fori_loop(0, 3, lambda i, x: x * jnp.sin(x), z[2]),
        3,
        normal_part,
        [2],
    ),
    "softplus, whose derivative is its own": (
        lambda z: normal_part(z) - jax.nn.softplus(z[2]),
        3,
        normal_part,
        [2],
    ),
    "nothing closed": (lambda z: -jnp.log(jnp.sum(jnp.cosh(z))), 2, lambda z: 0.0, [0, 1]),
}


def quadrature(function, location, variance):
    """E function(z) on a grid of Gauss-Hermite nodes."""
    count = {1: 60, 2: 60, 3: 36}.get(location.size, 20)
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    grid = np.array(list(product(nodes, repeat=location.size)))
    mass = np.prod(list(product(weights / weights.sum(), repeat=location.size)), axis=1)
    return mass @ jax.vmap(function)(location + jnp.sqrt(variance) * grid)


def somewhere(dim):
    location, variance = jax.random.normal(KEY, (2, dim))
    return 0.5 * location, 0.3 * jax.nn.sigmoid(variance)


def with_gradients(expectation):
    return jax.jit(jax.value_and_grad(expectation, argnums=(0, 1)))


def assert_same_expectation(moments, function, tolerance=1e-8):
    location, variance = somewhere(moments.dim)
    found = with_gradients(moments.expectation)(location, variance)
    wanted = with_gradients(lambda m, v: quadrature(function, m, v))(location, variance)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CLOSED)
def test_closed_densities_agree_with_quadrature(name):
    function, dim = CLOSED[name]
    moments = read_moments(function, jnp.zeros(dim))
    assert moments.is_complete and not moments.touched.any()
    assert_same_expectation(moments, function)


@pytest.mark.parametrize("name", PARTLY)
def test_the_addends_without_closed_form_are_the_remainder(name):
    function, dim, closed_part, touched = PARTLY[name]
    moments = read_moments(function, jnp.zeros(dim))
    assert not moments.is_complete
    np.testing.assert_array_equal(np.flatnonzero(moments.touched), touched)
    assert_same_expectation(moments, closed_part)


@pytest.mark.parametrize("name", CLOSED | PARTLY)
def test_the_parts_add_up(name):
    function, dim = (CLOSED | PARTLY)[name][:2]
    z = jnp.zeros(dim)
    assert verify_moments(read_moments(function, z), function, z, KEY) is None


@pytest.mark.parametrize("name", CLOSED)
def test_without_variance_it_is_the_density_and_its_curvature(name):
    function, dim = CLOSED[name]
    moments = read_moments(function, jnp.zeros(dim))
    z, _ = somewhere(dim)
    curvature = jax.grad(moments.expectation, argnums=1)(z, jnp.zeros(dim))
    np.testing.assert_allclose(moments.closed(z), function(z), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(curvature, 0.5 * jnp.diag(jax.hessian(function)(z)), rtol=1e-9, atol=1e-9)


def test_numpyro_mixes_closed_and_open_sites():
    function, dim = numpyro_density(cauchy_groups)
    moments = read_moments(function, jnp.zeros(dim))
    assert moments.touched.sum() == 1 and not moments.is_complete
    assert verify_moments(moments, function, jnp.zeros(dim), KEY) is None
    scale = int(np.flatnonzero(moments.touched)[0])
    effects = np.delete(np.arange(dim), scale)
    assert_same_expectation(
        moments,
        lambda z: (
            dist.Normal(0.0, jnp.exp(z[scale])).log_prob(z[effects]).sum() + jnp.log(2 / jnp.pi) + z[scale]
        ),
    )


@pytest.mark.parametrize("dim", [20, 100])
def test_dense_precision_against_the_formula(dim):
    root = np.random.default_rng(2).normal(size=(dim, dim)) / np.sqrt(dim)
    precision = root @ root.T + np.eye(dim)
    moments = read_moments(
        dist.MultivariateNormal(jnp.ones(dim), precision_matrix=jnp.asarray(precision)).log_prob,
        jnp.zeros(dim),
    )
    location, variance = somewhere(dim)
    value, (slope, curvature) = with_gradients(moments.expectation)(location, variance)
    _, log_det = np.linalg.slogdet(precision / (2 * np.pi))
    away = np.asarray(location) - 1
    wanted = 0.5 * (log_det - away @ precision @ away - np.diag(precision) @ variance)
    assert moments.is_complete
    np.testing.assert_allclose(value, wanted, rtol=1e-10)
    np.testing.assert_allclose(slope, -precision @ away, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(curvature, -0.5 * np.diag(precision), rtol=1e-9)


GROUPS, GENRES, USERS = 3, 2, 40


def weights_of_users(z):
    mean, log_scale, weights = jnp.split(z, [GROUPS * GENRES, 2 * GROUPS * GENRES])
    mean, log_scale = mean.reshape(GROUPS, GENRES), log_scale.reshape(GROUPS, GENRES)
    weights = weights.reshape(USERS, GROUPS, GENRES)
    hyper = dist.Normal(0.0, 1).log_prob(mean).sum() + dist.Normal(0.0, 1).log_prob(log_scale).sum()
    return hyper + dist.Normal(mean, jnp.exp(log_scale)).log_prob(weights).sum()


def test_hierarchy_over_groups_against_the_formula():
    dim = (2 + USERS) * GROUPS * GENRES
    moments = read_moments(weights_of_users, jnp.zeros(dim))

    def formula(location, variance):
        def split(x):
            return x[:6], x[6:12], x[12:].reshape(USERS, 6)

        (m, s, w), (vm, vs, vw) = split(location), split(variance)
        hyper = -0.5 * jnp.sum(location[:12] ** 2 + variance[:12])
        residual = ((w - m) ** 2 + vw + vm) * jnp.exp(-2 * s + 2 * vs)
        return hyper - jnp.sum(0.5 * residual + s) - 0.5 * dim * jnp.log(2 * jnp.pi)

    found, wanted = (with_gradients(e)(*somewhere(dim)) for e in (moments.expectation, formula))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    indices = [leaf for leaf in jax.tree.leaves(moments) if jnp.issubdtype(leaf.dtype, jnp.integer)]
    assert not indices  # everything is read in slices
    assert max(leaf.size for leaf in jax.tree.leaves(moments)) <= 2 * GROUPS * GENRES


def test_hierarchy_over_groups_against_sampling():
    dim = (2 + USERS) * GROUPS * GENRES
    location, variance = somewhere(dim)
    draws = location + jnp.sqrt(variance) * jax.random.normal(KEY, (20_000, dim))
    values = jax.vmap(weights_of_users)(draws)
    expectation = read_moments(weights_of_users, location).expectation(location, variance)
    assert abs(values.mean() - expectation) < 4 * values.std() / np.sqrt(values.size)


def test_too_large_a_form_is_left_to_the_remainder():
    function = lambda z: -jnp.sum(jnp.outer(z, z) ** 2) - jnp.sum(z)  # noqa: E731
    moments = read_moments(function, jnp.zeros(4_000))
    assert not moments.is_complete and moments.touched.all()
    np.testing.assert_allclose(moments.expectation(jnp.ones(4_000), jnp.ones(4_000)), -4_000.0)


def test_unused_elements_cannot_overflow():
    moments = read_moments(lambda z: -jnp.sum(jnp.exp(z)[:2]) + 0.0 * jnp.exp(z[3]), jnp.zeros(4))
    location = jnp.array([0.0, 0.0, 1e4, 1e4])
    gradient = jax.grad(moments.expectation)(location, jnp.ones(4))
    np.testing.assert_allclose(gradient, [-np.exp(0.5)] * 2 + [0.0, 0.0])


def test_captured_arrays_are_arguments():
    captured = jnp.linspace(0.5, 2.0, 50)
    student = lambda z: dist.StudentT(3.0, captured).log_prob(z).sum()  # noqa: E731
    moments = read_moments(lambda z: student(z) - jnp.sum(captured * z**2), jnp.zeros(50))
    assert sum(leaf.shape == (50,) for leaf in jax.tree.leaves(moments)) >= 2
    doubled = jax.jit(lambda m: (m.remainder(captured), m.expectation(captured, captured)))(moments)
    np.testing.assert_allclose(doubled[0], moments.remainder(captured))
    np.testing.assert_allclose(doubled[1], moments.expectation(captured, captured))


def test_a_jitted_caller_traces_once():
    moments = read_moments(CLOSED["hierarchical"][0], jnp.zeros(4))
    traces = []

    @eqx.filter_jit
    def value(moments, z):
        traces.append(1)
        return moments.closed(z)

    value(moments, jnp.zeros(4))
    value(read_moments(CLOSED["hierarchical"][0], jnp.zeros(4)), jnp.ones(4))
    assert len(traces) == 1


def test_reading_while_tracing():
    def outer(scale, z):
        moments = read_moments(lambda z: dist.Normal(0.0, 2).log_prob(z).sum() + jnp.sum(scale * z), z)
        assert moments.terms and not moments.is_complete  # the scale is not known yet
        return moments.closed(z) + moments.remainder(z)

    z = jnp.arange(3.0)
    found = jax.jit(outer)(jnp.float64(1.5), z)
    np.testing.assert_allclose(found, dist.Normal(0.0, 2).log_prob(z).sum() + 4.5, rtol=1e-12)


def test_the_remainder_keeps_derivative_rules():
    @jax.custom_jvp
    def guarded(x):
        return jnp.sqrt(x**2 - 2 * x + 1 + 0 * jnp.sin(x))

    @guarded.defjvp
    def _(primals, tangents):
        return guarded(*primals), 7.0 * tangents[0]

    moments = read_moments(lambda z: normal_part(z) + guarded(z[2]), jnp.zeros(3))
    np.testing.assert_allclose(jax.grad(moments.remainder)(jnp.ones(3)), [0.0, 0.0, 7.0])


def test_single_precision():
    z = jnp.zeros(4, jnp.float32)
    moments = read_moments(hierarchical, z)
    assert moments.expectation(z, z).dtype == jnp.float32
    assert verify_moments(moments, hierarchical, z, KEY) is None


def test_verification_finds_a_wrong_part():
    function = lambda z: normal_part(z) + dist.StudentT(3.0).log_prob(z[2:]).sum()  # noqa: E731
    z = jnp.zeros(4)
    right = read_moments(function, z)
    other = read_moments(lambda z: 1.1 * normal_part(z) + dist.StudentT(3.0).log_prob(z[2:]).sum(), z)
    untouched = dataclasses.replace(right, touched_bits=b"\x20")
    assert verify_moments(right, function, z, KEY) is None
    assert "closed" in str(verify_moments(other, function, z, KEY))
    assert "depends" in str(verify_moments(untouched, function, z, KEY))
