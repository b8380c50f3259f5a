"""A fit for ArviZ: posterior, observed data and, for PSIS-LOO, the log likelihood of every datum at every draw.

ArviZ 0.2x wants an `InferenceData`, ArviZ 1.x an xarray `DataTree`. A NumPyro problem brings its sites' names; a plain
problem has those of its pytrees, and one log likelihood a datum.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, Scalar

from jointcv.problem import Problem

VALUES_AT_ONCE = 2_000_000  # draws times data
DRAWS_AT_ONCE = 16
ALONE = "log_likelihood"  # the one log likelihood of a plain problem


def to_arviz(
    problem: Problem,
    positions: Float[Array, "draws dim"],
    samples: PyTree[Array],
    *,
    log_likelihood: bool,
    chunk_size: int | None,
) -> Any:
    """What the installed ArviZ calls inference data.

    Args:
        problem: as the user gave it.
        positions: draws of the flat z.
        samples: the same draws, as `problem.constrain` shows them.
        log_likelihood: whether to add the log likelihood, one number a draw and datum.
        chunk_size: how many data at once.
    """
    origin = problem.origin
    observed = problem.data if origin is None else origin.observed()
    groups = {
        "posterior": {name: values[None] for name, values in named_leaves(samples, "z").items()},
        "observed_data": named_leaves(observed, "data"),
    }
    if log_likelihood:
        terms = pointwise(problem, positions, chunk_size=chunk_size)
        groups["log_likelihood"] = {name: values[None] for name, values in terms.items()}
    if origin is None:
        return _convert(groups, {name: ["datum"] for name in [*groups["observed_data"], ALONE]})
    flat = [name for name, values in groups["observed_data"].items() if values.shape == (problem.num_data,)]
    return _convert(groups, {name: [origin.data_plate or "datum"] for name in flat})


def pointwise(
    problem: Problem, positions: Float[Array, "draws dim"], *, chunk_size: int | None = None
) -> dict[str, Float[np.ndarray, "draws data"]]:
    """log p(x_n | z) at these draws, by observed site, computed a chunk of the data at a time."""
    origin = problem.origin
    terms = _OneTerm(problem.log_likelihood) if origin is None else origin.log_likelihood.by_site
    num_data, num_draws = problem.num_data, positions.shape[0]
    size = min(num_data, chunk_size or max(1, VALUES_AT_ONCE // num_draws))
    parts = []
    for first in range(0, num_data, size):
        indices = np.minimum(np.arange(first, first + size), num_data - 1)  # the last chunk is padded
        part = _chunk(terms, problem.without_origin(), positions, jnp.asarray(indices))
        parts.append(jax.device_get(part))
    names = [name for name in parts[0] if origin is None or name in origin.observed_sites]  # no factors
    return {name: np.concatenate([part[name] for part in parts], axis=1)[:, :num_data] for name in names}


class _OneTerm(eqx.Module):
    """The log likelihood of a plain problem, by the one name it has."""

    log_likelihood: Callable[[Any, Any], Scalar]

    def __call__(self, z, datum):
        return {ALONE: self.log_likelihood(z, datum)}


@eqx.filter_jit
def _chunk(terms, problem: Problem, positions, indices) -> dict[str, Array]:
    def one_draw(position):
        return jax.vmap(terms, (None, 0))(problem.unravel(position), problem.take(indices))

    return jax.lax.map(one_draw, positions, batch_size=min(positions.shape[0], DRAWS_AT_ONCE))


def named_leaves(tree: PyTree[Array], alone: str) -> dict[str, np.ndarray]:
    """The leaves of a pytree by path, "a.b"; a single array is called `alone`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {name or alone: np.asarray(leaf) for name, leaf in named.items()}


def _convert(groups: dict[str, dict[str, np.ndarray]], dims: dict[str, list[str]]) -> Any:
    try:
        import arviz
    except ImportError as error:
        raise ImportError("to_arviz() needs ArviZ. Install it with `pip install jointcv[arviz]`.") from error
    if int(arviz.__version__.split(".")[0]) == 0:
        return arviz.from_dict(**groups, dims=dims)  # pyright: ignore
    return arviz.from_dict(groups, dims=dims)
