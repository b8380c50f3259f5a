"""Any doubly stochastic objective: E_n E_ε f(w; n, ε) where w is not variational and ε is noise of known moments.

With ε ~ N(ε̄, σ²) (Gaussian dropout has ε̄ = 1) the approximation is the second-order expansion around ε̄:

    f~(w; n, ε) = f + ∇_ε f · δ + ½ δᵀ ∇²_ε f δ,  δ = ε − ε̄,        E f~ = f + (σ²/2) tr ∇²_ε f
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from jointcv.checks import check_count, check_number, check_type
from jointcv.objective import AbstractObjective
from jointcv.problem import as_data, as_example, check_scalar


class GaussianNoise(eqx.Module):
    """Independent normals with one mean and one standard deviation, of a given shape a datum."""

    shape: tuple[int, ...] = eqx.field(static=True)
    mean: float = 1.0
    scale: float = 0.5

    def __check_init__(self):
        if not isinstance(self.shape, tuple):
            raise ValueError(
                f"GaussianNoise(shape={self.shape!r}) is no tuple. Use (3,) for three numbers a datum."
            )
        for size in self.shape:
            check_count("GaussianNoise(shape=...): an axis", size, "numbers")
        check_number("GaussianNoise(mean=...): mean", self.mean, "Use 1.0.")
        check_number("GaussianNoise(scale=...): scale", self.scale, "Use 0.5.")


class DoublyStochastic(AbstractObjective):
    """The mean over data and noise of a loss, as an objective for every control, memory and algorithm.

    Args:
        loss: `loss(params, datum, noise)`, a scalar, for one datum.
        data: a pytree of arrays with a leading axis of N data.
        start: the parameters to begin with, any pytree of floating-point arrays.
        noise: what is drawn for every datum.
        penalty: a part of the objective without data and noise, `penalty(params)`.
        per_datum: whether every datum of a batch is remembered at parameters of its own (`PerDatum()`,
            `Snapshots()`, `WholeTable()`), or all at one place (`Anchor()`, `PerBatch()`, or no memory).

    Examples:
        >>> objective = jcv.DoublyStochastic(
        ...     loss=lambda w, datum, noise: (datum["y"] - (datum["x"] * noise) @ w) ** 2,
        ...     data={"x": jnp.ones((50, 3)), "y": jnp.ones(50)},
        ...     start=jnp.zeros(3),
        ...     noise=jcv.GaussianNoise((3,)),
        ... )
    """

    loss: Callable[[Any, Any, Array], Scalar]
    data: PyTree[Array]
    start: PyTree[Array]
    noise: GaussianNoise
    penalty: Callable[[Any], Scalar]
    per_datum: bool = eqx.field(static=True)

    def __init__(self, *, loss, data, start, noise, penalty=None, per_datum=False):
        self.loss = loss
        self.data = as_data(data)
        self.start = as_example(start, "start")
        self.noise = noise
        self.penalty = _no_penalty if penalty is None else penalty
        self.per_datum = per_datum
        check_type(
            "noise", noise, GaussianNoise, "Use GaussianNoise(shape) with the shape of a datum's noise."
        )
        datum = jax.tree.map(lambda leaf: leaf[0], self.data)
        check_scalar("loss", loss, self.start, datum, self._centre(self.start))
        check_scalar("penalty", self.penalty, self.start)

    @property
    def num_data(self):
        return jax.tree.leaves(self.data)[0].shape[0]

    def init(self, key):
        return jax.tree.map(lambda leaf: leaf.copy(), self.start)

    def admits(self, params):
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]))

    def draw(self, key, params, data, part=0):
        rows = jax.tree.leaves(data)[0].shape[0]
        dtype = jnp.result_type(*jax.tree.leaves(params))
        return jax.random.normal(jax.random.fold_in(key, part), (rows, *self.noise.shape), dtype)

    def remember(self, params, data):
        if not self.per_datum:
            return params
        rows = jax.tree.leaves(data)[0].shape[0]
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (rows, *leaf.shape)), params)

    def value(self, entry, params, data, weights, draws):
        return self._sum(self._noisy, entry, data, weights, draws)

    def rest(self, params, draws):
        return self.penalty(params)

    def gradient(self, entry, params, data, weights, draws):
        here = self._gradient(self._noisy, entry, data, weights, draws)
        return jax.tree.map(jnp.add, here, jax.grad(self.penalty)(params))

    def sampled(self, entry, params, data, weights, draws):
        return self._gradient(self._expansion, entry, data, weights, draws)

    def summarise(self, entry, data, weights):
        return self._gradient(self._mean_expansion, entry, data, weights, jnp.zeros_like(weights))

    def change(self, entry, before, data, weights):
        now, then = (self.summarise(place, data, weights) for place in (entry, before))
        return jax.tree.map(jnp.subtract, now, then)

    def expected(self, summary, params):
        return summary

    def lift(self, gradient):
        return gradient

    def pull_both(self, cotangent, change, params, data, draws):
        return cotangent, change

    def _noisy(self, params, datum, draw) -> Scalar:
        return self.loss(params, datum, self.noise.mean + self.noise.scale * draw)

    def _expansion(self, params, datum, draw) -> Scalar:
        first, second = self._along(params, datum, self.noise.scale * draw)
        return self.loss(params, datum, self._centre(params)) + first + second / 2

    def _mean_expansion(self, params, datum, _) -> Scalar:
        centre = self._centre(params)
        basis = jnp.eye(centre.size, dtype=centre.dtype).reshape(centre.size, *centre.shape)
        trace = jnp.sum(jax.vmap(lambda unit: self._along(params, datum, unit)[1])(basis))
        return self.loss(params, datum, centre) + self.noise.scale**2 / 2 * trace

    def _along(self, params, datum, step: Array) -> tuple[Scalar, Scalar]:
        """∇_ε f · step and stepᵀ ∇²_ε f step at the noise's mean."""

        def slope(noise):
            return jax.jvp(lambda noise: self.loss(params, datum, noise), (noise,), (step,))[1]

        return jax.jvp(slope, (self._centre(params),), (step,))

    def _centre(self, params) -> Float[Array, "..."]:
        return jnp.full(self.noise.shape, self.noise.mean, jnp.result_type(*jax.tree.leaves(params)))

    def _sum(self, term, entry, data, weights, draws) -> Scalar:
        place = 0 if self.per_datum else None
        # inc's pass over all data has a batch's noise: its rows are used again and again, so that the mean stands.
        draws = draws[jnp.arange(weights.shape[0]) % draws.shape[0]]
        return jnp.sum(weights * jax.vmap(term, (place, 0, 0))(entry, data, draws))

    def _gradient(self, term, entry, data, weights, draws):
        gradient = jax.grad(lambda entry: self._sum(term, entry, data, weights, draws))(entry)
        return jax.tree.map(lambda leaf: jnp.sum(leaf, 0), gradient) if self.per_datum else gradient


def _no_penalty(params) -> Scalar:
    return jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
