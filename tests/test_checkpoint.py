"""Files and algorithms that do not belong together are refused. (That resuming changes nothing: test_structure.)"""

import numpy as np
import optax
import pytest
from numpy.testing import assert_array_equal

import jointcv as jcv
from helpers import KEY, PROBLEMS, B, compose
from jointcv import checkpoint

pytestmark = pytest.mark.usefixtures("as_users_run")

QUADRATURE = compose("logistic", "quadrature")
OTHERS = {
    "another memory": (compose("logistic", "quadrature", jcv.JointCV(jcv.WholeTable())), "another algorithm"),
    "no memory": (compose("logistic", "quadrature", jcv.NaiveGradient()), "another algorithm"),
    "another noise": (compose("logistic", "parameter"), "another algorithm"),
    "another batch size": (compose("logistic", "quadrature", sampler=jcv.Reshuffle(B + 1)), "batch_size=6"),
    "another sampler": (compose("logistic", "quadrature", sampler=jcv.FixedBatches(B)), "FixedBatches"),
    "another problem": (compose("logistic2", "quadrature"), "float64[2]"),
    "another optimiser": (compose("logistic", "quadrature", optimizer=optax.adam(1e-3)), "optimizer"),
    "SMISO": (jcv.Smiso(QUADRATURE.objective, jcv.Reshuffle(B), 1e-3), "Smiso"),
    "a problem": (PROBLEMS["logistic"], "fit.algorithm"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    fit = jcv.fit(QUADRATURE, key=KEY, num_steps=3)
    path = tmp_path_factory.mktemp("runs") / "run"
    checkpoint.save(path, fit)
    return path, fit


@pytest.mark.parametrize("name", OTHERS)
def test_another_algorithm_is_refused(saved, name):
    algorithm, word = OTHERS[name]
    with pytest.raises(ValueError) as error:
        checkpoint.load(saved[0], algorithm)
    assert word in str(error.value)


@pytest.mark.parametrize(
    "kept, words", [(0.97, "ends too early"), (0.8, "ends too early"), (0.3, "no run"), (0, "no run")]
)
def test_a_file_cut_short_is_refused(saved, tmp_path, kept, words):
    whole = saved[0].read_bytes()
    (tmp_path / "part").write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ValueError, match=words):
        checkpoint.load(tmp_path / "part", QUADRATURE)


def test_another_file_is_refused(tmp_path):
    np.save(tmp_path / "numbers.npy", np.zeros(3))
    (tmp_path / "words").write_text("not numbers at all")
    for name in ("numbers.npy", "words"):
        with pytest.raises(ValueError, match="no run that"):
            checkpoint.load(tmp_path / name, QUADRATURE)


def test_only_a_fit_is_saved(tmp_path):
    with pytest.raises(ValueError, match="fit="):
        checkpoint.save(tmp_path / "run", PROBLEMS["logistic"])
    assert not list(tmp_path.iterdir())


def test_a_diverged_run_comes_back_as_one(tmp_path):
    algorithm = compose("logistic", "quadrature", optimizer=optax.sgd(1e200))
    fit = jcv.fit(algorithm, key=KEY, num_steps=8)
    checkpoint.save(tmp_path / "run", fit)
    loaded = checkpoint.load(tmp_path / "run", algorithm)
    assert fit.diverged and loaded.diverged and loaded.status == fit.status
    assert_array_equal(loaded.params.location, fit.params.location)


def test_the_problem_comes_with_it(saved):
    assert checkpoint.load(saved[0], QUADRATURE, PROBLEMS["logistic"]).problem is PROBLEMS["logistic"]
