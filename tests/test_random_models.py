"""Random small models under the view that is found: the whole view's trajectories, and corrections of mean zero."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from numpy.testing import assert_allclose

import jointcv as jcv
from helpers import KEY, compose, flat, log_normal, state_after
from jointcv.algorithm.gradient import controlled_gradient
from jointcv.elbo import ElboDraws
from jointcv.sampler import Batch
from jointcv.view import LinearView
from random_models import MODELS

COUNT, SIZE, RATE = 7, 3, 1e-4
X = np.random.default_rng(3).normal(size=(COUNT, 6))


@pytest.fixture(autouse=True)
def implicit_promotion():
    """The models are written as users write them."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def problem_of(model) -> jcv.Problem:
    def log_likelihood(z, x):
        return -0.1 * jnp.tanh(model(0.1 * z, x))  # bounded, so that no step explodes

    return jcv.Problem(
        log_prior=lambda z: log_normal(z, 1.0),
        log_likelihood=log_likelihood,
        data=X,
        example=np.zeros(model.dim),
    )


@settings(max_examples=5, deadline=None, derandomize=True)
@given(model=MODELS)
def test_compressed_trajectories_are_the_whole_ones(model):
    """K numbers a datum against D: to 1e-9 over three epochs, with log σ left as the whole view must leave it."""
    problem = problem_of(model)
    found = jcv.find_view(problem).view
    assert isinstance(found, LinearView) and found.num_predictors <= 4 < problem.dim
    views = [LinearView(problem, found.split, has_squares=False), jcv.WholeView(problem)]

    def run(view):
        sampler = jcv.Reshuffle(SIZE)
        algorithm = compose(problem, "parameter", sampler=sampler, view=view, optimizer=optax.sgd(RATE))
        return jcv.fit(algorithm, key=KEY, num_epochs=3)

    short, long = map(run, views)
    assert short.run.table.shape == (COUNT, found.num_predictors)
    assert long.run.table.shape == (COUNT, problem.dim)
    assert_allclose(flat(short.params), flat(long.params), rtol=0, atol=1e-9)
    assert_allclose(short.history["loss"], long.history["loss"], rtol=1e-9)
    moved = flat(short.params) - flat(compose_start(problem, found))
    assert np.abs(moved).max() > 1e-4


def compose_start(problem, view):
    return state_after(
        compose(problem, "parameter", sampler=jcv.Reshuffle(SIZE), view=view), KEY, 0
    ).state.params


@settings(max_examples=5, deadline=None, derandomize=True)
@given(model=MODELS)
def test_the_estimator_is_unbiased(model):
    """Away from the remembered places: the correction's sum over all data and all ε of a rule that is exact for it.

    In the location and, as far as it is controlled, in log σ; with ε in z and, where it may be, in η. And with ε in
    z the gradient itself, summed over the data, is that of the user's functions at every ε.
    """
    problem = problem_of(model)
    view = jcv.find_view(problem).view
    assert isinstance(view, LinearView)
    cases = {"parameter": cubature(problem.dim)}
    if view.has_squares:
        cases["predictor"] = cubature(view.num_predictors)[:, None]
    for noise, points in cases.items():
        options = dict(sampler=jcv.WithReplacement(SIZE), view=view, optimizer=optax.sgd(RATE))
        algorithm = compose(problem, noise, jcv.JointCV(jcv.WholeTable()), **options)
        state = state_after(algorithm, KEY, 2).state
        gradients, corrections = map(flat, all_estimates(algorithm, state, jnp.asarray(points)))
        size = max(1e-3, np.abs(corrections).max())
        assert_allclose(corrections.mean((0, 1)), 0, atol=1e-10 * size, err_msg=noise)
        if noise == "parameter":
            assert_allclose(gradients.mean(0), plain_gradients(problem, state.params, points), atol=1e-9)


def cubature(dim: int) -> np.ndarray:
    """Points of equal mass with the mean 0 and the covariance I, exact for quadratics (and cubics)."""
    return np.sqrt(dim) * np.concatenate([np.eye(dim), -np.eye(dim)])


@eqx.filter_jit
def all_estimates(algorithm, state, points):
    """∇f and its correction for every datum and every ε: (N, nodes, D) in both parts."""
    objective, params = algorithm.objective, algorithm.params(state)

    def one(n, eps):
        data = jax.tree.map(lambda leaf: leaf[n][None], objective.data)
        batch = Batch(data, n[None], jnp.ones(1), jnp.full(1, 1 / COUNT), jnp.ones((), jnp.int32))
        recall = algorithm.control.memory.read(state.memory, None, None, objective, params, batch)
        draws = ElboDraws(eps, eps if eps.ndim == 1 else jnp.zeros_like(params.location))
        _, *parts = controlled_gradient(objective, algorithm.control, recall, params, batch, draws)
        return tuple(objective.pull(part, params, data, draws) for part in parts)

    return jax.vmap(lambda n: jax.vmap(lambda eps: one(n, eps))(points))(jnp.arange(COUNT))


def plain_gradients(problem, params, points):
    """∇ of log q − log p(x, z) at z = μ + σ⊙ε, by differentiation: (nodes, 2D)."""

    def negative_elbo(params, eps):
        z = params.location + params.scale * eps
        data = jnp.sum(jax.vmap(problem.likelihood_at, (None, 0))(z, problem.data))
        return -data - problem.prior_at(z) - jnp.sum(params.log_scale)

    return flat(jax.jit(jax.vmap(jax.grad(negative_elbo), (None, 0)))(params, jnp.asarray(points)))
