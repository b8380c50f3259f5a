"""The compiled estimators against plain NumPy loops, and memories against one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jointcv as jcv
from helpers import (
    BINARY,
    KEY,
    MEMORIES,
    PRIOR_SD,
    PROBLEMS,
    RESHUFFLE,
    X3,
    B,
    N,
    all_data,
    compose,
    flat,
    found_view,
    joint_setup,
)
from jointcv.loop import epoch_schedule, start
from jointcv.view import LinearView

EPOCHS, STEPS, RATE = 3, 5, 2e-3


# ---------------------------------------------------------------- the loops


def sigmoid(eta):
    return 1 / (1 + np.exp(-eta))


def slopes(n, places):
    """∇K_n at a place of its own for every datum: (batch, D)."""
    eta = np.einsum("bd,bd->b", X3[n], places)
    return N * (sigmoid(eta) - BINARY[n])[:, None] * X3[n]


def bends(n, places):
    """N ℓ''_n, so that ∇²K_n = bend x xᵀ."""
    p = sigmoid(np.einsum("bd,bd->b", X3[n], places))
    return N * p * (1 - p)


def negative_elbo(n, weights, z, rho):
    eta = X3[n] @ z
    data = N * weights @ (np.logaddexp(0, eta) - BINARY[n] * eta)
    prior = 0.5 * np.sum((z / PRIOR_SD) ** 2) + z.size * (np.log(PRIOR_SD) + 0.5 * np.log(2 * np.pi))
    return data + prior - np.sum(rho) - 0.5 * z.size * (1 + np.log(2 * np.pi))


def minibatches(algorithm, run_key):
    """The library's own schedule and noise, as NumPy arrays: (data, weights, unit, ε) for every step."""
    noise_key = jax.random.fold_in(run_key, 1)
    plans = []
    for epoch in range(EPOCHS):
        plan = jax.device_get(epoch_schedule(algorithm, run_key, epoch))
        for indices, weights, unit in zip(plan.indices, plan.weights, plan.unit, strict=True):
            real = indices < N
            key = jax.random.fold_in(noise_key, len(plans))
            draws = algorithm.objective.draw(key, None, algorithm.objective.data)
            plans.append((indices[real], weights[real], int(unit), np.asarray(draws.data)))
    return plans


def joint_loop(plans, mu, rho, *, paper=False, every=None, naive_steps=0):
    """Joint control variate with SGD: a table of (m_n, ρ_n), or an anchor moved every so many steps.

    The paper's form has the prior and σ^n in the table and leaves log σ alone.
    """
    everyone, tau2 = np.arange(N), PRIOR_SD**2
    places, scales = np.tile(mu, (N, 1)), np.tile(np.exp(rho), (N, 1))
    losses = []
    for k, (n, weights, _, eps) in enumerate(plans):
        if every is not None and k % every == 0:
            places, scales = np.tile(mu, (N, 1)), np.tile(np.exp(rho), (N, 1))
        sd = np.exp(rho)
        v = sd * eps
        z = mu + v
        losses.append(negative_elbo(n, weights, z, rho))
        location = weights @ slopes(n, np.tile(z, (len(n), 1))) + z / tau2
        log_scale = location * v - 1
        mean_slope = slopes(everyone, places).mean(0)  # G, from the table as it stands
        if k >= naive_steps and paper:
            v_n = scales[n] * eps
            along = np.einsum("bd,bd->b", X3[n], v_n)
            data_part = slopes(n, places[n]) + (bends(n, places[n]) * along)[:, None] * X3[n]
            approximation = weights @ (data_part + (places[n] + v_n) / tau2)
            location += mean_slope + places.mean(0) / tau2 - approximation
        elif k >= naive_steps:
            approximation = weights @ (
                slopes(n, places[n]) + (bends(n, places[n]) * (X3[n] @ v))[:, None] * X3[n]
            )
            diagonal = (bends(everyone, places)[:, None] * X3**2).mean(0)  # d
            location += mean_slope - approximation - v / tau2
            log_scale += sd**2 * diagonal - approximation * v + sd**2 / tau2 - (mu + v) / tau2 * v
        if every is None:
            places[n], scales[n] = mu, sd
        mu, rho = mu - RATE * location, rho - RATE * log_scale
    return mu, rho, np.array(losses)


def smiso_loop(plans, mu, rho, *, rate, decay, per_datum):
    """w_n ← (1 − α) w_n + α (w̄ − γ ∇f(w̄; n, ε)), w̄ the mean over data, or over minibatches."""
    own = np.tile(np.concatenate([mu, rho]), (N if per_datum else STEPS, 1))
    for n, weights, unit, eps in plans:
        mean = own.mean(0)
        mu, rho = np.split(mean, 2)
        v = np.exp(rho) * eps
        slope = slopes(n, np.tile(mu + v, (len(n), 1)))
        location = (slope if per_datum else weights @ slope) + (mu + v) / PRIOR_SD**2
        gradient = np.concatenate([location, location * v - 1], axis=-1)
        units = n if per_datum else unit
        own[units] = (1 - decay) * own[units] + decay * (mean - rate * gradient)
    return np.split(own.mean(0), 2)


# ---------------------------------------------------------------- the library against them


def first_params(algorithm):
    run = start(algorithm, KEY)
    params = algorithm.params(run.state)
    return run.key, np.asarray(params.location), np.asarray(params.log_scale)


@pytest.mark.parametrize(
    "noise, memory, options",
    [
        ("parameter", "datum", dict(naive_steps=STEPS)),
        ("parameter", "table", {}),
        ("parameter", "batch", {}),
        ("parameter", "anchor", dict(every=STEPS, naive_steps=STEPS)),
        ("parameter", "anchor3", dict(every=3)),
        ("paper", "datum", dict(paper=True, naive_steps=STEPS)),
        ("paper", "anchor", dict(paper=True, every=STEPS)),
    ],
)
def test_joint_against_a_plain_loop(noise, memory, options):
    """Algorithm "joint" with a table (SAGA) and with an anchor (SVRG): the same iterates over three epochs.

    The step's loss is that of its iterate and its noise, so the losses follow every iterate.
    """
    naive_steps = options.get("naive_steps", 0)
    if memory == "anchor3":
        control, sampler = jcv.JointCV(jcv.Anchor(every=3)), RESHUFFLE
    else:
        control, sampler = jcv.JointCV(MEMORIES[memory][0]), MEMORIES[memory][1]
    algorithm = compose("logistic", noise, control, sampler, naive_steps=naive_steps)
    fit = jcv.fit(algorithm, key=KEY, num_epochs=EPOCHS)
    run_key, mu, rho = first_params(algorithm)
    mu, rho, losses = joint_loop(minibatches(algorithm, run_key), mu, rho, **options)
    assert_allclose(fit.history["loss"], losses, rtol=1e-9)
    assert_allclose(fit.params.location, mu, rtol=0, atol=1e-9)
    assert_allclose(fit.params.log_scale, rho, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sampler", [RESHUFFLE, jcv.FixedBatches(B)], ids=["datum", "batch"])
def test_smiso_against_a_plain_loop(sampler):
    objective = compose("logistic", "parameter").objective
    algorithm = jcv.Smiso(objective, sampler, rate=1e-2, decay=0.9)
    fit = jcv.fit(algorithm, key=KEY, num_epochs=EPOCHS)
    run_key, mu, rho = first_params(algorithm)
    plans = minibatches(algorithm, run_key)
    mu, rho = smiso_loop(plans, mu, rho, rate=1e-2, decay=0.9, per_datum=isinstance(sampler, jcv.Reshuffle))
    assert_allclose(fit.params.location, mu, rtol=0, atol=1e-9)
    assert_allclose(fit.params.log_scale, rho, rtol=0, atol=1e-9)


# ---------------------------------------------------------------- memories against one another


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("noise, whole", [("parameter", False), ("parameter", True), ("paper", True)])
def test_snapshots_are_the_table_to_the_last_bit(noise, whole):
    """The same trajectory on the same keys, however the run is cut into chunks."""
    table = joint_setup("logistic", noise, "datum", whole, naive_steps=STEPS)
    snapshots = joint_setup("logistic", noise, "snapshots", whole, naive_steps=STEPS)
    by_table = jcv.fit(table, key=KEY, num_epochs=5)
    for chunk_size in (1000, 3):
        by_snapshots = jcv.fit(snapshots, key=KEY, num_epochs=5, chunk_size=chunk_size)
        assert_array_equal(by_snapshots.history["loss"], by_table.history["loss"])
        assert_array_equal(flat(by_snapshots.params), flat(by_table.params))


@pytest.mark.parametrize(
    "problem, noise", [("logistic", "parameter"), ("logistic", "quadrature"), ("softmax", "predictor")]
)
@pytest.mark.parametrize("memory", ["datum", "batch", "table"])
def test_the_running_mean_is_that_of_the_table(problem, noise, memory):
    algorithm = joint_setup(problem, noise, memory, False)
    fit = jcv.fit(algorithm, key=KEY, num_epochs=EPOCHS)
    objective = algorithm.objective
    if memory == "table":
        mean, table = fit.run.state.memory
    else:
        mean, table = fit.run.state.memory, fit.run.table
    if memory == "batch":  # rows of minibatches: put every datum's in its place
        sweep = jax.device_get(algorithm.sampler.sweep(N))
        real = sweep.indices < N
        order = np.argsort(sweep.indices[real])
        table = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[real][order]), table)
    again = objective.summarise(table, *all_data(objective))
    assert_allclose(mean.gradient, again.gradient, rtol=0, atol=1e-10)
    assert_allclose(mean.curvature, again.curvature, rtol=0, atol=1e-10)


@pytest.mark.parametrize("problem", ["logistic", "softmax", "hierarchical"])
def test_a_compressed_table_is_the_whole_one(problem):
    """N×K numbers against N×D: the same trajectory, once the linear view leaves diag ∇²K alone as a whole view must."""
    view = found_view(problem)
    without = LinearView(PROBLEMS[problem], view.split, has_squares=False)
    memory, sampler = jcv.JointCV(jcv.PerDatum()), RESHUFFLE
    short = compose(problem, "parameter", memory, sampler, view=without, naive_steps=STEPS)
    long = compose(problem, "parameter", memory, sampler, whole=True, naive_steps=STEPS)
    compressed = jcv.fit(short, key=KEY, num_epochs=EPOCHS)
    full = jcv.fit(long, key=KEY, num_epochs=EPOCHS)
    assert compressed.run.table.shape == (N, view.num_predictors)
    assert full.run.table.shape == (N, PROBLEMS[problem].dim)
    assert_allclose(flat(compressed.params), flat(full.params), rtol=0, atol=1e-9)
    assert_allclose(compressed.history["loss"], full.history["loss"], rtol=1e-9)
