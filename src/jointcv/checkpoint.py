"""Save a run and load it: the leaves of a Fit's run and history in one file, the algorithm from your own code."""

from itertools import zip_longest
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from jointcv.algorithm.interface import AbstractAlgorithm
from jointcv.checks import check_type
from jointcv.fit import Fit
from jointcv.loop import Run, result, start
from jointcv.problem import Problem

_NO_RUN = "{} is no run that jointcv.checkpoint.save wrote. Pass such a file."


def save(path: str | Path, fit: Fit) -> None:
    """Write a fit's run (state and table) and history.

    Args:
        path: the file; it is replaced only once everything is written.
        fit: what to save. Its algorithm is code and data and is not saved.
    """
    check_type("fit", fit, Fit, "Pass what jointcv.fit returned.")
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        np.save(file, _signature(fit.algorithm, _plain(fit.run)))
        np.save(file, np.asarray([fit.seconds]))
        np.save(file, np.asarray([fit.status]))
        np.save(file, np.asarray(sorted(fit.history), dtype=str))
        for name in sorted(fit.history):
            np.save(file, fit.history[name])
        eqx.tree_serialise_leaves(file, _plain(fit.run))
    partial.replace(path)


def load(path: str | Path, algorithm: AbstractAlgorithm, problem: Problem | None = None) -> Fit:
    """Read a fit that `save` wrote; `extend` goes on as if it had never stopped.

    Args:
        path: the file.
        algorithm: what ran (`fit.algorithm` of a run with the same arguments).
        problem: what `fit` was given, for a NumPyro problem's `predictive`.

    Raises:
        ValueError: where the file is of something else, or of a run of another algorithm.
    """
    check_type(
        "algorithm", algorithm, AbstractAlgorithm, "Pass fit.algorithm of a run with the same arguments."
    )
    like = _plain(eqx.filter_eval_shape(start, algorithm, jax.random.key(0)))
    with open(path, "rb") as file:
        try:
            signature = np.load(file)
        except (EOFError, ValueError) as error:
            raise ValueError(_NO_RUN.format(path)) from error
        _check_signature(path, signature, _signature(algorithm, like))
        try:
            seconds = float(np.load(file)[0])
            status = str(np.load(file)[0])
            names = np.load(file)
            history = {str(name): np.load(file) for name in names}
            run = _keyed(eqx.tree_deserialise_leaves(file, like))
        except (EOFError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} ends too early. Save the run again.") from error
    return Fit(algorithm, run, result(algorithm, run), history, status, seconds, problem)


def _signature(algorithm: AbstractAlgorithm, run: Run) -> np.ndarray:
    """What a run and the algorithm that goes on with it must have in common, line by line."""
    leaves, _ = jax.tree.flatten_with_path(run)
    lines = [f"{type(algorithm).__name__} with {algorithm.sampler!r} on {algorithm.objective.num_data} data"]
    lines += [f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]
    return np.asarray(lines, dtype=str)


def _check_signature(path: str | Path, saved: np.ndarray, wanted: np.ndarray) -> None:
    if saved.dtype.kind != "U" or saved.ndim != 1:
        raise ValueError(_NO_RUN.format(path))
    pairs = zip_longest(map(str, saved), map(str, wanted), fillvalue="nothing")
    for left, right in pairs:
        if left != right:
            raise ValueError(
                f"{path} holds a run of another algorithm: it has {left}, the algorithm {right}. "
                "Pass fit.algorithm of a run with the same arguments."
            )


def _plain(run: Run) -> Run:
    """Keys as the integers they are made of."""
    if isinstance(run.key, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, run.key)
    else:
        data = jax.random.key_data(run.key)
    return eqx.tree_at(lambda run: run.key, run, data)


def _keyed(run: Run) -> Run:
    return eqx.tree_at(lambda run: run.key, run, jax.random.wrap_key_data(jnp.asarray(run.key)))
