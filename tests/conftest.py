"""float64, strict promotion, and shapes checked at run time in the package under test."""

import contextlib
import gc
import os
import warnings
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest

# XLA's threads on the CPU can wait for each other for ever (jaxlib 0.10.2, in batches of triangular solves), and two
# workers have no cores for them anyway: each has one.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
worker = os.environ.get(
    "PYTEST_XDIST_WORKER"
)  # not of the process that starts the workers: they would share its core
if worker and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
jax.config.update("jax_enable_x64", True)
jaxtyping.install_import_hook("jointcv", "beartype.beartype")  # before the package is first imported

IMPLICIT_PROMOTION = {
    "test_numpyro_model",
    "test_numpyro_svi",
    "test_arviz",
}  # NumPyro's own code mixes types

MOST_MAPS = 30_000
QUICK = {
    "test_exact",
    "test_natural",
    "test_oracle",
    "test_random_models",
    "test_statistical",
    "test_stochastic",
}


def pytest_configure(config):
    """ArviZ 0.23 stamps a file at its first import of a day, and two workers at once take it from each other."""
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import arviz  # noqa: F401


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """No silent mixing of types, except where third-party code needs it."""
    if request.module.__name__ in IMPLICIT_PROMOTION:
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Half the time to compile, where the compiler's optimisations are not what is tested."""
    jax.config.update("jax_disable_most_optimizations", request.module.__name__ in QUICK)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def few_programs():
    """A compiled program holds memory maps, of which Linux allows a process 65,530; XLA aborts beyond that."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def optimised(quick_compilation):
    """Compiled as users have it: for what is claimed to the last bit."""
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def as_users_run():
    """Without the run-time checks of the tests: what a wrong argument meets is the library's own check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def load_data():
    """`load_data(name)`: the arrays of a data set of the paper."""
    folder = os.environ.get("JOINTCV_DATA")

    def load(name: str) -> dict[str, np.ndarray]:
        if not folder:
            pytest.skip("JOINTCV_DATA does not name a folder of data sets")
        path = Path(folder) / f"{name}.npz"
        if not path.exists():
            pytest.skip(f"{path} is missing")
        with np.load(path) as arrays:
            return dict(arrays)

    return load
