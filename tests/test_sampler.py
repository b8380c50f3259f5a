"""Schedules: every datum once an epoch, estimates without bias, static shapes with padding."""

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import jointcv as jcv
from helpers import KEY, B, N

SAMPLERS = {
    "reshuffle": jcv.Reshuffle(B),
    "fixed": jcv.FixedBatches(B),
    "replacement": jcv.WithReplacement(B),
    "full": jcv.FullBatch(),
}
ONCE = ["reshuffle", "fixed", "full"]
STEPS = 5  # 23 data in minibatches of 5


def epoch(name, seed=0, num_data=N):
    return jax.device_get(SAMPLERS[name].epoch(jax.random.fold_in(KEY, seed), num_data))


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("num_data", [B, N, 20, 1])
def test_every_datum_once_an_epoch(name, num_data):
    schedule = epoch(name, num_data=num_data)
    real = schedule.indices < num_data
    assert_array_equal(np.sort(schedule.indices[real]), np.arange(num_data))
    assert_array_equal(schedule.indices[~real], num_data)
    assert_array_equal(schedule.place, np.arange(len(schedule.place)))
    assert_allclose(schedule.share, real / num_data)
    assert_array_equal(schedule.weights[~real], 0)
    assert SAMPLERS[name].visits_once


@pytest.mark.parametrize("name", SAMPLERS)
def test_shapes(name):
    schedule = epoch(name)
    steps, size = (1, N) if name == "full" else (STEPS, B)
    assert schedule.indices.shape == schedule.weights.shape == schedule.share.shape == (steps, size)
    assert schedule.unit.shape == schedule.place.shape == (steps,)
    assert SAMPLERS[name].steps_per_epoch(N) == steps


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sweep_is_a_full_pass(name):
    """Σ share_n h_n over a sweep is the mean over all data."""
    sweep = jax.device_get(SAMPLERS[name].sweep(N))
    counts = np.bincount(sweep.indices.ravel(), sweep.share.ravel(), minlength=N + 1)
    assert_allclose(counts, [*[1 / N] * N, 0])


@pytest.mark.parametrize("name", ["reshuffle", "fixed"])
def test_a_minibatch_estimates_the_mean_without_bias(name):
    """Exactly, for fixed minibatches: their mean over units is 1/N a datum. Reshuffled ones weigh data equally."""
    schedule = epoch(name)
    real = schedule.indices < N
    if name == "fixed":
        per_datum = np.bincount(schedule.indices[real], schedule.weights[real]) / STEPS
        assert_allclose(per_datum, 1 / N)
    else:
        assert_allclose(schedule.weights.sum(1), 1)
        assert_allclose(schedule.weights[real], (1 / np.repeat(real.sum(1), real.sum(1))))


def test_fixed_minibatches_keep_their_data_and_change_their_order():
    def by_unit(schedule):
        return {int(unit): tuple(row) for unit, row in zip(schedule.unit, schedule.indices, strict=True)}

    first, second = epoch("fixed", 0), epoch("fixed", 1)
    assert by_unit(first) == by_unit(second)
    assert by_unit(first) == by_unit(jax.device_get(SAMPLERS["fixed"].sweep(N)))
    assert sorted(first.unit) == list(range(STEPS))
    assert list(first.unit) != list(second.unit)
    assert by_unit(first) != by_unit(jax.device_get(jcv.FixedBatches(B, seed=1).epoch(KEY, N)))


def test_reshuffling_changes_the_data_of_a_minibatch():
    rows = {frozenset(row) for seed in range(3) for row in epoch("reshuffle", seed).indices}
    assert len(rows) == 3 * STEPS


def test_a_datum_drawn_twice_is_visited_once():
    schedule = jax.device_get(jcv.WithReplacement(40).epoch(KEY, N))
    assert_allclose(schedule.weights, 1 / 40)
    for indices, share in zip(schedule.indices, schedule.share, strict=True):
        assert len(set(indices)) < 40  # 40 draws of 23 data
        visits = np.bincount(indices, share, minlength=N)
        assert_allclose(visits[np.unique(indices)], 1 / N)
        assert_allclose(visits.sum(), len(set(indices)) / N)


def test_replacement_draws_uniformly():
    """A chi-square statistic of 8,000 draws, 22 degrees of freedom; above 60 in 2 of 100,000 cases."""
    keys = jax.random.split(KEY, 320)
    indices = np.asarray(jax.vmap(lambda key: SAMPLERS["replacement"].epoch(key, N).indices)(keys))
    counts = np.bincount(indices.ravel(), minlength=N)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 60


def test_cut():
    schedule = SAMPLERS["reshuffle"].epoch(KEY, N)
    part = jax.jit(lambda first: schedule.cut(first, 2))(3)
    assert_array_equal(part.indices, schedule.indices[3:])
    assert_array_equal(part.place, [3, 4])
