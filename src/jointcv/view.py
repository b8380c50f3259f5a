"""What one datum sees of z: η_n = A_n z + b_n, with K = dim η_n, and K_n(z) = N ℓ_n(η_n).

    ∇K_n = N A_nᵀ ℓ'_n(η),   ∇²K_n v = N A_nᵀ ℓ''_n(η) A_n v,   diag ∇²K_n = N (A_n²)ᵀ diag ℓ''_n(η)

An estimator is algebra on cotangents N Σ_n w_n ℓ'_n, with one pull-back Aᵀ at the end. A view of the whole z has
η = z: shared by the batch (`WholeView`), or a z of its own for every datum (`WholeViewEach`, the paper's table).
"""

from abc import abstractmethod
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Scalar

from jointcv.linear import Split
from jointcv.problem import Problem

Seen = Float[Array, "..."]


class AbstractView(eqx.Module):
    """How a minibatch sees z. `data` are the batch's rows, `weights` what each counts (summing to about one)."""

    problem: eqx.AbstractVar[Problem]

    @abstractmethod
    def look(self, position: Float[Array, " dim"], data: PyTree[Array]) -> Seen:
        """η = A z + b."""

    @abstractmethod
    def push(self, direction: Float[Array, " dim"], data: PyTree[Array]) -> Seen:
        """A v."""

    @abstractmethod
    def value(self, seen: Seen, data: PyTree[Array], weights: Float[Array, " batch"]) -> Scalar:
        """N Σ w_n ℓ_n(η_n)."""

    @abstractmethod
    def slope(self, seen: Seen, data: PyTree[Array], weights: Float[Array, " batch"]) -> Seen:
        """N w_n ℓ'_n(η_n), a cotangent."""

    @abstractmethod
    def pull(self, cotangents: PyTree[Seen], data: PyTree[Array]) -> PyTree[Float[Array, " dim"]]:
        """Aᵀ c of every c."""

    @abstractmethod
    def pull_squared(self, cotangents: PyTree[Seen], data: PyTree[Array]) -> PyTree[Float[Array, " dim"]]:
        """(A²)ᵀ c of every c."""

    @abstractmethod
    def curvature(
        self, seen: Seen, data: PyTree[Array], weights: Float[Array, " batch"]
    ) -> Float[Array, " dim"] | None:
        """diag N Σ w_n ∇²ℓ_n, or None where it cannot be had at the price of a gradient."""

    def expand(
        self, seen: Seen, step: Seen, data: PyTree[Array], weights: Float[Array, " batch"]
    ) -> tuple[Seen, Seen]:
        """N w_n ℓ'_n(η_n) and N w_n ℓ''_n(η_n) dη_n."""
        return jax.jvp(
            lambda seen: self.slope(seen, data, weights), (seen,), (jnp.broadcast_to(step, seen.shape),)
        )


class WholeView(AbstractView):
    """η = z, one z for the whole batch: a gradient is one backward pass of the batch's sum."""

    problem: Problem

    def look(self, position, data):
        return position

    def push(self, direction, data):
        return direction

    def value(self, seen, data, weights):
        losses = jax.vmap(self.problem.likelihood_at, (None, 0))(seen, data)
        return -self.problem.num_data * jnp.sum(weights * losses)

    def slope(self, seen, data, weights):
        return jax.grad(self.value)(seen, data, weights)

    def pull(self, cotangents, data):
        return cotangents

    def pull_squared(self, cotangents, data):
        return cotangents

    def curvature(self, seen, data, weights):
        return None


class WholeViewEach(AbstractView):
    """η_n = z_n, a z of its own for every datum: a (batch, D) array of gradients, the paper's slow path."""

    problem: Problem

    def look(self, position, data):
        return jnp.broadcast_to(position, (_num_rows(data), self.problem.dim))

    def push(self, direction, data):
        return self.look(direction, data)

    def value(self, seen, data, weights):
        losses = jax.vmap(self.problem.likelihood_at)(seen, data)
        return -self.problem.num_data * jnp.sum(weights * losses)

    def slope(self, seen, data, weights):
        return jax.grad(self.value)(seen, data, weights)

    def pull(self, cotangents, data):
        return jax.tree.map(lambda cotangent: jnp.sum(cotangent, axis=0), cotangents)

    def pull_squared(self, cotangents, data):
        return self.pull(cotangents, data)

    def curvature(self, seen, data, weights):
        return None


class LinearView(AbstractView):
    """η_n = A_n z + b_n with K numbers a datum, read from the model's jaxpr or stated by hand.

    Args:
        problem: the model.
        split: `predict(z, datum)`, `outer(η, datum)` and `squared(variance, datum)`.
        same_rows: whether all data see the same coordinates (a design matrix), or each its own (a gather).
        has_squares: whether the rows of A_n have disjoint supports and `squared` is their square, for every datum.
        is_curved: whether ℓ'' tells the curvature of ℓ; that of |η| and other losses of straight pieces does not.
    """

    problem: Problem
    split: Split
    has_squares: bool = eqx.field(static=True)
    same_rows: bool = eqx.field(static=True, default=False)
    is_curved: bool = eqx.field(static=True, default=True)

    @property
    def num_predictors(self) -> int:
        return self.split.num_predictors

    def look(self, position, data):
        return jax.vmap(self.split.predict, (None, 0))(position, data)

    def push(self, direction, data):
        return jax.jvp(lambda z: self.look(z, data), (jnp.zeros_like(direction),), (direction,))[1]

    def value(self, seen, data, weights):
        return -self.problem.num_data * jnp.sum(weights * jax.vmap(self.split.outer)(seen, data))

    def slope(self, seen, data, weights):
        return jax.grad(self.value)(seen, data, weights)

    def pull(self, cotangents, data):
        return self._pull_through(lambda z: self.look(z, data), cotangents)

    def curvature(self, seen, data, weights):
        return self.pull_squared(self.bend(seen, data, weights), data) if self.has_squares else None

    def hessian(
        self, seen: Seen, data: PyTree[Array], weights: Float[Array, " batch"]
    ) -> Float[Array, "batch predictors predictors"]:
        """N w_n ℓ''_n(η_n)."""

        def column(direction):
            return self.expand(seen, direction, data, weights)[1]

        return jax.vmap(column, out_axes=-1)(jnp.eye(seen.shape[-1], dtype=seen.dtype))

    def bend(
        self, seen: Seen, data: PyTree[Array], weights: Float[Array, " batch"]
    ) -> Float[Array, "batch predictors"]:
        """N w_n diag ℓ''_n(η_n)."""
        return jnp.diagonal(self.hessian(seen, data, weights), axis1=-2, axis2=-1)

    def spread(self, variance: Float[Array, " dim"], data: PyTree[Array]) -> Float[Array, "batch predictors"]:
        """The variance of η_n under the mean field: A_n² σ²."""
        return jax.vmap(self.split.squared, (None, 0))(variance, data)

    def pull_squared(self, cotangents, data):
        return self._pull_through(lambda variance: self.spread(variance, data), cotangents)

    def _pull_through(self, linear: Callable, cotangents: PyTree[Seen]) -> PyTree[Float[Array, " dim"]]:
        leaves, structure = jax.tree.flatten(cotangents)
        if not leaves:
            return cotangents
        pull = jax.vjp(linear, jnp.zeros(self.problem.dim, leaves[0].dtype))[1]
        if self.same_rows:
            # One product of A with all: XLA on the CPU takes less time for two together than for one by itself.
            pulled = list(jax.vmap(pull)(jnp.stack(leaves))[0])
        else:
            pulled = [pull(leaf)[0] for leaf in leaves]
        return jax.tree.unflatten(structure, pulled)


def _num_rows(data: PyTree[Array]) -> int:
    return jax.tree.leaves(data)[0].shape[0]
