"""The drop-in for NumPyro's SVI, against NumPyro's own and against NUTS; and the views of NumPyro models."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from jax.example_libraries import optimizers
from numpyro.infer import MCMC, NUTS, Predictive, RenyiELBO, Trace_ELBO
from numpyro.infer import SVI as NumPyroSVI
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal

import jointcv as jcv
from jointcv.guide import GuideMap, map_guide, through_guide
from jointcv.numpyro import SVI
from numpyro_models import CASES

RNG = np.random.default_rng(3)
X = jnp.asarray(RNG.normal(size=(120, 3)))
WEIGHTS = np.array([1.0, -0.7, 0.4])
REAL = jnp.asarray(X @ WEIGHTS + RNG.normal(size=120))
BINARY = jnp.asarray(RNG.random(120) < 1 / (1 + np.exp(-X @ WEIGHTS)), int)
COUNTS = jnp.asarray(RNG.poisson(np.exp(0.5 * (X @ WEIGHTS))))
CLASSES = jnp.asarray(RNG.integers(0, 3, 120))
KEY = random.key(0)


def regression(likelihood, shape=(3,)):
    """A model of (x, y): normal weights and this distribution of y given x·w."""

    def model(x, y=None, batch=20):
        w = numpyro.sample("w", dist.Normal(0, 2).expand(shape).to_event(len(shape)))
        with numpyro.plate("data", len(x), subsample_size=batch) as idx:
            numpyro.sample("y", likelihood(x[idx] @ w), obs=None if y is None else y[idx])

    return model


gaussian = regression(lambda eta: dist.Normal(eta, 1.0))
REGRESSIONS = {
    "linear": (gaussian, REAL),
    "logistic": (regression(lambda eta: dist.Bernoulli(logits=eta)), BINARY),
    "poisson": (regression(lambda eta: dist.Poisson(jnp.exp(eta))), COUNTS),
}
MODELS = REGRESSIONS | {
    "softmax": (regression(lambda eta: dist.Categorical(logits=eta), (3, 3)), CLASSES),
}


def two_sites(x, y, batch=20):
    """Sites whose order in the model is not that of their names."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", len(x), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Normal(x[idx] @ w.sum(0), sigma), obs=y[idx])


def make(model=gaussian, guide=AutoNormal, optim=None, **options):
    return SVI(
        model, guide(model), numpyro.optim.Adam(0.01) if optim is None else optim, Trace_ELBO(), **options
    )


@pytest.fixture(scope="module")
def fitted():
    """A short run, for what is done with one."""
    svi = make()
    state = svi.init(KEY, X, REAL)
    return SimpleNamespace(svi=svi, state=state, result=svi.run(KEY, 20, X, REAL, progress_bar=False))


# Where it ends ---------------------------------------------------------------------------------------------


def elbos(model, guide, params, y, draws=1000):
    """The ELBO on all data for every one of these parameters, and its standard error, by NumPyro."""

    def one(params, key):
        return -Trace_ELBO().loss(key, params, model, guide, X, y, batch=None)

    keys = random.split(random.key(5), draws)
    values = np.asarray(jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))(params, keys))
    return values.mean(1), values.std(1) / np.sqrt(draws)


def end(model, y, kind, **options):
    """The ELBO where runs with four keys end, and its standard error over draws and runs."""
    steps = 2000
    guide, optim = AutoNormal(model), optax.adam(optax.cosine_decay_schedule(0.01, steps))
    svi = kind(model, guide, optim, Trace_ELBO(), **options)
    svi.init(KEY, X, y)
    runs = jax.jit(jax.vmap(lambda key: svi.run(key, steps, X, y, progress_bar=False).params))
    means, errors = elbos(model, guide, runs(random.split(random.key(1), 4)), y)
    return means.mean(), np.hypot(means.std(ddof=1) / 2, errors.mean())


@pytest.mark.parametrize("name", MODELS)
def test_ends_where_numpyro_ends_and_joint_no_lower(name):
    theirs, error = end(*MODELS[name], NumPyroSVI)
    naive, naive_error = end(*MODELS[name], SVI, control=jcv.NaiveGradient())
    joint, joint_error = end(*MODELS[name], SVI)
    assert abs(naive - theirs) < 3 * np.hypot(error, naive_error)
    assert joint > theirs - 3 * np.hypot(error, joint_error)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_posterior_is_that_of_nuts_as_far_as_a_mean_field_goes(name):
    model, y = REGRESSIONS[name]
    mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(1), X, y, batch=None)
    draws = np.asarray(mcmc.get_samples()["w"])
    svi = make(model, optim=optax.adam(optax.cosine_decay_schedule(0.05, 1200)))
    params = svi.run(KEY, 1200, X, y, progress_bar=False).params
    covariance = np.cov(draws.T)
    assert np.all(np.abs(params["w_auto_loc"] - draws.mean(0)) < 0.1 * draws.std(0))
    # The best mean field of a Gaussian has sd_i = 1/√precision_ii.
    np.testing.assert_allclose(params["w_auto_scale"], np.diag(np.linalg.inv(covariance)) ** -0.5, rtol=0.08)
    if name == "linear":
        precision = X.T @ X + np.eye(3) / 4
        np.testing.assert_allclose(params["w_auto_scale"], np.diag(precision) ** -0.5, rtol=1e-3)
        np.testing.assert_allclose(params["w_auto_loc"], np.linalg.solve(precision, X.T @ REAL), atol=1e-3)


# The guide's parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_starts_with_numpyros_parameters(guide):
    theirs = NumPyroSVI(two_sites, guide(two_sites), numpyro.optim.Adam(0.01), Trace_ELBO())
    expected = theirs.get_params(theirs.init(KEY, X, REAL))
    ours = make(two_sites, guide)
    found = ours.get_params(ours.init(KEY, X, REAL))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12)
    changed = {name: 2 * value for name, value in expected.items()}
    found = ours.get_params(ours.init(KEY, X, REAL, init_params=changed))
    for name, value in changed.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12)


@pytest.mark.parametrize("constraint", [dist.constraints.softplus_positive, dist.constraints.positive])
@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_optimiser_moves_the_guides_own_parameters(guide, constraint):
    guide = guide(two_sites)
    guide.scale_constraint = constraint
    NumPyroSVI(two_sites, guide, numpyro.optim.Adam(0.01), Trace_ELBO()).init(KEY, X, REAL)
    problem = jcv.from_numpyro(two_sites, X, REAL)
    mapped: GuideMap = map_guide(guide, problem)
    params = jcv.MeanFieldParams(jnp.asarray(RNG.normal(size=7)), jnp.asarray(RNG.normal(-1, 0.5, size=7)))

    def loss(params):
        return jnp.sum(jnp.sin(params.location) * params.log_scale + params.log_scale**2)

    free = mapped.write_free(params)
    theirs = numpyro.optim.SGD(0.1)
    state = theirs.init(free)
    ours = through_guide(theirs, mapped)
    our_state = ours.init(params)
    for _ in range(2):
        gradient = jax.grad(lambda free: loss(mapped.read_free(free)))(theirs.get_params(state))
        state = theirs.update(gradient, state)
        updates, our_state = ours.update(jax.grad(loss)(params), our_state, params)
        params = optax.apply_updates(params, updates)
    expected = mapped.read_free(theirs.get_params(state))
    np.testing.assert_allclose(params.location, expected.location, rtol=1e-12)
    np.testing.assert_allclose(params.log_scale, expected.log_scale, rtol=1e-12)


def test_guide_predictive_and_loss_take_the_result(fitted):
    guide, params = fitted.svi.guide, fitted.result.params
    assert guide.median(params)["w"].shape == (3,)
    assert guide.quantiles(params, [0.1, 0.9])["w"].shape == (2, 3)
    assert guide.sample_posterior(KEY, params, sample_shape=(5,))["w"].shape == (5, 3)
    predictive = Predictive(gaussian, guide=guide, params=params, num_samples=6)
    assert predictive(KEY, X, batch=None)["y"].shape == (6, 120)
    state = fitted.result.state
    keys = random.split(random.key(2), 20)
    evaluate = jax.jit(lambda key: fitted.svi.evaluate(state._replace(rng_key=key), X, REAL, batch=None))
    losses = [evaluate(key) for key in keys]
    (value,), _ = elbos(gaussian, guide, jax.tree.map(lambda leaf: leaf[None], params), REAL)
    assert abs(np.mean(losses) + value) < 4 * np.std(losses) / np.sqrt(20)


# The loop --------------------------------------------------------------------------------------------------


def test_update_in_a_loop_of_ones_own_takes_the_steps_of_run(fitted):
    @jax.jit
    def loop(state, x, y):
        return jax.lax.scan(lambda state, _: fitted.svi.update(state, x, y), state, None, length=20)

    state, losses = loop(fitted.state, X, REAL)
    np.testing.assert_allclose(losses, fitted.result.losses, rtol=1e-9)
    for name, value in fitted.svi.get_params(state).items():
        np.testing.assert_allclose(value, fitted.result.params[name], rtol=1e-9)


def test_goes_on_from_a_state(fitted):
    first = fitted.svi.run(KEY, 9, X, REAL, progress_bar=False)
    second = fitted.svi.run(random.key(9), 11, X, REAL, progress_bar=False, init_state=first.state)
    losses = np.concatenate([first.losses, second.losses])
    np.testing.assert_allclose(losses, fitted.result.losses, rtol=1e-9)


def faulty() -> optax.GradientTransformation:
    """Gradient descent whose every third step is not a number."""

    def update(updates, count, params=None):
        step = jnp.where(count % 3 == 2, jnp.nan, -1e-4)
        return jax.tree.map(lambda leaf: step * leaf, updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), int), update)


def test_stable_update_skips_what_is_not_finite():
    svi = make(optim=faulty())
    usual = svi.run(KEY, 6, X, REAL, progress_bar=False)
    np.testing.assert_array_equal(np.isnan(usual.losses), [False, False, True, True, True, True])
    stable = svi.run(KEY, 6, X, REAL, progress_bar=False, stable_update=True)
    assert 0 < np.isnan(stable.losses).sum() < 6
    for result in (usual, stable):
        assert all(np.isfinite(value).all() for value in result.params.values())


@pytest.mark.parametrize(
    "optim",
    [
        numpyro.optim.ClippedAdam(0.01),
        optimizers.adagrad(0.1),
        optax.chain(optax.clip(10.0), optax.adam(0.01), optax.contrib.reduce_on_plateau()),
        jcv.NaturalGradient(),
    ],
    ids=["numpyro", "jax", "optax", "natural"],
)
def test_optimisers_of_all_kinds(optim):
    result = make(optim=optim).run(KEY, 30, X, REAL, progress_bar=False)
    assert np.mean(result.losses[-6:]) < np.mean(result.losses[:6])


def test_key_of_the_old_style_and_static_arguments():
    svi = SVI(gaussian, AutoNormal(gaussian), optax.adam(0.01), batch=30)
    state = svi.init(random.PRNGKey(0), X, y=REAL)
    assert state.optim_state.schedule.indices.shape == (4, 30)
    assert jnp.isfinite(svi.update(state, X, y=REAL)[1])


# What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"guide": AutoMultivariateNormal(gaussian)}, "AutoNormal and AutoDiagonalNormal"),
        ({"guide": AutoDelta(gaussian)}, "AutoNormal and AutoDiagonalNormal"),
        ({"guide": lambda x, y: None}, "AutoNormal and AutoDiagonalNormal"),
        ({"loss": RenyiELBO(2.0)}, "RenyiELBO is not supported"),
        ({"loss": Trace_ELBO(num_particles=4)}, "num_particles=4"),
        ({"loss": Trace_ELBO(sum_sites=False)}, "sum_sites=False"),
        ({"optim": numpyro.optim.Minimize()}, "Use a stochastic optimiser"),
    ],
)
@pytest.mark.usefixtures("as_users_run")
def test_refused_at_construction(options, message):
    arguments = {"guide": AutoNormal(gaussian), "optim": optax.adam(0.01), "loss": Trace_ELBO()} | options
    with pytest.raises(ValueError, match=message):
        SVI(gaussian, arguments["guide"], arguments["optim"], arguments["loss"])


@pytest.mark.usefixtures("as_users_run")
def test_refused_when_called(fitted):
    svi = fitted.svi
    with pytest.raises(ValueError, match="not those that init"):
        svi.update(fitted.state, X[:20], REAL[:20])
    with pytest.raises(ValueError, match="not those that init"):
        svi.update(fitted.state, X, REAL + 1)
    with pytest.raises(ValueError, match="forward_mode_differentiation"):
        svi.update(fitted.state, X, REAL, forward_mode_differentiation=True)
    for count in (0, 10.0):
        with pytest.raises(ValueError, match=f"num_steps={count} is not a number of steps"):
            svi.run(KEY, count, X, REAL)
    with pytest.raises(ValueError, match="has not seen"):
        make().get_params(fitted.state)
    with pytest.raises(ValueError, match="the guide's parameters are"):
        svi.init(KEY, X, REAL, init_params={"w_loc": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"init_params\['w_auto_loc'\] has the shape \(4,\)"):
        svi.init(KEY, X, REAL, init_params={"w_auto_loc": jnp.zeros(4)})
    with pytest.raises(ValueError, match="Make the guide of the same model"):
        SVI(gaussian, AutoNormal(two_sites), optax.adam(0.01)).init(KEY, X, REAL)
    with pytest.raises(ValueError, match="subsample_size=130, more than its 120 data"):
        make().init(KEY, X, REAL, batch=130)


def test_other_data_are_refused_where_they_are_traced(fitted):
    @jax.jit
    def only_the_state(state, x, y):
        return jax.lax.fori_loop(0, 2, lambda _, state: fitted.svi.update(state, x, y)[0], state)

    with pytest.raises(jax.errors.JaxRuntimeError, match="not those that init"):
        jax.block_until_ready(only_the_state(fitted.state, X, REAL + 1))


def test_missing_values_are_the_same_data(fitted):
    y = REAL.at[3].set(jnp.nan)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        seen, target = ~jnp.isnan(y), jnp.nan_to_num(y)
        with numpyro.plate("data", len(y), subsample_size=20) as idx:
            numpyro.sample("y", dist.Normal(x[idx] @ w, 1.0).mask(seen[idx]), obs=target[idx])

    svi = make(model)
    state = svi.init(KEY, X, y)
    compiled, eager = jax.jit(svi.update)(state, X, y)[1], svi.update(state, X, y.copy())[1]
    assert compiled == pytest.approx(eager)


def test_states_of_others_are_refused(fitted):
    theirs = NumPyroSVI(gaussian, AutoNormal(gaussian), numpyro.optim.Adam(0.01), Trace_ELBO())
    other = make().init(KEY, X[:110], REAL[:110])
    for state in (theirs.init(KEY, X, REAL), other):
        with pytest.raises(ValueError, match="The state is not one of this SVI"):
            fitted.svi.update(state, X, REAL)


def test_arguments_are_seen_outside_of_jit_first(fitted):
    def run(svi, key, x, y):
        return svi.run(key, 20, x, y, progress_bar=False).losses

    svi = make()
    with pytest.raises(ValueError, match="inside jax.jit"):
        jax.jit(svi.init)(KEY, X, REAL)
    assert svi.guide.prototype_trace is None  # nothing traced is left in the guide
    losses = jax.jit(partial(run, fitted.svi))(KEY, X, REAL)
    np.testing.assert_allclose(losses, fitted.result.losses, rtol=1e-9)


def test_models_that_cannot_be_served_are_refused_with_our_words():
    def ignores_indices(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", len(y), subsample_size=20):
            numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    def discrete(x, y):
        shift = numpyro.sample("shift", dist.Bernoulli(0.5))
        with numpyro.plate("data", len(y), subsample_size=20) as idx:
            numpyro.sample("y", dist.Normal(shift, 1.0), obs=y[idx])

    for model, message in ((ignores_indices, "ignores the indices"), (discrete, "'shift' is discrete")):
        with pytest.raises(ValueError, match=message):
            make(model).init(KEY, X, REAL)


# Views -----------------------------------------------------------------------------------------------------


def centred_bradley_terry(winner, loser, players):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("players", players):
        skill = numpyro.sample("skill", dist.Normal(0, scale))
    with numpyro.plate("matches", len(winner), subsample_size=5) as idx:
        logits = skill[winner[idx]] - skill[loser[idx]]
        numpyro.sample("won", dist.Bernoulli(logits=logits), obs=jnp.ones_like(logits))


def view_case(name):
    case = CASES[name]
    return case.model, case.args, case.kwargs


@pytest.mark.parametrize(
    "case, num_predictors",
    [
        (view_case("logistic"), 1),
        (view_case("softmax"), 4),
        (view_case("Poisson"), 1),
        ((centred_bradley_terry, CASES["Bradley-Terry"].args, {}), 1),
        (view_case("crossed"), 1),
        (view_case("MovieLens"), 5),
    ],
    ids=["logistic", "softmax", "Poisson", "Bradley-Terry", "crossed", "MovieLens"],
)
def test_view_is_found_through_numpyro(case, num_predictors):
    model, args, kwargs = case
    described = jcv.describe(jcv.from_numpyro(model, *args, **kwargs), batch_size=5)
    assert described.num_predictors == num_predictors
    assert described.reason == ""


def test_a_few_data_are_set_apart():
    """A match of a player with himself is handled in full, beside the prior."""
    winner, loser = jnp.arange(20) % 4, (jnp.arange(20) + 1) % 4
    args = (winner, loser.at[0].set(winner[0]), 4)
    svi = make(centred_bradley_terry)
    result = svi.run(KEY, 3, *args, progress_bar=False)
    assert np.isfinite(result.losses).all()
    _, loss = jax.jit(svi.update)(result.state, *args)
    assert np.isfinite(loss)
