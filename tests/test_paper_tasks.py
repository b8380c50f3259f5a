"""The paper's tasks in small: models against NumPy, sweeps against single runs, the command line."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jointcv as jcv
from jointcv.cli import main
from jointcv.paper import data, estimators, tasks
from jointcv.paper.parse import Binary, Mnist, MovieLens, Tennis
from jointcv.paper.sweep import ESTIMATORS, prepare
from jointcv.paper.variance import naive_parts

RNG = np.random.default_rng(3)
ROWS, PLAYERS, GROUPS = 60, 7, 4
X = RNG.normal(size=(ROWS, 5)).astype(np.float32)
RECORDS = {
    "load_australian": Binary(X, RNG.integers(0, 2, ROWS).astype(np.int32), X.astype(np.float64)),
    "load_mnist": Mnist(
        RNG.integers(0, 256, (ROWS, 28, 28)).astype(np.uint8),
        RNG.integers(0, 10, ROWS).astype(np.uint8),
        np.zeros((1, 28, 28), np.uint8),
        np.zeros(1, np.uint8),
    ),
    "load_tennis": Tennis(
        RNG.integers(0, 4, ROWS).astype(np.int32),
        RNG.integers(4, PLAYERS, ROWS).astype(np.int32),
        PLAYERS,
        np.full(ROWS, 20200101, np.int32),
        np.array([f"player {i}" for i in range(PLAYERS)]),
    ),
    "load_movielens": MovieLens(
        RNG.integers(0, 2, (ROWS, 18)).astype(np.uint8),
        RNG.integers(0, 5, ROWS).astype(np.int32),
        RNG.integers(0, GROUPS, ROWS).astype(np.int32),
        GROUPS,
        np.zeros(ROWS, np.int32),
        np.zeros(ROWS, np.int32),
        np.array([f"genre {i}" for i in range(18)]),
    ),
}
RECORDS["load_sonar"] = RECORDS["load_australian"]


@pytest.fixture
def small_data(monkeypatch):
    """Made-up records in the place of the data sets."""
    for name, record in RECORDS.items():
        monkeypatch.setattr(data, name, lambda record=record, **_: record)


# ---------------------------------------------------------------- variances


def test_the_parts_of_the_naive_variance_are_those_at_the_place_asked_for(small_data, tmp_path):
    """Not where the run stood that was lent for it."""
    prepared = prepare(tasks.TASKS["australian"], "smoke", tmp_path)
    algorithm = estimators.ESTIMATORS["naive"].build(prepared.setting)
    key = jax.random.key(5)
    lent, there = (jcv.fit(algorithm, key=jax.random.key(0), num_steps=steps) for steps in (1, 40))
    report = jcv.variance_report(there, key, num_draws=50, full_draws=10)
    parts = naive_parts(lent, there.params, key, 50, 10)
    assert parts.total == pytest.approx(report.total[0], rel=1e-6)
    assert parts.total == pytest.approx(report.own[0], rel=1e-6)
    assert parts.data == pytest.approx(report.data[0], rel=1e-6)
    assert parts.noise == pytest.approx(report.noise[0], rel=1e-6)


# ---------------------------------------------------------------- models


def test_the_factor_model_is_a_normal_density():
    """Woodbury's form against the 784 × 784 covariance."""
    problem = tasks.factor_analysis(RECORDS["load_mnist"])
    factors = RNG.normal(0, 0.3, (784, tasks.NUM_FACTORS)).astype(np.float32)
    x = np.asarray(problem.data["x"][0], np.float64)
    covariance = factors.astype(np.float64) @ factors.T + np.eye(784)
    expected = stats.multivariate_normal(np.zeros(784), covariance).logpdf(x)
    datum = jax.tree.map(lambda leaf: leaf[0], problem.data)
    np.testing.assert_allclose(problem.log_likelihood(jnp.asarray(factors), datum), expected, rtol=1e-5)
    assert problem.dim == 12_544


def test_constant_pixels_are_zero():
    pixels = np.column_stack([np.full(4, 7.0), [0.0, 1.0, 2.0, 3.0]])
    np.testing.assert_allclose(tasks.standardise(pixels).std(0), [0, 1])
    assert not tasks.standardise(pixels)[:, 0].any()


def test_the_hierarchical_model():
    problem = tasks.hierarchical_regression(RECORDS["load_movielens"])
    z = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(0, 0.4, leaf.shape), leaf.dtype), problem.example)
    normal = stats.norm
    expected = normal.logpdf(z["mean"]).sum() + normal.logpdf(z["log_scale"]).sum()
    expected += normal.logpdf(z["weights"], z["mean"], np.exp(z["log_scale"])).sum()
    np.testing.assert_allclose(problem.log_prior(z), expected, rtol=1e-5)
    datum = jax.tree.map(lambda leaf: leaf[3], problem.data)
    logits = np.asarray(datum["x"]) @ np.asarray(z["weights"])[int(datum["group"])]
    expected = logits[int(datum["y"])] - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(problem.log_likelihood(z, datum), expected, rtol=1e-4)


def test_the_players_skills():
    problem = tasks.bradley_terry(RECORDS["load_tennis"])
    skills = jnp.asarray(RNG.normal(size=PLAYERS), np.float32)
    z = {"log_scale": jnp.float32(-0.7), "skills": skills}
    datum = jax.tree.map(lambda leaf: leaf[0], problem.data)
    gap = float(skills[datum["winner"]] - skills[datum["loser"]])
    np.testing.assert_allclose(problem.log_likelihood(z, datum), -np.log1p(np.exp(-gap)), rtol=1e-5)
    scale = np.exp(-0.7)
    expected = stats.halfnorm.logpdf(scale) + np.log(scale)
    expected += stats.norm.logpdf(skills, scale=scale).sum()
    np.testing.assert_allclose(problem.log_prior(z), expected, rtol=1e-5)
    assert problem.dim == PLAYERS + 1


def test_the_evaluated_elbo_of_the_skills_has_no_noise():
    """One predictor a match and a prior in closed form, its global scale too, against a formula in NumPy."""
    problem = tasks.bradley_terry(RECORDS["load_tennis"])
    objective = estimators.evaluation(problem, jcv.find_view(problem).view)
    location, deviation = RNG.normal(0, 0.5, problem.dim), RNG.uniform(0.2, 0.6, problem.dim)
    params = jcv.MeanFieldParams(jnp.float32(location), jnp.float32(np.log(deviation)))
    mean, variance = location[0], deviation[0] ** 2
    skill, spread = location[1:], deviation[1:] ** 2
    square = (skill**2 + spread) * np.exp(2 * variance - 2 * mean)
    expected = np.log(2) - np.log(2 * np.pi) / 2 - np.exp(2 * mean + 2 * variance) / 2 + mean
    expected -= np.sum(np.log(2 * np.pi) / 2 + mean + square / 2)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    winner, loser = RECORDS["load_tennis"].winner_ids, RECORDS["load_tennis"].loser_ids
    gaps = (skill[winner] - skill[loser])[:, None] + np.sqrt(spread[winner] + spread[loser])[:, None] * nodes
    expected -= (np.log1p(np.exp(-gaps)) @ weights).sum() / np.sqrt(2 * np.pi)
    expected += np.sum(0.5 * np.log(2 * np.pi * np.e) + np.log(deviation))
    np.testing.assert_allclose(jcv.FullElbo(objective, num_draws=3)(params), expected, rtol=1e-5)


# ---------------------------------------------------------------- sweeps


def test_a_sweep_is_many_runs(small_data, tmp_path):
    """Every cell of the vmapped program against a run alone with that rate and key."""
    setting = prepare(tasks.TASKS["australian"], "smoke", tmp_path).setting
    algorithm = ESTIMATORS["joint"].build(setting)
    rates, keys = [1e-3, 1e-4], jax.random.split(jax.random.key(5), 2)
    checkpoints = jcv.sweep(
        algorithm, jcv.LearningRate(), rates, keys, num_epochs=2, record=lambda params: params.location
    )
    for v, rate in enumerate(rates):
        alone = jcv.GradientDescent(
            algorithm.objective, algorithm.control, algorithm.sampler, optax.sgd(rate), algorithm.naive_steps
        )
        for s in range(2):
            expected = jcv.fit(alone, key=keys[s], num_epochs=2).params.location
            np.testing.assert_allclose(checkpoints[-1].record[s, v], expected, rtol=1e-4, atol=1e-5)


def test_only_the_location_is_corrected(small_data, tmp_path):
    setting = prepare(tasks.TASKS["tennis"], "smoke", tmp_path).setting
    control = ESTIMATORS["joint"].build(setting).control
    assert isinstance(control, estimators.LocationOnly)
    assert isinstance(control.memory, jcv.PerDatum)


# ---------------------------------------------------------------- the command line


@pytest.mark.slow
@pytest.mark.parametrize("task", ["australian", "tennis", "mnist", "movielens", "ppca"])
def test_smoke(task, small_data, tmp_path, monkeypatch):
    """Every file of the seam, and nothing runs twice."""
    monkeypatch.setenv("JOINTCV_CACHE", str(tmp_path / "cache"))
    arguments = ["paper", "run", task, "--budget", "smoke", "--results", str(tmp_path)]
    arguments += ["--estimators", "joint,naive", "--stages", "sweep,timing,table1,variance"]
    with jax.numpy_dtype_promotion("standard"):
        main(arguments)
    rows = _rows(tmp_path / f"{task}.csv")
    assert {row["estimator"] for row in rows} == {"joint", "naive"}
    assert all(np.isfinite(float(row["elbo"])) for row in rows)
    for kind in ("timing", "variance", "table1"):
        assert _rows(tmp_path / f"{task}.{kind}.csv")
    runs = json.loads((tmp_path / f"{task}.json").read_text())["runs"]
    assert {run["stage"]: run["budget"] for run in runs} == dict.fromkeys(arguments[-1].split(","), "smoke")
    before = (tmp_path / f"{task}.csv").read_text()
    main([*arguments[:-1], "sweep"])
    assert (tmp_path / f"{task}.csv").read_text() == before


def test_the_other_optimizer_is_swept_alone(small_data, tmp_path, monkeypatch):
    """Three naive epochs before PPCA's memory under SGD, and no other files but the sweep's."""
    monkeypatch.setenv("JOINTCV_CACHE", str(tmp_path / "cache"))
    setting = prepare(tasks.TASKS["ppca-sgd"], "smoke", tmp_path).setting
    algorithm = ESTIMATORS["joint"].build(setting)
    assert algorithm.naive_steps == 3 * algorithm.sampler.steps_per_epoch(setting.problem.num_data)
    results = tmp_path / "results"
    with jax.numpy_dtype_promotion("standard"):
        main(["paper", "run", "australian-adam", "--budget", "smoke", "--results", str(results)])
    assert sorted(path.name for path in results.iterdir()) == ["australian-adam.csv", "australian-adam.json"]
    assert {row["estimator"] for row in _rows(results / "australian-adam.csv")} == {"naive", "cv", "joint"}


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="snoar.*is not one of"):
        main(["paper", "run", "snoar", "--results", str(tmp_path)])


def _rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
