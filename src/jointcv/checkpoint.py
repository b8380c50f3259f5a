"""Save a run and load it: the leaves of a Fit's run and history in one file, the algorithm from your own code."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jointcv.algorithm.interface import AbstractAlgorithm
from jointcv.fit import Fit
from jointcv.loop import Run, result, start


def save(path: str | Path, fit: Fit) -> None:
    """Write a fit's run (state and table) and history.

    Args:
        path: the file; it is replaced only once everything is written.
        fit: what to save. Its algorithm is code and data and is not saved.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        np.save(file, np.asarray([fit.seconds]))
        np.save(file, np.asarray([fit.status]))
        np.save(file, np.asarray(sorted(fit.history), dtype=str))
        for name in sorted(fit.history):
            np.save(file, fit.history[name])
        eqx.tree_serialise_leaves(file, _plain(fit.run))
    partial.replace(path)


def load(path: str | Path, algorithm: AbstractAlgorithm) -> Fit:
    """Read a fit that `save` wrote; `extend` goes on as if it had never stopped.

    Args:
        path: the file.
        algorithm: what ran (`fit.algorithm` of a run with the same arguments).
    """
    with open(path, "rb") as file:
        seconds = float(np.load(file)[0])
        status = str(np.load(file)[0])
        names = np.load(file)
        history = {str(name): np.load(file) for name in names}
        like = _plain(eqx.filter_eval_shape(start, algorithm, jax.random.key(0)))
        run = _keyed(eqx.tree_deserialise_leaves(file, like))
    return Fit(algorithm, run, result(algorithm, run), history, status, seconds)


def _plain(run: Run) -> Run:
    """Keys as the integers they are made of."""
    if isinstance(run.key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, run.key)
    else:
        data = jax.random.key_data(run.key)
    return eqx.tree_at(lambda run: run.key, run, data)


def _keyed(run: Run) -> Run:
    return eqx.tree_at(lambda run: run.key, run, jax.random.wrap_key_data(jnp.asarray(run.key)))
