"""Natural steps: the optimum, the bound on the step, Newton steps, the guard, and what a run tells of itself."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jointcv as jcv
from helpers import KEY, NOISE_SD, PRIOR_SD, PROBLEMS, REAL, X3, B, N, log_normal, params_at, wide_prior
from jointcv.algorithm.natural import move_precision
from jointcv.algorithm.newton import newton_step
from jointcv.evaluate import full_value
from jointcv.plan import assemble
from jointcv.smoothness import hessian_product, measure, see_all, unmeasured


@pytest.fixture(autouse=True)
def implicit_promotion(strict_promotion):
    """Natural steps mix types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


EPOCH = -(-N // B)  # steps; in chunks of one epoch a run of any length is one program


def objective_of(name, **options):
    return assemble(PROBLEMS[name], **options)[0]


def exact_hessian(objective, params):
    """∇² in μ of the negative ELBO, differentiated as a whole; of an objective without noise."""

    def value(location):
        moved = jcv.MeanFieldParams(location, params.log_scale)
        weights = jnp.full(N, 1 / N)
        entry = objective.remember(moved, objective.data)
        draws = objective.draw(KEY, moved, objective.data)
        return objective.value(entry, moved, objective.data, weights, draws) + objective.rest(moved, draws)

    return np.asarray(jax.hessian(value)(params.location))


# ---------------------------------------------------------------- where a run ends


@pytest.mark.parametrize("products", [0, 4])
def test_a_conjugate_run_ends_at_the_closed_form(products):
    """The mean of the posterior, and one over the diagonal of its precision."""
    precision = X3.T @ X3 / NOISE_SD**2 + np.eye(3) / PRIOR_SD**2
    mean = np.linalg.solve(precision, X3.T @ REAL / NOISE_SD**2)
    fit = jcv.fit(
        PROBLEMS["linear"], key=KEY, optimizer=jcv.NaturalGradient(products=products), num_epochs=600
    )
    assert_allclose(fit.mean(), mean, rtol=0, atol=1e-9)
    assert_allclose(fit.params.variance, 1 / np.diag(precision), rtol=1e-9)


def collinear():
    """Logistic regression in which two columns are nearly the same, and their difference matters."""
    rng = np.random.default_rng(11)
    x = rng.normal(size=(2000, 6))
    x[:, 1] = x[:, 0] + 0.05 * x[:, 1]
    weights = np.asarray([4.0, -4.0, 1.0, -1.0, 0.5, 0.0])
    y = (rng.random(2000) < 1 / (1 + np.exp(-x @ weights))).astype(float)
    return jcv.Problem(
        log_prior=lambda z: log_normal(z, 3.0),
        log_likelihood=lambda z, datum: datum["y"] * (datum["x"] @ z) - jax.nn.softplus(datum["x"] @ z),
        data={"x": x, "y": y},
        example=np.zeros(6),
    )


def test_newton_steps_end_the_slow_tail_of_collinear_columns():
    problem = collinear()
    options = dict(key=KEY, num_epochs=20, batch_size=40, chunk_size=50)
    fits = {
        products: jcv.fit(problem, optimizer=jcv.NaturalGradient(products=products), **options)
        for products in (0, 4)
    }
    optimum = fits[4].extend(num_epochs=200, chunk_size=50).elbo(KEY).value
    short = {products: optimum - fit.elbo(KEY).value for products, fit in fits.items()}
    assert short[4] < 1e-4 < 1e-2 < short[0]
    taken = fits[4].history["products"]
    assert taken[-1] > 0 and np.all(np.diff(taken) >= 0)
    assert fits[0].history["products"][-1] == 0


# ---------------------------------------------------------------- curvature and the step


@pytest.mark.parametrize("name", ["linear", "logistic", "poisson", "hierarchical"])
def test_products_with_the_hessian_of_the_expectation(name):
    """That of E_q, which is known by parts from the quadrature: not that at the mean."""
    objective = objective_of(name)
    params = params_at(objective.problem.dim, seed=3)
    direction = jnp.asarray(np.random.default_rng(2).normal(size=params.location.shape))
    product = hessian_product(objective, params, see_all(objective, params), direction)
    # By parts and by differentiating twice are two sums over the nodes; both are the integral to the nodes' error.
    assert_allclose(product, exact_hessian(objective, params) @ direction, rtol=2e-5, atol=1e-6)


def test_a_newton_step_of_a_quadratic_ends_at_its_minimum():
    objective = objective_of("linear")
    params = params_at(3, seed=1)
    precision = X3.T @ X3 / NOISE_SD**2 + np.eye(3) / PRIOR_SD**2
    newton = newton_step(objective, params, KEY, jnp.asarray(30))
    found = params.location + newton.step
    mean = np.linalg.solve(precision, X3.T @ REAL / NOISE_SD**2)
    assert newton.products <= 3  # as many as there are dimensions
    assert np.linalg.norm(found - mean) < 0.05 * np.linalg.norm(params.location - mean)


def test_a_newton_step_without_products_is_none():
    newton = newton_step(objective_of("linear"), params_at(3), KEY, jnp.asarray(0))
    assert_array_equal(newton.step, np.zeros(3))
    assert newton.products == 0


def test_a_newton_step_stops_where_there_is_no_curvature():
    """A log likelihood that is convex in its predictor: no step is better than one uphill."""
    problem = jcv.Problem(
        log_prior=lambda z: 0.0 * jnp.sum(z),
        log_likelihood=lambda z, datum: jnp.logaddexp(datum["x"] @ z, 0.0),
        data={"x": X3},
        example=np.zeros(3),
    )
    newton = newton_step(assemble(problem)[0], params_at(3), KEY, jnp.asarray(10))
    assert_array_equal(newton.step, np.zeros(3))
    assert newton.products == 1


def test_the_step_is_that_of_the_formula():
    """1/(4𝓛) with L and L_max by eigenvalues of dense matrices, in the metric that the steps make."""
    objective = objective_of("logistic")
    params = params_at(3, seed=5)
    sampler = jcv.Reshuffle(B)
    found = measure(objective, sampler, params, unmeasured(params), jnp.asarray(200))
    many, one = N * (B - 1) / (B * (N - 1)), (N - B) / (B * (N - 1))

    root = np.asarray(params.scale)
    scaled = root[:, None] * exact_hessian(objective, params) * root
    entry = objective.remember(params, objective.data)
    bend = N * np.asarray(entry.bend)[:, 0]  # E ℓ''_n times N
    sizes = np.sqrt(bend)[:, None] * np.abs(X3) * root
    reach = np.max(sizes * sizes.sum(1, keepdims=True), axis=0)
    shape = many * np.linalg.eigvalsh(scaled)[-1] + one * reach
    stretched = scaled / np.sqrt(shape)[:, None] / np.sqrt(shape)
    largest = np.max(bend * (X3**2 @ (root**2 / shape)))
    bound = many * np.linalg.eigvalsh(stretched)[-1] + one * largest
    assert_allclose(found.step, 1 / (4 * shape * bound), rtol=1e-4)


@pytest.mark.parametrize("target", [2.0, 1e-8, 0.0, -3.0, -1e6])
@pytest.mark.parametrize("rate", [0.01, 0.5, 1.0])
def test_the_precision_stays_positive(target, rate):
    precision, corrected = move_precision(jnp.asarray([1.5]), jnp.asarray([target]), rate)
    assert precision[0] > 0
    assert corrected == (target <= 0)
    if target > 0:
        assert_allclose(precision, (1 - rate) * 1.5 + rate * target)


def student():
    """Robust regression with gross outliers: not log-concave."""
    y = REAL + np.where(np.arange(N) % 4 == 0, 30.0, 0.0)

    def log_likelihood(z, datum):
        return -1.5 * jnp.log1p((datum["y"] - datum["x"] @ z) ** 2 / (2 * NOISE_SD**2))

    return jcv.Problem(
        log_prior=wide_prior, log_likelihood=log_likelihood, data={"x": X3, "y": y}, example=np.zeros(3)
    )


def test_a_likelihood_that_is_not_log_concave_is_counted_not_clipped():
    family = jcv.MeanField(jcv.GivenStart(np.asarray([4.0, 1.0, 3.5]), log_scale=-3.0))
    steps = jcv.NaturalGradient(products=0)
    fit = jcv.fit(student(), key=KEY, family=family, optimizer=steps, num_epochs=40, batch_size=B)
    elbos = fit.history["epoch_elbo"]
    assert fit.status == "completed"
    assert fit.history["corrected"].max() > 0
    assert np.isfinite(fit.params.log_scale).all()
    assert np.all(np.diff(elbos[::5]) >= -1e-9) and elbos[-1] > elbos[0] + 1


# ---------------------------------------------------------------- the guard


@pytest.mark.parametrize("name", ["poisson", "softmax"])
def test_a_step_that_is_far_too_long_is_taken_back(name):
    """Halvings are counted, and what is handed out is never worse than the start."""
    reckless = jcv.NaturalGradient(slack=1000.0, products=0)
    fit = jcv.fit(PROBLEMS[name], key=KEY, optimizer=reckless, batch_size=1, num_epochs=40)
    objective = fit.algorithm.objective
    first = fit.algorithm.init(jax.random.split(KEY)[0])[0].position.params
    before, after = (full_value(objective, params, KEY, num_draws=400) for params in (first, fit.params))
    assert fit.status == "completed"
    assert fit.history["halvings"][-1] >= 1
    assert after.value < before.value
    assert fit.history["rate"][-1] < fit.history["rate"][0]


def test_the_objective_falls_from_epoch_to_epoch():
    fit = jcv.fit(PROBLEMS["poisson"], key=KEY, batch_size=B, num_epochs=30)
    assert np.diff(fit.history["epoch_elbo"]).min() >= -1e-9


# ---------------------------------------------------------------- what a run tells, and going on


def test_the_drift_of_float32_is_seen_and_undone():
    problem = jcv.Problem(
        log_prior=wide_prior,
        log_likelihood=lambda z, datum: -0.5 * (datum["y"] - datum["x"] @ z) ** 2,
        data={"x": (1e3 * X3).astype(np.float32), "y": (1e3 * REAL).astype(np.float32)},
        example=np.zeros(3, np.float32),
    )
    fit = jcv.fit(problem, key=KEY, batch_size=B, num_epochs=20)
    drift = fit.history["drift"]
    assert 0 < drift.max() < 1e-4  # of float32's rounding; without the sum anew it would add up
    algorithm, run = fit.algorithm, fit.run
    summed = algorithm.control.memory.recount(
        run.state.memory, run.table, algorithm.objective, algorithm.sampler
    )
    # At the end the running mean is one epoch old.
    assert_allclose(
        run.state.memory.gradient, summed.gradient, rtol=1e-3, atol=1e-3 * np.abs(REAL).max() * 1e6
    )


def test_going_on_is_one_longer_run():
    one = jcv.fit(PROBLEMS["softmax"], key=KEY, batch_size=B, num_epochs=9, chunk_size=EPOCH)
    two = jcv.fit(one.algorithm, key=KEY, num_epochs=3, chunk_size=EPOCH).extend(
        num_epochs=6, chunk_size=EPOCH
    )
    assert_array_equal(one.params.location, two.params.location)
    assert_array_equal(one.history["epoch_elbo"], two.history["epoch_elbo"])


@cache
def full_batch_logistic():
    steps = dict(optimizer=jcv.NaturalGradient(), num_epochs=60)
    return jcv.fit(PROBLEMS["logistic"], key=KEY, batch_size=N, **steps).params


@pytest.mark.parametrize(
    "memory, sampler",
    [
        (jcv.PerDatum(), jcv.Reshuffle(B)),
        (jcv.Snapshots(), jcv.Reshuffle(B)),
        (jcv.PerBatch(), jcv.FixedBatches(B)),
        (jcv.Anchor(), jcv.Reshuffle(B)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_every_memory_leads_to_the_same_place(memory, sampler):
    options = dict(optimizer=jcv.NaturalGradient(), num_epochs=60, chunk_size=EPOCH)
    fit = jcv.fit(PROBLEMS["logistic"], key=KEY, control=jcv.JointCV(memory), sampler=sampler, **options)
    other = full_batch_logistic()
    assert_allclose(fit.params.location, other.location, rtol=0, atol=1e-5)
    assert_allclose(fit.params.log_scale, other.log_scale, rtol=0, atol=1e-5)


def test_a_whole_view_takes_them_too():
    fit = jcv.fit(PROBLEMS["whole"], key=KEY, optimizer=jcv.NaturalGradient(), num_epochs=30, batch_size=B)
    elbos = fit.history["epoch_elbo"]
    assert fit.status == "completed" and elbos[-1] > elbos[0]
