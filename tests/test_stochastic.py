"""Objectives that are no ELBO: linear and logistic regression with Gaussian dropout, ε ~ N(1, σ²) on every feature."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import jointcv as jcv
from helpers import BINARY, FIXED, KEY, REAL, RESHUFFLE, X2, B, N, estimates, normal_grid, state_after
from jointcv.loop import start

SCALE, RIDGE = 0.5, 0.1
START = {"w": jnp.array([0.4, -0.7])}


def square(params, datum, noise):
    return (datum["y"] - (datum["x"] * noise) @ params["w"]) ** 2


def logistic(params, datum, noise):
    eta = (datum["x"] * noise) @ params["w"]
    return jax.nn.softplus(eta) - datum["y"] * eta


LOSSES = {"linear": (square, REAL), "logistic": (logistic, BINARY)}


def ridge(params):
    return RIDGE * jnp.sum(params["w"] ** 2)


def make(name, per_datum=True):
    loss, y = LOSSES[name]
    return jcv.DoublyStochastic(
        loss=loss,
        data={"x": X2, "y": y},
        start=START,
        noise=jcv.GaussianNoise((2,), 1.0, SCALE),
        penalty=ridge,
        per_datum=per_datum,
    )


CASES = {
    "naive": (jcv.NaiveGradient(), RESHUFFLE, False),
    "cv": (jcv.MonteCarloCV(), RESHUFFLE, False),
    "inc": (jcv.SubsamplingCV(), RESHUFFLE, True),
    "ens": (jcv.EnsembleCV(0.3), RESHUFFLE, True),
    "joint-datum": (jcv.JointCV(jcv.PerDatum()), RESHUFFLE, True),
    "joint-snapshots": (jcv.JointCV(jcv.Snapshots()), RESHUFFLE, True),
    "joint-table": (jcv.JointCV(jcv.WholeTable()), jcv.WithReplacement(B), True),
    "joint-batch": (jcv.JointCV(jcv.PerBatch()), FIXED, False),
    "joint-anchor": (jcv.JointCV(jcv.Anchor()), RESHUFFLE, False),
}
JOINT = [name for name in CASES if name.startswith("joint")]


def algorithm_of(name, problem, **options):
    control, sampler, per_datum = CASES[name]
    options = {"optimizer": optax.sgd(2e-2), "naive_steps": 0} | options
    return jcv.GradientDescent(make(problem, per_datum), control, sampler, **options)


def exact_gradient(problem, w):
    """∇ of the mean over data and noise."""
    y = LOSSES[problem][1]
    if problem == "linear":  # E (y − (x⊙ε)·w)² = (y − x·w)² + σ² Σ x² w²
        return 2 * (X2.T @ (X2 @ w - y) / N + SCALE**2 * (X2**2).mean(0) * w) + 2 * RIDGE * w
    nodes, masses = normal_grid(2, 40)
    noisy = X2[:, None] * (1 + SCALE * nodes)
    errors = 1 / (1 + np.exp(-noisy @ w)) - y[:, None]
    return np.einsum("e,ne,ned->d", masses, errors, noisy) / N + 2 * RIDGE * w


@pytest.mark.parametrize("name", JOINT)
def test_a_quadratic_loss_leaves_no_variance(name):
    """f is quadratic in ε and so equal to f~: a fresh memory gives the exact gradient, minibatch by minibatch."""
    algorithm = algorithm_of(name, "linear")
    run = start(algorithm, KEY)
    gradients = np.asarray(estimates(algorithm, run, KEY, 30).gradient["w"])
    exact = exact_gradient("linear", np.asarray(START["w"]))
    assert_allclose(gradients, np.broadcast_to(exact, (30, 2)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("problem", LOSSES)
def test_the_approximation_and_its_mean(problem):
    """f~ by jax.hessian in ε; E f~ = f + σ²/2 tr ∇²_ε f by differentiation, and by quadrature of `sampled`."""
    objective, loss = make(problem), LOSSES[problem][0]
    data, weights = jax.tree.map(lambda leaf: leaf[:B], objective.data), jnp.linspace(0.1, 0.3, B)
    params = {"w": jnp.array([0.9, 0.2])}
    entry = objective.remember(params, data)

    def expansion(params, datum, step):
        def at(noise):
            return loss(params, datum, noise)

        ones = jnp.ones(2)
        return at(ones) + jax.grad(at)(ones) @ step + 0.5 * step @ jax.hessian(at)(ones) @ step

    def mean_expansion(params, datum):
        def at(noise):
            return loss(params, datum, noise)

        return at(jnp.ones(2)) + SCALE**2 / 2 * jnp.trace(jax.hessian(at)(jnp.ones(2)))

    draws = objective.draw(KEY, params, data)
    want = jax.grad(lambda p: weights @ jax.vmap(expansion, (None, 0, 0))(p, data, SCALE * draws))(params)
    got = objective.sampled(entry, params, data, weights, draws)
    assert_allclose(got["w"], want["w"], atol=1e-12)

    want = jax.grad(lambda p: weights @ jax.vmap(mean_expansion, (None, 0))(p, data))(params)
    got = objective.expected(objective.summarise(entry, data, weights), params)
    assert_allclose(got["w"], want["w"], atol=1e-12)
    nodes, masses = normal_grid(2, 4)
    rows = jnp.asarray(np.broadcast_to(nodes[:, None], (len(nodes), B, 2)))
    sampled = jax.vmap(lambda draws: objective.sampled(entry, params, data, weights, draws))(rows)
    assert_allclose(masses @ np.asarray(sampled["w"]), want["w"], atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_every_control_is_unbiased(name):
    """z-tests after two epochs, 9 cases × 2 coordinates × 2: 4.5 standard errors, by chance in 1 of 4,000 suites."""
    algorithm = algorithm_of(name, "logistic")
    run = state_after(algorithm, KEY, 2)
    sample = estimates(algorithm, run, jax.random.fold_in(KEY, 1), 6000)
    exact = exact_gradient("logistic", np.asarray(run.state.params["w"]))
    for values, value in [(sample.gradient["w"], exact), (sample.correction["w"], 0.0)]:
        values = np.asarray(values)
        error = values.std(0, ddof=1) / np.sqrt(len(values))
        assert (np.abs(values.mean(0) - value) <= 4.5 * error).all()


def test_joint_has_the_least_variance():
    def variance(name):
        algorithm = algorithm_of(name, "logistic")
        run = state_after(algorithm, KEY, 20)
        sample = estimates(algorithm, run, jax.random.fold_in(KEY, 1), 2000).gradient["w"]
        return float(np.asarray(sample).var(0).sum())

    found = {name: variance(name) for name in ("naive", "cv", "inc", "joint-datum")}
    assert found["joint-datum"] < 0.5 * min(found["cv"], found["inc"])
    assert max(found["cv"], found["inc"]) < found["naive"]


def test_a_run_reaches_the_optimum():
    """Linear regression with dropout is ridge regression: joint with SGD goes all the way, at a constant step."""
    algorithm = algorithm_of("joint-datum", "linear", optimizer=optax.sgd(5e-2))
    fit = jcv.fit(algorithm, key=KEY, num_epochs=60)
    gram = X2.T @ X2 / N + np.diag(SCALE**2 * (X2**2).mean(0)) + RIDGE * np.eye(2)
    assert_allclose(fit.params["w"], np.linalg.solve(gram, X2.T @ REAL / N), atol=1e-8)
    assert fit.status == "completed"


@pytest.mark.parametrize("sampler", [RESHUFFLE, FIXED], ids=["datum", "batch"])
def test_smiso_draws_for_every_datum(sampler):
    """The noise is a datum's own: SMISO moves towards the optimum, to its noise."""
    algorithm = jcv.Smiso(make("linear", per_datum=False), sampler, rate=0.02 if sampler is FIXED else 0.1)
    fit = jcv.fit(algorithm, key=KEY, num_epochs=100)
    gram = X2.T @ X2 / N + np.diag(SCALE**2 * (X2**2).mean(0)) + RIDGE * np.eye(2)
    assert_allclose(fit.params["w"], np.linalg.solve(gram, X2.T @ REAL / N), atol=0.15)
