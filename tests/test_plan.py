"""What is chosen where nothing is said, what `describe` says of it, views stated by hand, and data set apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jointcv as jcv
from helpers import (
    BINARY,
    COUNT,
    GROUP,
    KEY,
    PROBLEMS,
    REAL,
    RNG,
    X2,
    X3,
    B,
    N,
    bernoulli,
    compose,
    flat,
    logistic,
    normal_grid,
    params_at,
    wide_prior,
)
from jointcv.evaluate import full_value

SECOND, THIRD = (GROUP + 1) % 4, (GROUP + 2) % 5
OTHER = jnp.asarray(RNG.normal(size=(3, 3)))


def make(log_likelihood, data, example):
    return jcv.Problem(
        log_prior=lambda z: sum(wide_prior(leaf) for leaf in jax.tree.leaves(z)),
        log_likelihood=log_likelihood,
        data=data,
        example=example,
    )


# ---------------------------------------------------------------- every kind of model that the issue names


def robust(z, datum):
    return dist.StudentT(4.0, datum["x"] @ z["slope"] + z["intercept"], jnp.exp(z["log_scale"])).log_prob(
        datum["y"]
    )


def crossed(z, datum):
    eta = z["mean"] + z["first"][datum["i"]] + z["second"][datum["j"]]
    return dist.Poisson(jnp.exp(eta)).log_prob(datum["y"])


def ratings(z, datum):
    return jax.nn.log_softmax(datum["x"] @ z["weights"][datum["i"]])[datum["y"]]


def non_centred(z, datum):
    return bernoulli(jnp.exp(z["log_scale"]) * z["effects"][datum["i"]], datum["y"])


def factors(z, datum):
    covariance = z["loadings"] @ z["loadings"].T + jnp.eye(3)
    return dist.MultivariateNormal(z["mean"], covariance).log_prob(datum["x"])


def network(z, datum):
    return bernoulli(jnp.tanh(datum["x"] @ z["inner"]) @ z["outer"], datum["y"])


def latents(**shapes):
    return {name: np.zeros(shape) for name, shape in shapes.items()}


KINDS = {  # model, data, z, K (None: the whole view)
    "logistic with an offset": (
        lambda z, d: bernoulli(d["x"] @ z["slope"] + z["intercept"] + 2 * d["offset"] - 1, d["y"]),
        {"x": X3, "y": BINARY, "offset": REAL},
        latents(slope=3, intercept=()),
        1,
    ),
    "robust regression": (robust, {"x": X3, "y": REAL}, latents(slope=3, intercept=(), log_scale=()), 2),
    "Bradley-Terry": (
        lambda z, d: bernoulli(z[d["i"]] - z[d["j"]], d["y"]),
        {"i": GROUP, "j": SECOND, "y": BINARY},
        np.zeros(4),
        1,
    ),
    "ratings": (
        ratings,
        {"x": X2, "i": GROUP, "y": COUNT.astype(int) % 3},
        latents(weights=(4, 2, 3), log_scale=3),
        3,
    ),
    "crossed effects": (
        crossed,
        {"i": GROUP, "j": THIRD, "y": COUNT.astype(int)},
        latents(mean=(), first=4, second=5),
        1,
    ),
    "vmap": (
        lambda z, d: bernoulli(jax.vmap(jnp.multiply)(d["x"], z).sum(), d["y"]),
        {"x": X3, "y": BINARY},
        np.zeros(3),
        1,
    ),
    "jit": (jax.jit(lambda z, d: jax.jit(logistic)(z, d)), {"x": X3, "y": BINARY}, np.zeros(3), 1),
    "einsum": (
        lambda z, d: jax.nn.log_softmax(jnp.einsum("fc,f->c", z, d["x"]))[d["y"]],
        {"x": X3, "y": GROUP % 2},
        np.zeros((3, 2)),
        2,
    ),
    "non-centred": (non_centred, {"i": GROUP, "y": BINARY}, latents(effects=4, log_scale=()), 2),
    "multiplied latents": (
        lambda z, d: -0.5 * (d["y"] - d["x"] @ (z["slope"] * jnp.exp(z["log_scale"]))) ** 2,
        {"x": X3, "y": REAL},
        latents(slope=3, log_scale=3),
        None,
    ),
    "PPCA": (factors, {"x": X3}, latents(loadings=(3, 2), mean=3), None),
    "network": (network, {"x": X2, "y": BINARY}, latents(inner=(2, 3), outer=3), 6),
    "deep network": (
        lambda z, d: bernoulli(jnp.tanh(jnp.tanh(d["x"] * z["a"]) @ z["b"]) @ z["c"], d["y"]),
        {"x": X2, "y": BINARY},
        latents(a=2, b=(2, 3), c=3),
        None,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_view_of_every_kind_of_model(name):
    """Found with as many predictors as there are and with the whole gradient in them, or a reason."""
    log_likelihood, data, example, num_predictors = KINDS[name]
    problem = make(log_likelihood, data, example)
    with jax.numpy_dtype_promotion("standard"):  # NumPyro's own code mixes types
        found = jcv.find_view(problem)
    view, reason = found.view, found.reason
    if num_predictors is None:
        assert isinstance(view, jcv.WholeView) and f"(size {problem.dim})" in reason
        return
    assert (view.num_predictors, view.has_squares, reason) == (num_predictors, True, "")
    z, weights = jax.random.normal(KEY, (problem.dim,)), jnp.full(N, 1 / N)
    with jax.numpy_dtype_promotion("standard"):
        pulled = view.pull(view.slope(view.look(z, problem.data), problem.data, weights), problem.data)
        total = jax.grad(lambda z: -jnp.sum(jax.vmap(problem.likelihood_at, (None, 0))(z, problem.data)))(z)
    assert_allclose(pulled, total, rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------- choices, and what describe says of them

CHOICES = {
    "logistic": (jcv.Quadrature, jcv.PerDatum, jcv.Reshuffle, N * 2),
    "softmax": (jcv.PredictorNoise, jcv.PerDatum, jcv.Reshuffle, N * 3),
    "whole": (jcv.ParameterNoise, jcv.PerBatch, jcv.FixedBatches, 5 * 2),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_choice_and_its_bytes(name):
    noise, memory, sampler, numbers = CHOICES[name]
    described = jcv.describe(PROBLEMS[name], batch_size=B)
    assert described.noise == repr(noise())
    assert described.memory == f"{memory()!r} with {sampler(B)!r}"
    means = 2 * PROBLEMS[name].dim  # G and d, or less
    assert 8 * numbers < described.table_bytes <= 8 * (numbers + means)
    assert f"{described.table_bytes} bytes" in str(described)


@pytest.mark.parametrize("noise, locations", [(None, 5), (jcv.PaperNoise(), 2 * 5)])
def test_a_table_beyond_the_budget_becomes_an_anchor(noise, locations):
    """N/B locations of D numbers, to the byte; the paper's form stores σ as well."""
    num_bytes = locations * PROBLEMS["whole"].dim * 8

    def memory(budget):
        return jcv.describe(PROBLEMS["whole"], batch_size=B, noise=noise, memory_budget=budget).memory

    assert memory(num_bytes).startswith("PerBatch()")
    assert memory(num_bytes - 1).startswith("Anchor(")


@pytest.mark.parametrize(
    "sampler", [jcv.Reshuffle(B), jcv.WithReplacement(B), jcv.FullBatch(), jcv.FixedBatches(B)]
)
@pytest.mark.parametrize("name", ["logistic", "whole"])
def test_the_memory_suits_the_sampler(name, sampler):
    objective, control, chosen = jcv.assemble(PROBLEMS[name], sampler=sampler)
    control.memory.check(sampler)
    assert chosen == sampler
    wanted = {"logistic": jcv.PerDatum if sampler.visits_once else jcv.WholeTable}
    wanted["whole"] = jcv.PerBatch if isinstance(sampler, jcv.FixedBatches) else jcv.Anchor
    assert isinstance(control.memory, wanted[name])


OPTIONS = [
    {},
    dict(batch_size=7),
    dict(batch_size="auto"),
    dict(optimizer=optax.sgd(1e-3)),
    dict(control=jcv.NaiveGradient()),
    dict(noise=jcv.PaperNoise()),
    dict(sampler=jcv.FixedBatches(4)),
    dict(control=jcv.JointCV(jcv.Anchor(every=3)), noise=jcv.ParameterNoise()),
    dict(view="whole"),
]


@pytest.mark.parametrize(
    "name, options",
    [("logistic", options) for options in OPTIONS]
    + [("whole", options) for options in ({}, dict(memory_budget=0))],
)
def test_describe_says_what_fit_runs(name, options):
    problem = PROBLEMS[name]
    options = options | ({"view": jcv.WholeView(problem)} if "view" in options else {})
    with jax.numpy_dtype_promotion("standard"):  # natural steps and Adam mix types
        described = jcv.describe(problem, **options)
        fit = jcv.fit(problem, key=KEY, num_steps=1, **options)
    algorithm = fit.algorithm
    assert described.noise == repr(algorithm.objective.noise)
    assert described.memory == f"{algorithm.control.memory!r} with {algorithm.sampler!r}"
    kept = jax.tree.leaves((fit.run.table, fit.run.state.memory))
    assert described.table_bytes == sum(leaf.nbytes for leaf in kept)
    assert described.prior == type(algorithm.objective.prior).__name__
    natural = isinstance(algorithm, jcv.NaturalDescent)
    assert described.steps.startswith(
        "natural" if natural else "the given" if "optimizer" in options else "Adam"
    )
    assert f"{algorithm.sampler.steps_per_epoch(N)} an epoch" in described.steps


# ---------------------------------------------------------------- a view stated by hand

BY_HAND = dict(
    predict=lambda z, datum: datum["x"] @ z,
    loss=lambda eta, datum: jax.nn.softplus(eta) - datum["y"] * eta,
)


def test_a_view_by_hand_is_the_one_found():
    view = jcv.linear_view(PROBLEMS["logistic"], **BY_HAND)
    assert view.num_predictors == 1 and view.has_squares and view.same_rows
    options = dict(key=KEY, optimizer=optax.sgd(2e-3), batch_size=B, num_epochs=3)
    stated = jcv.fit(PROBLEMS["logistic"], view=view, **options)
    found = jcv.fit(PROBLEMS["logistic"], **options)
    assert isinstance(stated.algorithm.objective.noise, jcv.Quadrature)
    assert_allclose(flat(stated.params), flat(found.params), rtol=0, atol=1e-12)


def test_a_view_by_hand_may_be_what_cannot_be_found():
    """A loop is not read, but predictors that the user knows of may come from one, and in a structure of their own."""

    def predict(z, datum):
        start = jnp.zeros((), z.dtype)
        total = jax.lax.fori_loop(0, 3, lambda i, total: total + datum["x"][i] * z[i], start)
        return {"first": total, "all": OTHER[:2] @ z}

    def loss(eta, datum):
        return -bernoulli(eta["first"], datum["y"]) + 0.1 * jnp.sum(jnp.exp(eta["all"]) * datum["x"][:2] ** 2)

    problem = make(lambda z, d: -loss(predict(z, d), d), {"x": X3, "y": BINARY}, np.zeros(3))
    assert isinstance(jcv.find_view(problem).view, jcv.WholeView)
    view = jcv.linear_view(problem, predict=predict, loss=loss)
    assert view.num_predictors == 3 and not view.has_squares
    assert "log σ is not controlled" in jcv.describe(problem, view=view).view
    options = dict(key=KEY, control=jcv.JointCV(jcv.PerDatum()), batch_size=B, num_epochs=3)
    by_view, whole = (
        jcv.fit(problem, view=v, optimizer=optax.sgd(1e-3), noise=jcv.ParameterNoise(), **options)
        for v in (view, jcv.WholeView(problem))
    )
    assert_allclose(flat(by_view.params), flat(whole.params), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(loss=lambda eta, d: jax.nn.softplus(eta)), ["differs at datum", "log_likelihood = −loss"]),
        (dict(loss=lambda eta, d: -BY_HAND["loss"](eta, d)), ["differs at datum", "log_likelihood = −loss"]),
        (
            dict(
                predict=lambda z, d: jnp.sinh(d["x"] @ z),
                loss=lambda eta, d: BY_HAND["loss"](jnp.arcsinh(eta), d),
            ),
            ["not affine", "a step of the predictors"],
        ),
        (dict(predict=lambda z, d: (d["x"] @ z, d["y"])), ["loss", "cannot be called"]),
        (dict(predict=lambda z, d: d["y"]), ["predict", "no z"]),
        (dict(loss=lambda eta, d: eta[None]), ["loss", "scalar"]),
        (dict(predict=3), ["predict=3", "function"]),
    ],
)
@pytest.mark.usefixtures("as_users_run")
def test_a_wrong_view_by_hand_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        jcv.linear_view(PROBLEMS["logistic"], **(BY_HAND | changes))
    for word in words:
        assert word in str(error.value)


# ---------------------------------------------------------------- losses with kinks

LOSSES = {
    "absolute": (lambda eta: jnp.abs(eta[0]), 1, False),
    "hinge": (lambda eta: jnp.maximum(0.0, 1 - eta[0]), 1, False),
    "check": (lambda eta: jnp.where(eta[0] > 0, 0.9 * eta[0], -0.1 * eta[0]), 1, False),
    "absolute of two": (lambda eta: jnp.abs(eta[0]) + eta[1] ** 2, 2, False),
    "huber": (lambda eta: jnp.where(jnp.abs(eta[0]) < 1, eta[0] ** 2 / 2, jnp.abs(eta[0]) - 0.5), 1, True),
    "softplus": (lambda eta: jax.nn.softplus(eta[0]), 1, True),
    "student": (lambda eta: jnp.log1p(eta[0] ** 2), 1, True),
    "product": (lambda eta: eta[0] * eta[1], 2, True),
}


@pytest.mark.parametrize("name", LOSSES)
def test_natural_steps_are_not_for_losses_of_straight_pieces(name):
    """Their ℓ'' is zero wherever there is one, and a step size read from it would have no bound."""
    loss, count, curved = LOSSES[name]

    def log_likelihood(z, datum):
        return -loss(datum["x"] @ z.reshape(3, count) - datum["y"])

    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(40, 3)), "y": rng.normal(size=40)}
    problem = make(log_likelihood, data, np.zeros(3 * count))
    assert jcv.find_view(problem).view.is_curved is curved
    described = jcv.describe(problem)
    assert described.steps.startswith("natural" if curved else "Adam")
    assert ("straight pieces" in described.reason) is not curved


# ---------------------------------------------------------------- data set apart


def matches(num_selves):
    second = np.where(np.arange(N) < num_selves, GROUP, SECOND)
    return make(
        lambda z, d: jax.nn.log_softmax(jnp.stack([z[d["i"]], z[d["j"]]]))[0],
        {"i": GROUP, "j": second},
        np.zeros(4),
    )


def test_a_few_data_are_set_apart():
    """A player against himself moves to the part that is not subsampled: the same ELBO, and all data in the fit."""
    problem = matches(2)
    found = jcv.find_view(problem)
    assert "2 of 23" in found.reason and "handled in full" in found.reason
    assert found.view.problem.num_data == N - 2 and found.view.has_squares
    params = params_at(4)
    nodes, masses = normal_grid(4, 12)
    z = params.location + params.scale * nodes

    def log_joint(z):
        return jnp.sum(jax.vmap(problem.likelihood_at, (None, 0))(z, problem.data)) + problem.prior_at(z)

    exact = masses @ np.asarray(jax.vmap(log_joint)(z))
    objective = jcv.assemble(problem)[0]
    got = -full_value(objective, params, KEY, num_draws=3000).value
    entropy = float(params.log_scale.sum() + 2 * (1 + np.log(2 * np.pi)))
    error = full_value(objective, params, KEY, num_draws=3000).standard_error
    assert abs(got - entropy - exact) < 4.5 * error + 1e-6
    fit = jcv.fit(problem, key=KEY, num_epochs=2, batch_size=B, optimizer=optax.sgd(1e-3))
    assert fit.problem.num_data == N
    assert fit.extend(num_steps=1).problem.num_data == N
    whole = jcv.fit(problem, key=KEY, num_epochs=1, batch_size=N, optimizer=optax.sgd(1e-3))
    assert whole.algorithm.sampler.batch_size == N - 2


def test_many_data_that_offend_stay():
    problem = matches(17)
    found = jcv.find_view(problem)
    assert not found.view.has_squares and found.view.problem.num_data == N
    described = jcv.describe(problem, optimizer=optax.sgd(1e-3))
    assert "log σ is not controlled" in described.view and "17 of 23" in described.reason
    assert described.noise == repr(jcv.ParameterNoise())


def test_a_view_of_another_problem_is_refused():
    with pytest.raises(ValueError, match="another problem"):
        jcv.fit(PROBLEMS["logistic"], key=KEY, view=jcv.WholeView(PROBLEMS["logistic2"]))


def test_a_view_of_other_data_of_the_same_size_is_refused():
    problem = PROBLEMS["logistic"]
    other = dataclasses.replace(problem, data=problem.data | {"y": 1 - problem.data["y"]})
    with pytest.raises(ValueError, match="other data"):
        jcv.fit(problem, key=KEY, view=jcv.find_view(other).view)


def test_one_latent_variable_is_one_predictor():
    """Whatever the likelihood makes of it: its expectations are by quadrature."""
    problem = jcv.Problem(
        log_prior=wide_prior,
        log_likelihood=lambda z, datum: -0.5 * (datum - jnp.tanh(z[0])) ** 2,
        data=np.linspace(-0.5, 0.9, N),
        example=np.zeros(1),
    )
    described = jcv.describe(problem)
    assert described.num_predictors == 1 and described.noise.startswith("Quadrature")


def test_an_algorithm_stands_for_itself():
    """What is said beside it would be ignored, and so it is refused."""
    with pytest.raises(ValueError, match="batch_size, noise given beside an algorithm"):
        jcv.fit(compose("logistic", "parameter"), key=KEY, batch_size=3, noise=jcv.ParameterNoise())
    assert_array_equal(
        jcv.fit(compose("logistic", "parameter"), key=KEY, num_steps=1).history["loss"].shape, 1
    )
