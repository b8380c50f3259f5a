"""A NumPyro model as a problem, against NumPyro's own potential energy, and the models that are refused."""

import random

import jax

jax.config.update("jax_enable_x64", True)

import equinox as eqx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
import pytest  # noqa: E402
from numpyro import handlers  # noqa: E402
from numpyro.contrib.control_flow import scan  # noqa: E402
from numpyro.infer.reparam import LocScaleReparam  # noqa: E402
from numpyro.infer.util import constrain_fn, potential_energy  # noqa: E402

from jointcv.numpyro_model import from_numpyro, trace_model  # noqa: E402
from numpyro_models import BINARY, CASES, COUNTS, REAL, N, X, groups, logistic, observed_outside  # noqa: E402


@pytest.fixture(scope="module")
def traced():
    """Every case is traced once."""
    memory = {}

    def get(name):
        if name not in memory:
            case = CASES[name]
            memory[name] = trace_model(case.model, *case.args, **case.options, **case.kwargs)
        return memory[name]

    return get


def points(example, count=3):
    keys = jax.random.split(jax.random.key(1), len(example))
    draws = zip(example.items(), keys, strict=True)
    return {
        name: 0.7 * jax.random.normal(key, (count, *leaf.shape), leaf.dtype) for (name, leaf), key in draws
    }


@pytest.mark.parametrize("name", CASES)
def test_terms_add_up_to_numpyros_potential_energy(traced, name):
    case, problem = CASES[name], traced(name).problem()

    def ours(z):
        return -problem.log_prior(z) - jnp.sum(jax.vmap(problem.log_likelihood, (None, 0))(z, problem.data))

    def theirs(z):
        return potential_energy(case.model, *case.reference_arguments, z)

    z = points(problem.example)
    value, gradient = jax.jit(jax.vmap(jax.value_and_grad(ours)))(z)
    expected, expected_gradient = jax.jit(jax.vmap(jax.value_and_grad(theirs)))(z)
    assert problem.num_data == N
    np.testing.assert_allclose(value / N, expected / N, rtol=1e-10, atol=1e-10)
    for site in gradient:
        np.testing.assert_allclose(gradient[site] / N, expected_gradient[site] / N, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_constrained_values_are_numpyros(traced, name):
    case, model = CASES[name], traced(name)
    z = jax.tree.map(lambda leaf: leaf[0], points(model.example))
    everything = jax.jit(
        lambda z: constrain_fn(case.model, *case.reference_arguments, z, return_deterministic=True)
    )(z)
    expected = {site: value for site, value in everything.items() if not site.startswith("row_")}
    values = jax.jit(jax.vmap(model.constrain))(points(model.example))
    assert values.keys() == expected.keys()
    for site, value in expected.items():
        np.testing.assert_allclose(values[site][0], value, rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_compact(traced, name):
    model = traced(name)
    assert sum(leaf[0].size for leaf in model.data) == CASES[name].row_entries
    assert all(leaf.shape[0] == N for leaf in model.data)
    constants = jax.tree.leaves(model.log_likelihood)
    assert sum(leaf.size for leaf in constants) <= 10  # nothing with N rows


@pytest.mark.parametrize("name", ["two sites and a factor", "masked", "scaled", "repeated measures"])
def test_log_likelihood_by_site(traced, name):
    model, indices = traced(name), jnp.array([4, 0, 17])
    z = jax.tree.map(lambda leaf: leaf[0], points(model.example))
    by_site = eqx.filter_jit(model.log_likelihood_by_site)(z, indices)
    log_likelihood = eqx.filter_jit(model.log_likelihood)
    assert set(by_site) == set(model.likelihood_sites)
    for place, index in enumerate(indices):
        datum = jax.tree.map(lambda leaf, row=index: leaf[row], model.data)
        assert all(term.shape == (3,) for term in by_site.values())
        np.testing.assert_allclose(sum(t[place] for t in by_site.values()), log_likelihood(z, datum))


def test_constants_are_leaves_and_computed_once():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)))

    def model(kind, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([6]).to_event(1))
        centred = table - table.mean(0)
        with numpyro.plate("data", 5000) as idx:
            numpyro.sample("y", dist.Normal(centred[kind[idx]] @ w, 1.0), obs=y[idx])

    traced = trace_model(model, jnp.arange(5000) % 4, jnp.zeros(5000))
    (constant,) = [leaf for leaf in jax.tree.leaves(traced.log_likelihood) if leaf.size > 1]
    np.testing.assert_allclose(constant, table - table.mean(0))
    assert [leaf.size for leaf in traced.data] == [5000, 5000]


def test_one_hot_rows_are_stored_as_their_index():
    def model(kind, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([50]).to_event(1))
        with numpyro.plate("data", N) as idx:
            numpyro.sample("y", dist.Normal(jax.nn.one_hot(kind[idx], 50) @ w, 1.0), obs=y[idx])

    traced = trace_model(model, groups(50, 0), REAL)
    assert sum(leaf[0].size for leaf in traced.data) == 2


def test_a_jitted_predictor_is_seen_through():
    predictor = jax.jit(lambda w, x, idx: x[idx] @ w)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", N) as idx:
            numpyro.sample("y", dist.Normal(predictor(w, x, idx), 1.0), obs=y[idx])

    traced = trace_model(model, X, REAL)
    assert sum(leaf[0].size for leaf in traced.data) == 4
    assert all(leaf.size == 1 for leaf in jax.tree.leaves(traced.log_likelihood))


@pytest.mark.parametrize("asarray", [np.asarray, jnp.asarray])
def test_rows_that_are_indexed_twice_are_stored_once(asarray):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
        with numpyro.plate("data", N) as idx:
            numpyro.sample("y", dist.Normal(x[idx] @ w[0], jnp.exp(x[idx] @ w[1])), obs=y[idx])

    assert sum(leaf[0].size for leaf in trace_model(model, asarray(X), asarray(REAL)).data) == 4


def test_sizes_can_be_computed_from_numpy_arguments():
    def model(group, y):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([int(group.max()) + 1]).to_event(1))
        with numpyro.plate("data", N, subsample_size=4) as idx:
            numpyro.sample("y", dist.Normal(effect[group[idx]], 1.0), obs=y[idx])

    assert from_numpyro(model, np.asarray(groups(5, 1)), np.asarray(REAL)).dim == 5


def test_observed_values_keep_the_models_shapes(traced):
    np.testing.assert_array_equal(
        traced("repeated measures").observed()["y"], CASES["repeated measures"].args[1]
    )
    np.testing.assert_array_equal(traced("rows without a plate").observed()["y"], REAL)
    seen = traced("observed outside").observed()
    assert {site: value.shape for site, value in seen.items()} == {"pilot": (4,), "y": (N,)}


@pytest.mark.parametrize("name", ["linear, numpyro.subsample", "reparam", "rows without a plate"])
def test_predictive_draws_all_rows(traced, name):
    model = traced(name)
    samples = jax.vmap(model.constrain)(points(model.example, 400))
    draws = model.predictive(jax.random.key(0), samples)
    assert {site: value.shape for site, value in draws.items()} == {"y": (400, N)}
    assert np.abs(np.asarray(draws["y"]).mean()) < 1.0
    assert not np.allclose(draws["y"][0], model.observed()["y"])


def test_one_datum_and_float32():
    problem = from_numpyro(logistic, X[:1], BINARY[:1])
    assert problem.num_data == 1
    with jax.enable_x64(False):
        single = from_numpyro(logistic, X.astype(jnp.float32), BINARY.astype(jnp.int32), batch=5)
        datum = jax.tree.map(lambda leaf: leaf[0], single.data)
        assert single.log_likelihood(single.example, datum).dtype == jnp.float32


# What is refused -------------------------------------------------------------------------------------------


def refuses(model, *args, match, **kwargs):
    with pytest.raises(ValueError, match=match):
        from_numpyro(model, *args, **kwargs)


def weights():
    return numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))


def test_local_latents():
    def in_plate(y, batch):
        with numpyro.plate("data", N, subsample_size=batch) as idx:
            u = numpyro.sample("u", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(u, 1), obs=y[idx])

    def by_length(y):
        with numpyro.plate("data", N) as idx:
            pass
        u = numpyro.sample("u", dist.Normal(0, 1).expand(idx.shape).to_event(1))
        with numpyro.plate("data again", N, subsample_size=4) as idx:
            numpyro.sample("y", dist.Normal(u[0], 1), obs=y[idx])

    def in_rows(y):
        with numpyro.plate("data", len(y)):
            u = numpyro.sample("u", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(u, 1), obs=y)

    refuses(in_plate, REAL, batch=5, match="'u' belongs to the data plate 'data'.*local")
    refuses(in_plate, REAL, batch=None, match=r"no plate.*\['u'\] share the plates \['data'\]")
    refuses(in_plate, REAL, batch=None, data_plate="data", match="'u' belongs to the data plate 'data'")
    refuses(in_rows, data={"y": REAL}, match="'u' grows with the rows of data")
    assert from_numpyro(by_length, REAL).dim == N


def test_partly_observed_sites():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("data", N, subsample_size=4) as idx:
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[idx], obs_mask=y[idx] > 0)

    refuses(model, REAL, match="'y_unobserved' belongs to the data plate")


def test_ignored_indices():
    def whole(x, y, batch=None):
        w = weights()
        with numpyro.plate("data", N, subsample_size=batch):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    def only_values(x, y):
        w = weights()
        with numpyro.plate("data", N) as idx:
            numpyro.sample("y", dist.Normal(x[idx] @ w, 1), obs=y)

    def constant():
        w = weights()
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(w[0], 1), obs=jnp.zeros(()))

    refuses(
        whole, X, REAL, match=f"'y' ignores the indices of plate 'data': for 1 index it has {N} rows.*data="
    )
    refuses(only_values, X, REAL, match="'y' ignores the indices of plate 'data'")
    refuses(constant, match="No observed site depends on the indices of plate 'data'")


def test_coupled_rows():
    def centred(x, y):
        w = weights()
        with numpyro.plate("data", N) as idx:
            rows = x[idx] - x[idx].mean(0)
            numpyro.sample("y", dist.Normal(rows @ w, 1), obs=y[idx])

    def scaled_by_batch(X, y):
        w = weights()
        with handlers.scale(scale=N / len(y)):
            numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)

    def sized(X, y):
        w = weights()
        with numpyro.plate("data", N):
            numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)

    refuses(centred, X, REAL, match="'y' couples its rows: 3 rows")
    refuses(scaled_by_batch, data={"X": X, "y": REAL}, match="'y' couples its rows: 3 rows")
    refuses(sized, data={"X": X, "y": REAL}, match="runs with 1 datum but not with 3")


def test_rows_outside_the_likelihood():
    def factor_outside(x, y):
        w = weights()
        with numpyro.plate("data", N) as idx:
            numpyro.sample("y", dist.Normal(x[idx] @ w, 1), obs=y[idx])
        numpyro.factor("late", -jnp.sum((x[idx] @ w) ** 2))

    def prior_of_rows(X, y):
        w = numpyro.sample("w", dist.Normal(X.mean(), 1))
        numpyro.sample("y", dist.Normal(w, 1), obs=y)

    def support_of_rows(X, y):
        w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.greater_than(X.max()), (), ()))
        numpyro.sample("y", dist.Normal(w, 1), obs=y)

    refuses(factor_outside, X, REAL, match=r"Sites \['late'\] depend on the data's rows")
    refuses(prior_of_rows, data={"X": X, "y": REAL}, match=r"Sites \['w'\] depend on the data's rows")
    refuses(support_of_rows, data={"X": X, "y": REAL}, match="_w_log_det|'w'")


def test_which_plate():
    refuses(observed_outside, X, REAL, REAL[:4], match=r"\['data', 'pilots'\].*data_plate='data'")
    refuses(logistic, X, BINARY, data_plate="rows", match=r"data_plate='rows' is not a plate.*\['data'\]")
    refuses(logistic, X, BINARY, data_plate="data", data={"x": X}, match="both given")
    refuses(
        CASES["rows without a plate"].model, X, REAL, 1.0, match="no plate that holds observed sites.*data="
    )
    refuses(
        CASES["crossed"].model, *CASES["crossed"].args, data_plate="rows", match="'rows' holds no observed"
    )

    plate = numpyro.plate("data", N)

    def plate_from_outside(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with plate:
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    refuses(plate_from_outside, REAL, match="'data' was created outside the model")

    def subsampled_groups(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("groups", 4, subsample_size=2):
            numpyro.sample("effects", dist.Normal(mean, 1))
        with numpyro.plate("data", N, subsample_size=5) as idx:
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[idx])

    assert trace_model(subsampled_groups, REAL).data_plate == "data"


@pytest.mark.usefixtures("as_users_run")
def test_arguments_of_the_wrong_kind():
    refuses(None, match="model=None.*function of NumPyro statements")
    refuses(CASES["rows without a plate"].model, data=X, prior_scale=1.0, match="by name: data=")


def test_rows_of_different_length():
    refuses(
        CASES["rows without a plate"].model,
        data={"X": X, "y": REAL[:5]},
        prior_scale=1.0,
        match="same number",
    )
    refuses(
        CASES["rows without a plate"].model, data={"X": X, "y": 1.0}, prior_scale=1.0, match="same number"
    )


def test_rows_in_lists():
    with pytest.raises(ValueError, match="same number.*np.asarray of a list") as error:
        from_numpyro(CASES["rows without a plate"].model, data={"X": X.tolist(), "y": REAL}, prior_scale=1.0)
    assert len(str(error.value)) < 400


def test_discrete_latents():
    def model(y, marked):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("data", N) as idx:
            k = numpyro.sample("k", dist.Bernoulli(0.5), infer={"enumerate": "parallel"} if marked else {})
            numpyro.sample("y", dist.Normal(mean * k, 1), obs=y[idx])

    refuses(model, REAL, True, match="'k' is discrete.*MixtureSameFamily")
    refuses(model, REAL, False, match="'k' is discrete")


def with_data(y, mean):
    with numpyro.plate("data", N) as idx:
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[idx])


def test_stochastic_control_flow():
    def branch(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with_data(y, numpyro.sample("more", dist.Normal(0, 1)) if mean > 0 else mean)

    def changing(y):
        mean = numpyro.sample(f"mean_{random.random()}", dist.Normal(0, 1))
        with_data(y, mean)

    def loop(y):
        def step(carry, _):
            return numpyro.sample("state", dist.Normal(carry, 1)), None

        last, _ = scan(step, 0.0, None, length=4)
        with_data(y, last)

    def captured(y):
        with_data(np.asarray(REAL), numpyro.sample("mean", dist.Normal(0, 1)))

    refuses(captured, REAL, match="NumPy arrays as arguments instead of capturing")
    refuses(branch, REAL, match="concrete value.*stochastic control flow")
    refuses(changing, REAL, match="change between two runs")
    refuses(loop, REAL, match="'state' is inside a control flow primitive")


def test_observed_scan_belongs_to_the_prior():
    def model(y, series):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        scan(
            lambda carry, value: (numpyro.sample("series", dist.Normal(mean + carry, 1), obs=value), None),
            0.0,
            series,
        )
        with_data(y, mean)

    traced = trace_model(model, REAL, REAL[:4])
    z = {"mean": jnp.asarray(0.3)}
    total = traced.log_prior(z) + jnp.sum(traced.log_likelihood_by_site(z, jnp.arange(N))["y"])
    np.testing.assert_allclose(
        total, -jax.jit(lambda z: potential_energy(model, (REAL, REAL[:4]), {}, z))(z), rtol=1e-12
    )


def test_statements_without_a_prior():
    def parameter(y):
        with_data(y, numpyro.param("mean", 0.0) + numpyro.sample("shift", dist.Normal(0, 1)))

    def own_noise(y):
        with_data(y, numpyro.sample("mean", dist.Normal(0, 1)) + jax.random.normal(numpyro.prng_key()))

    def hidden(y):
        with handlers.block():
            mean = numpyro.sample("mean", dist.Normal(0, 1))
        with_data(y, mean + numpyro.sample("shift", dist.Normal(0, 1)))

    def delta(y):
        with_data(y, numpyro.sample("mean", dist.Delta(0.0)))

    def nothing(y):
        with_data(y, 0.0)

    refuses(parameter, REAL, match="'mean' is a numpyro.param statement")
    refuses(own_noise, REAL, match="random numbers outside")
    refuses(hidden, REAL, match="random numbers outside")
    refuses(delta, REAL, match="'mean' has a Delta")
    refuses(nothing, REAL, match="no latent site")
    learned = handlers.reparam(learned_centering, config={"effect": LocScaleReparam()})
    refuses(learned, REAL, match="'effect_centered' is a numpyro.param.*centered=0")


def learned_centering(y):
    effect = numpyro.sample("effect", dist.Normal(numpyro.sample("mean", dist.Normal(0, 1)), 1))
    with_data(y, effect)


def test_no_observed_site():
    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("data", N) as idx:
            numpyro.sample("y", dist.Normal(mean, 1), obs=None if y is None else y[idx])

    refuses(model, None, match="no observed site")


def test_supports_without_a_transform():
    def model(y):
        with_data(
            y, numpyro.sample("mean", dist.ImproperUniform(dist.constraints.nonnegative_integer, (), ()))
        )

    def sphere(y):
        with_data(y, numpyro.sample("mean", dist.ProjectedNormal(jnp.ones(2)))[0])

    refuses(model, REAL, match="'mean'.*discrete")
    refuses(sphere, REAL, match="'mean' has the support .*no transform")


def test_missing_values_are_named_by_the_problem():
    y = REAL.at[3].set(jnp.nan)
    refuses(CASES["robust"].model, X, y, match="non-finite value in row 3")
    assert from_numpyro(CASES["Poisson"].model, X, COUNTS, jnp.ones(N)).num_data == N


def test_missing_values_that_the_model_replaces():
    y = REAL.at[3].set(jnp.nan)

    def masked(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        with numpyro.plate("data", len(y)) as idx:
            seen = ~jnp.isnan(y[idx])
            with handlers.mask(mask=seen):
                numpyro.sample("y", dist.Normal(x[idx] @ w, 1), obs=jnp.where(seen, y[idx], 0.0))

    problem = from_numpyro(masked, X, y)
    z = {"w": jnp.array([0.3, -0.7, 1.1])}
    terms = jax.vmap(problem.log_likelihood, (None, 0))(z, problem.data)
    expected = -0.5 * (REAL - X @ z["w"]) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(terms, expected.at[3].set(0.0), rtol=1e-12)
