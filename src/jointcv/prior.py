"""The prior's part P(z) = −log p(z). It is not subsampled, so it needs no memory: expand it at the current m.

sampled   ∇P(z),  with f~: ∇P(m) + ∇²P(m) v, whose mean is (∇P(m), σ²⊙diag ∇²P(m))
closed    ∇ E_q P by the moments of q, for the addends of P that have them; the others sampled
"""

from abc import abstractmethod
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Scalar

from jointcv.family import MeanFieldParams
from jointcv.moments import Moments, read_moments
from jointcv.problem import Problem

Latent = Float[Array, " dim"]


class AbstractPrior(eqx.Module):
    """What P adds to f, to f~ and to the mean of f~."""

    @abstractmethod
    def draw(self, key: Key[Array, ""], like: Latent) -> Latent:
        """An ε for z where the data term has none of its own."""

    @abstractmethod
    def value(self, params: MeanFieldParams, draws: Latent) -> Scalar:
        """P at this noise, or its mean."""

    @abstractmethod
    def gradient(self, params: MeanFieldParams, draws: Latent) -> MeanFieldParams:
        """The gradient of `value`."""

    @abstractmethod
    def sampled(self, params: MeanFieldParams, draws: Latent) -> MeanFieldParams:
        """The gradient of f~ with this noise."""

    @abstractmethod
    def expected(self, params: MeanFieldParams) -> MeanFieldParams:
        """The mean of `sampled` over the noise."""

    @abstractmethod
    def curvature(self, params: MeanFieldParams, draws: Latent) -> Latent:
        """E_q diag ∇²P, with this noise where it has to be sampled."""

    @abstractmethod
    def hessian_product(self, params: MeanFieldParams, direction: Latent) -> Latent:
        """∇²P v at the location, or its mean."""


class SampledPrior(AbstractPrior):
    """P at z = m + v.

    Args:
        log_density: log p of a flat z.
        diagonal: diag ∇²P at a location; without it the gradient in log σ is left as it is.
    """

    log_density: Callable[[Latent], Scalar]
    diagonal: Callable[[Latent], Latent] | None = None

    def draw(self, key, like):
        return jax.random.normal(key, like.shape, like.dtype)

    def value(self, params, draws):
        return -self.log_density(params.location + params.scale * draws)

    def gradient(self, params, draws):
        v = params.scale * draws
        gradient = self._slope(params.location + v)
        return MeanFieldParams(gradient, gradient * v)

    def sampled(self, params, draws):
        v = params.scale * draws
        slope, bend = jax.jvp(self._slope, (params.location,), (v,))
        # Without the diagonal the mean of ∇²P v⊙v is not known, but that of ∇P⊙v is: zero.
        for_scale = slope if self.diagonal is None else slope + bend
        return MeanFieldParams(slope + bend, for_scale * v)

    def expected(self, params):
        gradient = self._slope(params.location)
        if self.diagonal is None:
            return MeanFieldParams(gradient, jnp.zeros_like(gradient))
        return MeanFieldParams(gradient, params.variance * self.diagonal(params.location))

    def curvature(self, params, draws):
        controlled = self.gradient(params, draws).log_scale - self.sampled(params, draws).log_scale
        return (controlled + self.expected(params).log_scale) / params.variance

    def hessian_product(self, params, direction):
        return jax.jvp(self._slope, (params.location,), (direction,))[1]

    def _slope(self, position):
        return -jax.grad(self.log_density)(position)


class ClosedPrior(AbstractPrior):
    """E_q P where q's moments give it; what is left over is sampled, with noise only where it acts."""

    moments: Moments

    def draw(self, key, like):
        touched = np.flatnonzero(self.moments.touched)
        if self.moments.is_complete or touched.size == 0:
            return jnp.zeros_like(like)
        noise = jax.random.normal(key, touched.shape, like.dtype)
        return jnp.zeros_like(like).at[touched].set(noise, unique_indices=True)

    def value(self, params, draws):
        return self._mean(params) + self._rest.value(params, draws)

    def gradient(self, params, draws):
        return _add(jax.grad(self._mean)(params), self._rest.gradient(params, draws))

    def sampled(self, params, draws):
        return self._rest.sampled(params, draws)

    def expected(self, params):
        return self._rest.expected(params)

    def curvature(self, params, draws):
        closed = -2 * jax.grad(self.moments.expectation, 1)(params.location, params.variance)
        return closed + self._rest.curvature(params, draws)

    def hessian_product(self, params, direction):
        def slope(location):
            return -jax.grad(self.moments.expectation)(location, params.variance)

        closed = jax.jvp(slope, (params.location,), (direction,))[1]
        return closed + self._rest.hessian_product(params, direction)

    def _mean(self, params):
        return -self.moments.expectation(params.location, params.variance)

    @property
    def _rest(self) -> SampledPrior:
        return SampledPrior(self.moments.remainder)


class ClosedDiagonal(eqx.Module):
    """diag ∇²P at a location: twice the derivative of E_q P in the variance, at no variance."""

    moments: Moments

    def __call__(self, location: Latent) -> Latent:
        return -2 * jax.grad(self.moments.expectation, 1)(location, jnp.zeros_like(location))


def closed_prior(problem: Problem) -> ClosedPrior:
    """The prior with as much of its expectation in closed form as can be read from its jaxpr."""
    return ClosedPrior(_read(problem))


def sampled_prior(problem: Problem) -> SampledPrior:
    """The prior at the noise's z, as the paper has it, with a controlled scale where its Hessian's diagonal is read."""
    moments = _read(problem)
    return SampledPrior(problem.prior_at, ClosedDiagonal(moments) if moments.is_complete else None)


def _read(problem: Problem) -> Moments:
    return read_moments(problem.prior_at, jnp.zeros(problem.dim, problem.dtype))


def _add(left: MeanFieldParams, right: MeanFieldParams) -> MeanFieldParams:
    return jax.tree.map(jnp.add, left, right)
