"""The problem: p(z) Π p(x_n | z), n = 1..N, with z unconstrained."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree, Scalar


class Problem(eqx.Module):
    """A model with a log prior, a log likelihood for one datum, and the data.

    Args:
        log_prior: `log_prior(z)`, a scalar; everything that is not subsampled belongs here.
        log_likelihood: `log_likelihood(z, datum)` for *one* datum, a scalar.
        data: a pytree of arrays whose leading axis runs over the N data.
        example: a z: any pytree of floating-point arrays with the shapes of the latent variables.
        constrain: maps z to what the user wants to see of a draw; the identity by default.
        origin: what the problem was made from, for what needs that again: the traced model of a NumPyro problem.

    Examples:
        >>> import jax.numpy as jnp, jointcv as jcv
        >>> problem = jcv.Problem(
        ...     log_prior=lambda z: -0.5 * jnp.sum(z**2),
        ...     log_likelihood=lambda z, datum: -0.5 * (datum["y"] - datum["x"] @ z) ** 2,
        ...     data={"x": jnp.ones((50, 3)), "y": jnp.zeros(50)},
        ...     example=jnp.zeros(3),
        ... )
        >>> problem.num_data, problem.dim
        (50, 3)
    """

    log_prior: Callable[[Any], Scalar]
    log_likelihood: Callable[[Any, Any], Scalar]
    data: PyTree[Array]
    example: PyTree[Array]
    constrain: Callable[[Any], Any]
    origin: Any

    def __init__(self, *, log_prior, log_likelihood, data, example, constrain=None, origin=None):
        self.log_prior = log_prior
        self.log_likelihood = log_likelihood
        self.data = as_data(data)
        self.example = as_example(example)
        self.constrain = _identity if constrain is None else constrain
        if not callable(self.constrain):
            raise ValueError(f"constrain={constrain!r} is not a function. Pass one of z, or leave it out.")
        self.origin = origin
        check_scalar("log_prior", log_prior, self.example)
        datum = jax.tree.map(lambda leaf: leaf[0], self.data)
        check_scalar("log_likelihood", log_likelihood, self.example, datum)

    @property
    def num_data(self) -> int:
        return jax.tree.leaves(self.data)[0].shape[0]

    @property
    def dim(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.example))

    @property
    def dtype(self):
        return jnp.result_type(*jax.tree.leaves(self.example))

    def unravel(self, position: Float[Array, " dim"]) -> PyTree[Array]:
        """The latent variables, in the example's structure, from the flat vector the families work with."""
        return ravel_pytree(self.example)[1](position)

    def prior_at(self, position: Float[Array, " dim"]) -> Scalar:
        """log p(z) at a flat z."""
        return self.log_prior(self.unravel(position))

    def likelihood_at(self, position: Float[Array, " dim"], datum: PyTree[Array]) -> Scalar:
        """log p(x_n | z) at a flat z, for one datum."""
        return self.log_likelihood(self.unravel(position), datum)

    def without_origin(self) -> "Problem":
        """The same problem for compiled code, which would keep what the origin refers to alive."""
        return self if self.origin is None else eqx.tree_at(lambda problem: problem.origin, self, None)

    def take(self, indices) -> PyTree[Array]:
        """The data with these indices."""
        return jax.tree.map(lambda leaf: leaf[indices], self.data)


def _identity(z):
    return z


def as_data(data) -> PyTree[Array]:
    """Data as JAX arrays, once they are fit to be: one leading axis, finite, not empty."""
    leaves = jax.tree.leaves(data)
    if not leaves:
        raise ValueError(
            f"data={data!r} holds no arrays. Pass a pytree of arrays with a leading axis of N data."
        )
    sizes = set()
    for leaf in leaves:
        _check_numbers(leaf)
        if np.ndim(leaf) == 0:
            raise ValueError(
                f"data holds {leaf!r}, which has no leading axis. Every leaf needs one row a datum: "
                "pass arrays, np.asarray of a list."
            )
        sizes.add(np.shape(leaf)[0])
        _check_values(np.asarray(leaf))
    if len(sizes) > 1:
        raise ValueError(f"data has leaves of {sorted(sizes)} rows. Every leaf must have the same N rows.")
    if sizes == {0}:
        raise ValueError("data is empty (N = 0). Pass at least one datum.")
    return jax.tree.map(jnp.asarray, data)


def _check_numbers(leaf) -> None:
    try:
        numbers = np.asarray(leaf).dtype
    except TypeError:  # keys
        numbers = None
    if numbers is None or not (jnp.issubdtype(numbers, jnp.number) or numbers == jnp.bool_):
        described = f"{leaf!r}"[:80]
        raise ValueError(
            f"data holds {described}, which is not numbers. Pass arrays; encode categories first."
        )


def _check_values(values: np.ndarray) -> None:
    """Finite, and within the range of JAX's precision."""
    if not jnp.issubdtype(values.dtype, jnp.inexact) and not jnp.issubdtype(values.dtype, jnp.integer):
        return
    wanted = jax.dtypes.canonicalize_dtype(values.dtype)
    if jnp.issubdtype(wanted, jnp.integer):
        limits = jnp.iinfo(wanted)
        good = (values >= limits.min) & (values <= limits.max)
    else:
        good = np.isfinite(values) & (np.abs(values) <= jnp.finfo(wanted).max)
    if not good.all():
        row = int(np.argwhere(~good)[0][0])
        raise ValueError(
            f"data has a non-finite value in row {row}, or one beyond {wanted}. "
            "Drop or impute such rows first, or rescale."
        )


def as_example(example, name: str = "example") -> PyTree[Array]:
    """Parameters as JAX arrays of one precision, once they are fit to be: real numbers, at least one."""
    leaves = jax.tree.leaves(example)
    if not leaves or sum(np.size(leaf) for leaf in leaves) == 0:
        raise ValueError(
            f"{name}={example!r} has no entries. Pass a z with the shapes of the latent variables."
        )
    for leaf in leaves:
        values = np.asarray(leaf)
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise ValueError(
                f"{name} holds {values.dtype} values. Parameters are real: pass floating-point arrays."
            )
        if not np.isfinite(values).all():
            raise ValueError(f"{name} holds a non-finite value. Pass finite ones, such as zeros.")
    dtype = jnp.result_type(*leaves)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), example)


_ARGUMENTS = {
    "log_prior": "Pass log_prior(z), for a z like the example.",
    "log_likelihood": "Pass log_likelihood(z, datum), for a z like the example and one row of the data.",
}


def check_scalar(name: str, function, *args) -> None:
    """`function(*args)` is one real number."""
    if not callable(function):
        raise ValueError(
            f"{name}={function!r} is not a function. Pass a function that returns a log density."
        )
    try:
        result = jax.eval_shape(function, *args)
    except (TypeError, KeyError, IndexError) as error:
        shapes = ", ".join(str(jax.tree.map(jnp.shape, arg)) for arg in args)
        raise ValueError(
            f"{name} cannot be called with arguments of shapes {shapes}: {error}. "
            f"{_ARGUMENTS.get(name, 'Pass a function of these.')}"
        ) from error
    shape = getattr(result, "shape", None)
    if shape != ():
        described = f"shape {shape}" if shape is not None else f"{result!r}"
        raise ValueError(
            f"{name} returned {described}; it must return a scalar"
            + (
                " for one datum. Sum over the datum's own axes."
                if name in ("log_likelihood", "loss")
                else "."
            )
        )
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"{name} returned {result.dtype} values; it must return a real number.")
