"""The family q_w(z): mean field, w = (μ, ρ), z = T_w(ε) = μ + exp(ρ) ⊙ ε, H(w) = Σ ρ + const."""

import math
from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PyTree, Scalar

from jointcv.checks import check_number, check_type
from jointcv.problem import Problem, as_example


class MeanFieldParams(eqx.Module):
    """w = (μ, ρ): where the family sits and the logarithm of how wide it is, as flat vectors."""

    location: Float[Array, "*stack dim"]
    log_scale: Float[Array, "*stack dim"]

    @property
    def scale(self) -> Float[Array, "*stack dim"]:
        return jnp.exp(self.log_scale)

    @property
    def variance(self) -> Float[Array, "*stack dim"]:
        return jnp.exp(2 * self.log_scale)


class AbstractStart(eqx.Module):
    """Where a run starts."""

    @abstractmethod
    def __call__(self, key: Key[Array, ""], problem: Problem) -> MeanFieldParams:
        """The first parameters."""


def _check_log_scale(start) -> None:
    check_number(f"{type(start).__name__}(log_scale=...): log_scale", start.log_scale, "Use 0.0, or below.")


class RandomStart(AbstractStart):
    """The paper's start: μ a standard normal draw, log σ constant."""

    log_scale: float = 0.0

    def __check_init__(self):
        _check_log_scale(self)

    def __call__(self, key, problem):
        location = jax.random.normal(key, (problem.dim,), problem.dtype)
        return MeanFieldParams(location, jnp.full_like(location, self.log_scale))


class ConstantStart(AbstractStart):
    """Every location and every log σ the same; for models whose zero is a sensible place to begin."""

    location: float = 0.0
    log_scale: float = 0.0

    def __check_init__(self):
        check_number("ConstantStart(location=...): location", self.location, "Use 0.0.")
        _check_log_scale(self)

    def __call__(self, key, problem):
        location = jnp.full((problem.dim,), self.location, problem.dtype)
        return MeanFieldParams(location, jnp.full_like(location, self.log_scale))


def _as_position(tree: Any) -> PyTree[Array]:
    return as_example(tree, "GivenStart(position=...)")


class GivenStart(AbstractStart):
    """μ at a given z (in the structure of `Problem.example`), such as a mode or an earlier run's mean."""

    position: PyTree[Array] = eqx.field(converter=_as_position)
    log_scale: float = -2.0

    def __check_init__(self):
        _check_log_scale(self)

    def __call__(self, key, problem):
        if jax.tree.structure(self.position) != jax.tree.structure(problem.example):
            raise ValueError(
                f"GivenStart(position=...) has structure {jax.tree.structure(self.position)}, the problem's example "
                f"{jax.tree.structure(problem.example)}. Pass a z of the example's structure."
            )
        shapes = [[leaf.shape for leaf in jax.tree.leaves(z)] for z in (self.position, problem.example)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"GivenStart(position=...) has shapes {shapes[0]}, the problem's example {shapes[1]}. "
                "Pass a z of the example's shapes."
            )
        location, _ = ravel_pytree(self.position)
        location = location.astype(problem.dtype)
        return MeanFieldParams(location, jnp.full_like(location, self.log_scale))


class MeanField(eqx.Module):
    """Independent normals, one for every unconstrained coordinate.

    Args:
        start: where a run starts; the paper's `RandomStart()` by default.
    """

    start: AbstractStart = RandomStart()

    def __check_init__(self):
        remedy = "Use RandomStart(), ConstantStart() or GivenStart(z)."
        check_type("MeanField(start=...)", self.start, AbstractStart, remedy)

    def init(self, key: Key[Array, ""], problem: Problem) -> MeanFieldParams:
        # A start that is constant under jit is folded into what follows; XLA on the CPU (jaxlib 0.10.2) then
        # makes NaN of the second derivatives of a softmax at equal logits.
        return jax.lax.optimization_barrier(self.start(key, problem))

    def transform(self, params: MeanFieldParams, noise: Float[Array, " dim"]) -> Float[Array, " dim"]:
        return params.location + params.scale * noise

    def sample(self, key: Key[Array, ""], params: MeanFieldParams) -> Float[Array, " dim"]:
        noise = jax.random.normal(key, params.location.shape, params.location.dtype)
        return self.transform(params, noise)


def entropy(params: MeanFieldParams) -> Scalar:
    """H(w) of the mean field, with its constant."""
    dim = params.log_scale.size
    return jnp.sum(params.log_scale) + 0.5 * dim * (1 + math.log(2 * math.pi))
