"""fit() as users call it: defaults, precision, divergence, and what a finished run can tell."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jointcv as jcv
from helpers import (
    BINARY,
    KEY,
    NOISE_SD,
    PRIOR_SD,
    PROBLEMS,
    REAL,
    RESHUFFLE,
    X3,
    B,
    N,
    bernoulli,
    compose,
    flat,
    joint_setup,
    linear_exact_elbo,
    linear_exact_gradient,
    params_at,
    wide_prior,
)
from jointcv.evaluate import full_value
from jointcv.loop import epoch_schedule, start

STEPS = 5


@pytest.fixture
def implicit_promotion():
    """optax's schedules and Adam mix types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def logistic_problem(dtype):
    return jcv.Problem(
        log_prior=wide_prior,
        log_likelihood=lambda z, datum: bernoulli(datum["x"] @ z, datum["y"]),
        data={"x": X3.astype(dtype), "y": BINARY.astype(dtype)},
        example=np.zeros(3, dtype),
    )


# ---------------------------------------------------------------- defaults and precision


@pytest.mark.usefixtures("implicit_promotion")
@pytest.mark.parametrize("name", ["softmax", "whole"])
def test_a_problem_and_a_key_are_enough(name):
    fit = jcv.fit(PROBLEMS[name], key=KEY)
    assert fit.status == "completed" and not fit.diverged
    assert isinstance(fit.algorithm.control, jcv.JointCV)
    count = 30 * fit.algorithm.sampler.steps_per_epoch(N)
    assert fit.history["loss"].shape == fit.history["gradient_norm"].shape == (count,)
    assert np.isfinite(fit.history["loss"]).all()
    first = fit.algorithm.params(start(fit.algorithm, KEY).state)
    began = full_value(fit.algorithm.objective, first, KEY)
    assert fit.elbo(KEY).value > -began.value
    draws = fit.sample(KEY, 7)
    for draw, leaf in zip(jax.tree.leaves(draws), jax.tree.leaves(PROBLEMS[name].example), strict=True):
        assert draw.shape == (7, *leaf.shape)


@pytest.mark.usefixtures("implicit_promotion")
def test_the_conjugate_posterior():
    """All defaults: the mean-field posterior of a linear regression, to the last step's length."""
    fit = jcv.fit(PROBLEMS["linear"], key=KEY, num_epochs=600)
    precision = X3.T @ X3 / NOISE_SD**2 + np.eye(3) / PRIOR_SD**2
    assert_allclose(fit.mean(), np.linalg.solve(precision, X3.T @ REAL / NOISE_SD**2), atol=1e-3)
    assert_allclose(fit.standard_deviation(), 1 / np.sqrt(np.diag(precision)), rtol=1e-3)


def float_leaves(tree):
    return [
        leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)
    ]


@pytest.mark.parametrize("noise", ["quadrature", "predictor", "parameter", "paper"])
@pytest.mark.parametrize("x64", [False, True])
def test_precision_is_that_of_the_example(noise, x64):
    """float32 throughout where JAX is as it comes, or where z is float32; float64 under x64."""
    with jax.enable_x64(x64):
        for dtype in (np.float32, np.float64):
            fit = jcv.fit(compose(logistic_problem(dtype), noise), key=KEY, num_epochs=2)
            expected = np.float64 if x64 and dtype == np.float64 else np.float32
            leaves = float_leaves(fit.run)
            assert leaves and {leaf.dtype for leaf in leaves} == {np.dtype(expected)}
            assert np.isfinite(fit.history["loss"]).all()
            if not x64:
                break


@pytest.mark.parametrize("memory", ["datum", "anchor"])
def test_float32_is_close_to_float64(memory):
    """With quadrature nothing is drawn but minibatches: the same run, to single precision."""

    def run(dtype):
        begin = jcv.GivenStart(np.array([0.3, -0.2, 0.1], dtype), log_scale=-1.0)
        algorithm = joint_setup(logistic_problem(dtype), "quadrature", memory, False, start=begin)
        return jcv.fit(algorithm, key=KEY, num_epochs=3)

    single, double = run(np.float32), run(np.float64)
    assert single.params.location.dtype == np.float32
    assert_allclose(flat(single.params), flat(double.params), atol=1e-5)
    assert_allclose(single.history["loss"], double.history["loss"], rtol=1e-5)


# ---------------------------------------------------------------- divergence


def diverging(rate):
    return joint_setup("poisson", "parameter", "datum", False, optimizer=optax.sgd(rate), naive_steps=STEPS)


@pytest.mark.parametrize("rate", [0.2, 1e200])
def test_a_diverging_run_keeps_the_last_good_parameters(rate):
    """Steps too long by far: the run ends with a word about it, the same for every chunk size."""
    runs = [jcv.fit(diverging(rate), key=KEY, num_epochs=6, chunk_size=size) for size in (1000, 3)]
    first = runs[0]
    number = len(first.history["loss"])
    assert first.diverged and first.status == f"diverged at step {number}"
    assert number < 6 * STEPS
    for fit in runs:
        assert fit.status == first.status
        assert int(fit.run.step) == number
        assert_array_equal(fit.history["loss"], first.history["loss"])
        assert_array_equal(flat(fit.params), flat(first.params))
    assert np.isfinite(first.history["loss"]).all() and np.isfinite(first.history["gradient_norm"]).all()
    assert np.isfinite(flat(first.params)).all()
    assert np.isfinite(first.params.variance).all() and (np.asarray(first.params.variance) > 0).all()
    assert np.isfinite(first.sample(KEY, 10)).all()
    if number > 0:  # the parameters are those of a run that stops there
        stopped = jcv.fit(diverging(rate), key=KEY, num_steps=number)
        assert_array_equal(flat(stopped.params), flat(first.params))


def test_a_dead_run_stays_dead():
    fit = jcv.fit(diverging(1e3), key=KEY, num_epochs=2)
    again = fit.extend(num_epochs=2)
    assert again.status == fit.status and again.diverged
    assert_array_equal(again.history["loss"], fit.history["loss"])
    assert_array_equal(flat(again.params), flat(fit.params))


def with_a_nan(z, datum):
    """NaN for datum 11, wherever z is."""
    return bernoulli(datum["x"] @ z, datum["y"]) + jnp.log(jnp.where(datum["number"] == 11, -1.0, 1.0))


@pytest.mark.parametrize("chunk_size", [1000, 2])
def test_a_nan_in_the_likelihood(chunk_size):
    """The run ends at the step that sees the datum, and not before."""
    problem = jcv.Problem(
        log_prior=wide_prior,
        log_likelihood=with_a_nan,
        data={"x": X3, "y": BINARY, "number": np.arange(N)},
        example=np.zeros(3),
    )
    algorithm = jcv.GradientDescent(
        compose("logistic", "parameter").objective, jcv.NaiveGradient(), RESHUFFLE, optax.sgd(1e-3)
    )
    healthy = jcv.fit(algorithm, key=KEY, num_epochs=1)
    algorithm = compose(problem, "parameter", jcv.NaiveGradient(), whole=True, optimizer=optax.sgd(1e-3))
    schedule = jax.device_get(epoch_schedule(algorithm, start(algorithm, KEY).key, 0))
    step = int(np.argwhere(schedule.indices == 11)[0][0])
    fit = jcv.fit(algorithm, key=KEY, num_epochs=3, chunk_size=chunk_size)
    assert fit.status == f"diverged at step {step}"
    assert_allclose(fit.history["loss"], healthy.history["loss"][:step])
    assert np.isfinite(flat(fit.params)).all()


# ---------------------------------------------------------------- the ELBO


@pytest.fixture(scope="module")
def conjugate():
    return params_at(3, seed=5), linear_exact_elbo(X3, REAL, params_at(3, seed=5))


@pytest.mark.parametrize("noise, whole", [("parameter", False), ("paper", True), ("predictor", False)])
def test_the_elbo_is_estimated_with_its_error(conjugate, noise, whole):
    """4,000 draws against the closed form: within four standard errors, in 999,900 of a million."""
    params, exact = conjugate
    objective = compose("linear", noise, whole=whole).objective
    got = full_value(objective, params, KEY, num_draws=4000)
    assert abs(-got.value - exact) < 4 * got.standard_error
    assert 0 < got.standard_error < 0.05 * abs(exact)
    # the error is that of the mean: 40 estimates from 100 draws each vary by as much as they say
    several = [full_value(objective, params, jax.random.fold_in(KEY, i), num_draws=100) for i in range(40)]
    spread, said = np.std([e.value for e in several]), np.mean([e.standard_error for e in several])
    assert 0.6 < spread / said < 1.5


def test_the_elbo_is_exact_with_quadrature(conjugate):
    params, exact = conjugate
    got = full_value(compose("linear", "quadrature").objective, params, KEY, num_draws=3)
    assert_allclose(-got.value, exact, rtol=1e-12)
    assert got.standard_error < 1e-12


@pytest.mark.parametrize("noise", ["parameter", "quadrature", "paper"])
def test_the_elbo_does_not_depend_on_the_chunk(conjugate, noise):
    """The same draws of ε whatever the chunk of data. (Predictor noise is drawn by the chunk.)"""
    objective = compose("linear", noise).objective
    values = [
        full_value(objective, conjugate[0], KEY, num_draws=7, chunk_size=c) for c in (None, 1, 5, N, 999)
    ]
    for value in values[1:]:
        assert_allclose(value, values[0], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- full batches, starts, draws


@pytest.mark.parametrize("control", [jcv.NaiveGradient(), jcv.MonteCarloCV()])
def test_a_full_batch_is_a_sampler(control):
    """One step an epoch on all data. With cv, on a conjugate problem, it is gradient descent without noise."""
    rate, num_epochs = 1e-3, 8
    algorithm = compose("linear", "parameter", control, jcv.FullBatch(), optimizer=optax.sgd(rate))
    fit = jcv.fit(algorithm, key=KEY, num_epochs=num_epochs)
    assert fit.history["loss"].shape == (num_epochs,)
    params = start(algorithm, KEY).state.params
    for _ in range(num_epochs):
        step = rate * linear_exact_gradient(X3, REAL, params)
        params = jcv.MeanFieldParams(params.location - step[:3], params.log_scale - step[3:])
    if isinstance(control, jcv.MonteCarloCV):
        assert_allclose(flat(fit.params), flat(params), atol=1e-10)
    else:
        assert np.abs(flat(fit.params) - flat(params)).max() > 1e-3


@pytest.mark.parametrize(
    "control",
    [
        jcv.SubsamplingCV(),
        jcv.EnsembleCV(),
        jcv.JointCV(jcv.Anchor()),
        jcv.JointCV(jcv.WholeTable()),
        jcv.JointCV(),
    ],
)
def test_every_control_takes_a_full_batch(control):
    options = dict(sampler=jcv.FullBatch(), optimizer=optax.sgd(1e-3), noise=jcv.ParameterNoise())
    fit = jcv.fit(PROBLEMS["linear"], key=KEY, control=control, num_epochs=3, **options)
    assert fit.status == "completed" and len(fit.history["loss"]) == 3


def test_starts():
    problem = PROBLEMS["hierarchical"]
    given = {"effects": np.arange(4.0), "slope": np.array(7.0), "log_scale": np.array(-1.0)}
    for begin, location, log_scale in [
        (jcv.ConstantStart(0.5, -1.0), np.full(6, 0.5), -1.0),
        (jcv.GivenStart(given), [0.0, 1.0, 2.0, 3.0, -1.0, 7.0], -2.0),
    ]:
        params = jcv.MeanField(begin).init(KEY, problem)
        assert_array_equal(params.location, location)
        assert_array_equal(params.log_scale, log_scale)
    random = jcv.MeanField().init(KEY, problem)
    assert_array_equal(random.location, jax.random.normal(KEY, (6,)))
    assert_array_equal(random.log_scale, 0.0)


def test_draws_are_constrained_and_of_the_posterior():
    """20,000 draws: the mean within 4.5 standard errors in each of 3 coordinates, the spread within 5 per cent."""
    base = PROBLEMS["linear"]
    problem = jcv.Problem(
        log_prior=base.log_prior,
        log_likelihood=base.log_likelihood,
        data=base.data,
        example=base.example,
        constrain=lambda z: {"weights": z, "first": jnp.exp(z[0])},
    )
    fit = jcv.fit(compose(problem, "parameter"), key=KEY, num_epochs=1)
    draws = fit.sample(KEY, 20_000)
    assert draws["weights"].shape == (20_000, 3) and draws["first"].shape == (20_000,)
    assert_allclose(draws["first"], np.exp(draws["weights"][:, 0]))
    z, sd = np.asarray(draws["weights"]), np.asarray(fit.params.scale)
    assert (np.abs(z.mean(0) - fit.params.location) < 4.5 * sd / np.sqrt(20_000)).all()
    assert_allclose(z.std(0), sd, rtol=0.05)
    assert_array_equal(fit.mean(), fit.params.location)
    assert_array_equal(fit.standard_deviation(), fit.params.scale)
    other = fit.sample(jax.random.fold_in(KEY, 1), 5)["weights"]
    assert not np.array_equal(other, z[:5])


def test_the_key_decides():
    algorithm = compose("logistic", "parameter")
    one, same, other = (jcv.fit(algorithm, key=key, num_epochs=1) for key in (KEY, KEY, jax.random.key(1)))
    assert_array_equal(one.history["loss"], same.history["loss"])
    assert not np.array_equal(one.history["loss"], other.history["loss"])


def test_no_posterior_without_an_elbo():
    objective = jcv.DoublyStochastic(
        loss=lambda w, datum, noise: (datum["y"] - datum["x"] @ (w * noise)) ** 2,
        data={"x": X3, "y": REAL},
        start=np.zeros(3),
        noise=jcv.GaussianNoise((3,)),
    )
    fit = jcv.fit(
        jcv.GradientDescent(objective, jcv.MonteCarloCV(), jcv.Reshuffle(B), optax.sgd(1e-3)),
        key=KEY,
        num_epochs=1,
    )
    with pytest.raises(ValueError, match="DoublyStochastic is no posterior"):
        fit.sample(KEY)
