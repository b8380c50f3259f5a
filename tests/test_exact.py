"""Identities that hold to rounding: f, f~ and its mean, views, and a joint gradient without variance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import jointcv as jcv
from helpers import (
    KEY,
    NOISES,
    PREDICTORS,
    PRIOR_SD,
    PROBLEMS,
    REAL,
    X3,
    B,
    N,
    all_data,
    compose,
    estimates,
    flat,
    joint_setup,
    joint_setups,
    linear_exact_gradient,
    normal_grid,
    params_at,
)
from jointcv.elbo import ElboDraws
from jointcv.family import entropy
from jointcv.loop import start
from jointcv.plan import find_view
from jointcv.prior import closed_prior, sampled_prior

SETUPS = {name: rest for name, *rest in joint_setups()}
PAIRS = [
    (problem, noise)
    for problem in ["logistic2", "softmax", "poisson", "whole", "hierarchical"]
    for noise in NOISES
    if noise in ("parameter", "paper")
    or problem != "whole"
    and (noise != "quadrature" or PREDICTORS[problem] == 1)
]


def elbo_of(problem: str, noise: str) -> jcv.Elbo:
    each = jcv.JointCV(jcv.PerDatum())
    return compose(problem, noise, each, whole=problem == "whole").objective


@pytest.mark.parametrize("name", SETUPS)
def test_a_fresh_memory_leaves_no_variance_on_a_conjugate_problem(name):
    """f is quadratic in z and so equal to f~: with every w^n = w the joint gradient is the full-data gradient.

    The scale's too, wherever diag ∇²K is at hand: under a linear view, whatever the noise.
    """
    noise, memory, whole = SETUPS[name]
    algorithm = joint_setup("linear", noise, memory, whole)
    run = start(algorithm, KEY)
    params = algorithm.params(run.state)
    exact = linear_exact_gradient(X3, REAL, params)
    gradients = flat(estimates(algorithm, run, KEY, 30).gradient)
    scale_too = not whole
    upto = 6 if scale_too else 3
    assert_allclose(gradients[:, :upto], np.broadcast_to(exact[:upto], (30, upto)), rtol=0, atol=1e-10)
    if not scale_too:
        assert gradients[:, 3:].std(0).min() > 0.1  # the noise is there


@pytest.mark.parametrize("problem, noise", PAIRS)
def test_the_gradient_is_that_of_the_value(problem, noise):
    """∇f against differentiation of f itself; with quadrature f's own rule stands for the integral."""
    objective = elbo_of(problem, noise)
    params = params_at(objective.problem.dim)
    data, weights = objective.problem.take(np.arange(B)), jnp.linspace(0.1, 0.3, B)
    draws = objective.draw(KEY, params, data)

    def value(params):
        entry = objective.remember(params, data)
        return objective.value(entry, params, data, weights, draws) + objective.rest(params, draws)

    @jax.jit
    def both(params):
        entry = objective.remember(params, data)
        gradient = objective.gradient(entry, params, data, weights, draws)
        return objective.pull(gradient, params, data, draws), jax.grad(value)(params)

    got, want = both(params)
    tolerance = 1e-6 if noise == "quadrature" else 1e-11
    assert_allclose(flat(got), flat(want), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("problem, noise", PAIRS)
def test_the_value_is_the_log_densities(problem, noise):
    """K_n + P − H at z = μ + σ⊙ε, datum by datum, from the user's functions; averaged where noise is integrated."""
    objective = elbo_of(problem, noise)
    problem = PROBLEMS[problem]
    params = params_at(problem.dim)
    data, weights = problem.take(np.arange(B)), jnp.linspace(0.1, 0.3, B)
    if noise in ("parameter", "paper"):
        draws = objective.draw(KEY, params, data)
        nodes, masses = np.asarray(draws.data)[None], np.ones(1)
    else:
        nodes, masses = normal_grid(problem.dim, {2: 40, 6: 7}[problem.dim])
    z = params.location + params.scale * nodes

    def losses(z):
        return jax.vmap(problem.likelihood_at, (None, 0))(z, data)

    terms = -problem.num_data * (jax.jit(jax.vmap(losses))(z) @ weights)
    entry = objective.remember(params, data)
    if noise == "predictor":
        points, masses_1d = normal_grid(
            objective.view.num_predictors, {1: 40, 3: 14}[objective.view.num_predictors]
        )
        rows = np.broadcast_to(points[:, None, :], (len(points), B, points.shape[-1]))

        @jax.jit
        def values(rows):
            return jax.vmap(lambda row: objective.value(entry, params, data, weights, ElboDraws(row, row)))(
                rows
            )

        got = masses_1d @ np.asarray(values(jnp.asarray(rows)))
    else:
        got = objective.value(entry, params, data, weights, objective.draw(KEY, params, data))
    expected = masses @ np.asarray(terms)
    if noise == "paper":  # the prior is in the table, with Σ weights of it
        expected = expected - float(weights.sum()) * float(problem.prior_at(z[0]))
    tolerance = 1e-11 if noise in ("parameter", "paper") else 1e-3 if problem.dim == 6 else 1e-6
    assert_allclose(got, expected, rtol=tolerance)


@pytest.mark.parametrize("problem, noise", [(p, n) for p, n in PAIRS if p != "hierarchical"])
def test_the_mean_of_the_approximation(problem, noise):
    """E_ε ∇f~ = `expected` against dense Gauss–Hermite sums of `sampled`, away from the remembered place.

    f~ is at most quadratic in ε and its scale part cubic, so three nodes are exact and five leave no doubt.
    """
    objective = elbo_of(problem, noise)
    params, old = params_at(objective.problem.dim), params_at(objective.problem.dim, seed=1)
    data, weights = objective.problem.take(np.arange(B)), jnp.linspace(0.1, 0.3, B)
    entry = objective.remember(old, data)
    want = objective.noise.expected(objective.summarise(entry, data, weights), params)

    def sampled(draws):
        noise = objective.noise
        pair = noise.sampled(objective.view, entry, params, data, weights, draws)
        return noise.pull(objective.view, pair, params, data, draws)

    if noise == "quadrature":
        assert_allclose(flat(sampled(None)), flat(want), rtol=1e-13)
        return
    if noise == "predictor":  # a datum's part depends on its own ξ_n alone: one grid for all
        points, masses = normal_grid(objective.view.num_predictors, 5)
        nodes = np.broadcast_to(points[:, None, :], (len(points), B, points.shape[-1]))
    else:
        nodes, masses = normal_grid(objective.problem.dim, 5 if objective.problem.dim == 2 else 3)

    gradients = jax.jit(jax.vmap(sampled))(jnp.asarray(nodes))
    assert_allclose(masses @ flat(gradients), flat(want), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["linear", "hierarchical"])
@pytest.mark.parametrize("read", [closed_prior, sampled_prior])
def test_the_prior_and_its_approximation(name, read):
    """P's f~ is the expansion by jax.hessian, at most cubic in ε; its mean agrees with quadrature."""
    problem = PROBLEMS[name]
    prior, params = read(problem), params_at(problem.dim)
    nodes, masses = normal_grid(problem.dim, 3)
    sampled = masses @ flat(jax.jit(jax.vmap(lambda draws: prior.sampled(params, draws)))(jnp.asarray(nodes)))
    assert_allclose(sampled, flat(prior.expected(params)), atol=1e-10)

    draws = 0.3 * jnp.arange(1.0, problem.dim + 1)
    gradient, approximation = prior.gradient(params, draws), prior.sampled(params, draws)
    if read is sampled_prior:
        v = params.scale * draws
        slope = -jax.grad(problem.prior_at)(params.location)
        bend = -jax.hessian(problem.prior_at)(params.location) @ v
        assert_allclose(approximation.location, slope + bend, atol=1e-12)
        assert_allclose(gradient.location, -jax.grad(problem.prior_at)(params.location + v), atol=1e-12)
        assert_allclose(gradient.log_scale, gradient.location * v, atol=1e-12)
    if name == "linear":  # a Gaussian prior has no noise left
        controlled = flat(gradient) - flat(approximation) + flat(prior.expected(params))
        exact = jnp.concatenate([params.location, params.variance]) / PRIOR_SD**2
        assert_allclose(controlled, exact, atol=1e-12)


@pytest.mark.parametrize("problem", ["logistic2", "softmax", "poisson", "whole", "hierarchical"])
@pytest.mark.parametrize("kind", ["found", "whole", "each"])
def test_a_view_shows_gradients_and_hessians(problem, kind):
    """value, slope, expand, bend, curvature and pull, composed with A, against jax.grad and jax.hessian in z."""
    problem = PROBLEMS[problem]
    view = {
        "found": lambda: find_view(problem).view,
        "whole": lambda: jcv.WholeView(problem),
        "each": lambda: jcv.WholeViewEach(problem),
    }[kind]()
    if kind == "found" and not isinstance(view, jcv.LinearView):
        kind = "whole"
    data, weights = problem.take(np.arange(B)), jnp.linspace(0.1, 0.3, B)
    params = params_at(problem.dim)
    place, step = params.location, params.scale

    def total(z):
        return -N * jnp.sum(weights * jax.vmap(problem.likelihood_at, (None, 0))(z, data))

    hessian = jax.hessian(total)(place)
    seen, dseen = view.look(place, data), view.push(step, data)
    slope, bend = view.expand(seen, dseen, data, weights)
    assert_allclose(view.value(seen, data, weights), total(place), rtol=1e-12)
    assert_allclose(view.pull(view.slope(seen, data, weights), data), jax.grad(total)(place), atol=1e-10)
    assert_allclose(view.pull(slope, data), jax.grad(total)(place), atol=1e-10)
    assert_allclose(view.pull(bend, data), hessian @ step, atol=1e-10)
    if kind == "found":
        assert_allclose(view.curvature(seen, data, weights), jnp.diag(hessian), atol=1e-10)
        jacobian = jax.jacobian(lambda z: view.look(z, data))(place)  # (batch, K, D)
        assert_allclose(view.spread(step**2, data), jnp.sum((jacobian * step) ** 2, -1), atol=1e-12)
        # bend: the diagonal of each datum's Hessian in its predictors
        for row in range(B):
            datum = jax.tree.map(lambda leaf, row=row: leaf[row], data)
            block = jax.hessian(lambda eta, datum=datum: view.split.outer(eta, datum))(seen[row])
            want = -N * weights[row] * jnp.diag(block)
            assert_allclose(view.bend(seen, data, weights)[row], want, atol=1e-10)
    else:
        assert view.curvature(seen, data, weights) is None


def test_the_found_views():
    for name, count in PREDICTORS.items():
        view = find_view(PROBLEMS[name]).view
        assert (view.num_predictors, view.has_squares) == (count, True), name
    assert isinstance(find_view(PROBLEMS["whole"]).view, jcv.WholeView)


def test_the_entropy():
    params = params_at(3)
    nodes, masses = normal_grid(3, 4)
    variance = params.variance
    squares = (params.scale * nodes) ** 2 / variance
    log_q = -0.5 * (squares + jnp.log(2 * jnp.pi * variance)).sum(-1)
    assert_allclose(entropy(params), -masses @ np.asarray(log_q), rtol=1e-12)


def test_quadrature_is_as_good_as_its_nodes():
    """a_n = E ℓ'_n and b_n = E ℓ''_n of a logistic predictor against a fine trapezoidal sum."""
    objective = compose("logistic2", "quadrature").objective
    params = params_at(2)
    data, _ = all_data(objective)
    moments = objective.remember(params, data)
    x, y = np.asarray(data["x"]), np.asarray(data["y"])
    centre, sd = x @ np.asarray(params.location), np.sqrt(x**2 @ np.asarray(params.variance))
    grid = np.linspace(-12, 12, 20001)
    mass = np.exp(-(grid**2) / 2)
    mass /= mass.sum()
    sigmoid = 1 / (1 + np.exp(-(centre[:, None] + sd[:, None] * grid)))
    assert_allclose(moments.slope[:, 0], (sigmoid - y[:, None]) @ mass, atol=1e-7)
    assert_allclose(moments.bend[:, 0], (sigmoid * (1 - sigmoid)) @ mass, atol=1e-6)


def test_a_fit_tells_the_error_of_its_quadrature():
    """Three nodes against six, in a plain loop over the data."""
    problem = PROBLEMS["logistic2"]
    fit = jcv.fit(problem, key=KEY, noise=jcv.Quadrature(3), num_epochs=2, batch_size=B)
    x, y = np.asarray(problem.data["x"]), np.asarray(problem.data["y"])
    centre, sd = x @ np.asarray(fit.params.location), np.sqrt(x**2 @ np.asarray(fit.params.variance))

    def likelihood(nodes):
        points, masses = np.polynomial.hermite_e.hermegauss(nodes)
        eta = centre[:, None] + sd[:, None] * points
        return ((y[:, None] * eta - np.logaddexp(0, eta)) @ (masses / masses.sum())).sum()

    wanted = likelihood(3) - likelihood(6)
    assert abs(wanted) > 1e-6
    assert_allclose(jcv.quadrature_error(fit), wanted, rtol=1e-8)
    with pytest.raises(ValueError, match="no quadrature"):
        jcv.quadrature_error(jcv.fit(problem, key=KEY, noise=jcv.ParameterNoise(), num_steps=1))
