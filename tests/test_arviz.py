"""A fit for ArviZ, and the posterior predictive."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal

import jointcv as jcv
from helpers import PROBLEMS
from jointcv.arviz import pointwise
from jointcv.numpyro import SVI
from numpyro_models import CASES, N

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ 0.23 announces 1.0
    az = pytest.importorskip("arviz")

KEY = jax.random.key(3)


def fit_case(name):
    case = CASES[name]
    problem = jcv.from_numpyro(case.model, *case.args, **case.options, **case.kwargs)
    return jcv.fit(problem, key=KEY, batch_size=5, num_epochs=2)


@pytest.fixture(scope="module")
def two_sites():
    return fit_case("two sites and a factor")


def test_groups_of_a_numpyro_fit(two_sites):
    data = two_sites.to_arviz(KEY, num_draws=7, log_likelihood=True)
    draws = two_sites.sample(KEY, 7)
    np.testing.assert_array_equal(data["posterior"]["w"][0], draws["w"])
    _, y, counts = CASES["two sites and a factor"].args
    np.testing.assert_array_equal(data["observed_data"]["y"], y)
    np.testing.assert_array_equal(data["observed_data"]["count"], counts)
    terms = data["log_likelihood"]
    assert set(terms.data_vars) == {"y", "count"}
    assert terms["y"].dims == ("chain", "draw", "data")
    predictor = np.asarray(CASES["two sites and a factor"].args[0]) @ draws["w"][4][:, 0]
    expected = -0.5 * (np.asarray(y) - predictor) ** 2 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(terms["y"][0, 4], expected, rtol=1e-10)


def test_chunks_change_nothing(two_sites):
    positions = jnp.asarray(np.random.default_rng(0).normal(size=(4, two_sites.problem.dim)))
    whole, parts = (pointwise(two_sites.problem, positions, chunk_size=size) for size in (None, 7))
    for name in whole:
        assert whole[name].shape == (4, N)
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-12)


def test_loo_of_a_plain_problem():
    problem = PROBLEMS["hierarchical"]
    fit = jcv.fit(problem, key=KEY, batch_size=5, num_epochs=40)
    data = fit.to_arviz(num_draws=300, log_likelihood=True)
    assert set(data["posterior"].data_vars) == {"effects", "slope", "log_scale"}
    assert set(data["observed_data"].data_vars) == {"x", "y", "group"}
    terms = np.asarray(data["log_likelihood"]["log_likelihood"][0])
    draws = fit.sample(jax.random.key(0), 300)
    z = jax.tree.map(lambda leaf: leaf[11], draws)
    expected = jax.vmap(problem.log_likelihood, (None, 0))(z, problem.data)
    np.testing.assert_allclose(terms[11], expected, rtol=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loo = az.loo(data)
    everything = np.log(np.exp(terms).mean(0)).sum()
    assert everything - 8 < (loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo) < everything


@pytest.mark.skipif(not hasattr(az, "from_numpyro_svi"), reason="ArviZ has it from 1.0 on")
@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_arvizs_own_converter_takes_the_result_of_the_drop_in(guide):
    case = CASES["linear, numpyro.subsample"]
    svi = SVI(case.model, guide(case.model), numpyro.optim.Adam(0.01), Trace_ELBO())
    result = svi.run(KEY, 20, *case.args, **case.kwargs, progress_bar=False)
    everything = {"model_args": case.args, "model_kwargs": case.kwargs | case.reference}
    data = az.from_numpyro_svi(svi, svi_result=result, num_samples=300, log_likelihood=True, **everything)
    assert data["posterior"]["w"].shape == (300, 3)
    assert data["log_likelihood"]["y"].shape == (300, N)
    median = svi.guide.median(result.params)["w"]
    np.testing.assert_allclose(data["posterior"]["w"].median("sample"), median, atol=0.05)


def test_a_problem_of_one_array():
    data = jcv.fit(PROBLEMS["linear"], key=KEY, batch_size=5, num_epochs=1).to_arviz(num_draws=5)
    assert set(data["posterior"].data_vars) == {"z"}


def test_predictive_draws_the_observed_sites(two_sites):
    draws = two_sites.predictive(KEY, 400)
    assert {name: value.shape for name, value in draws.items()} == {"y": (400, N), "count": (400, N)}
    w = two_sites.sample(jax.random.key(0), 4000)["w"]
    mean = np.asarray(CASES["two sites and a factor"].args[0]) @ np.asarray(w.mean(0))[:, 0]
    error = np.asarray(draws["y"]).std(0) / 20
    assert np.all(np.abs(np.asarray(draws["y"]).mean(0) - mean) < 5 * error)


def test_predictive_of_a_plain_problem_is_refused():
    fit = jcv.fit(PROBLEMS["linear"], key=KEY, batch_size=5, num_epochs=1)
    with pytest.raises(ValueError, match="jointcv.from_numpyro"):
        fit.predictive(KEY)


@pytest.mark.usefixtures("as_users_run")
def test_predictive_without_a_key(two_sites):
    with pytest.raises(ValueError, match=r"key=3 .*jax\.random\.key"):
        two_sites.predictive(3)


def test_extending_a_fit_keeps_its_origin(two_sites):
    assert two_sites.extend(num_epochs=1).problem.origin is two_sites.problem.origin
