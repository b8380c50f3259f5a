"""NumPyro's mean-field guides: their parameters as w = (μ, ρ) and back, and their optimiser's steps.

the guide's parameters    AutoNormal           {site}_{prefix}_loc, {site}_{prefix}_scale
                          AutoDiagonalNormal   {prefix}_loc, {prefix}_scale
what its optimiser moves  the same, with u = constraint⁻¹(scale), softplus⁻¹ by default, for a scale
what the objective has    ρ = log scale
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from numpyro.distributions.transforms import Transform, biject_to
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from numpyro.optim import _NumPyroOptim

from jointcv.family import AbstractStart, MeanFieldParams
from jointcv.problem import Problem

GUIDES = (AutoNormal, AutoDiagonalNormal)


class GuideStart(AbstractStart):
    """Where the guide starts."""

    params: MeanFieldParams

    def __call__(self, key, problem):
        return self.params


class AbstractNames(eqx.Module):
    """How a guide spreads a vector over its parameters."""

    @abstractmethod
    def gather(self, values: dict[str, Array], kind: str) -> Float[Array, " dim"]:
        """The vector, in the problem's order, of the parameters of a kind ("loc" or "scale")."""

    @abstractmethod
    def spread(self, vector: Float[Array, " dim"], kind: str) -> dict[str, Array]:
        """The parameters of a kind from the vector."""


class SiteNames(AbstractNames):
    """`AutoNormal`: a parameter for every site."""

    prefix: str
    sites: tuple[str, ...]
    unravel: Callable[[Array], dict[str, Array]]

    def gather(self, values, kind):
        return ravel_pytree({site: values[f"{site}_{self.prefix}_{kind}"] for site in self.sites})[0]

    def spread(self, vector, kind):
        return {f"{site}_{self.prefix}_{kind}": value for site, value in self.unravel(vector).items()}


class OneName(AbstractNames):
    """`AutoDiagonalNormal`: one vector, in the guide's order of the sites."""

    prefix: str
    order: np.ndarray

    def gather(self, values, kind):
        return values[f"{self.prefix}_{kind}"][self.order]

    def spread(self, vector, kind):
        return {f"{self.prefix}_{kind}": jnp.zeros_like(vector).at[self.order].set(vector)}


class GuideMap(eqx.Module):
    """A guide's parameters by name against μ and log σ in the problem's order."""

    names: AbstractNames
    to_scale: Transform

    def read(self, params: dict[str, Array]) -> MeanFieldParams:
        """μ and log σ of the guide's parameters."""
        log_scale = jnp.log(self.names.gather(params, "scale"))
        return MeanFieldParams(self.names.gather(params, "loc"), log_scale)

    def write(self, params: MeanFieldParams) -> dict[str, Array]:
        """The guide's parameters for μ and log σ."""
        return self.names.spread(params.location, "loc") | self.names.spread(params.scale, "scale")

    def read_free(self, free: dict[str, Array]) -> MeanFieldParams:
        """μ and log σ of what the guide's optimiser moves."""
        log_scale = jnp.log(self.to_scale(self.names.gather(free, "scale")))
        return MeanFieldParams(self.names.gather(free, "loc"), log_scale)

    def write_free(self, params: MeanFieldParams) -> dict[str, Array]:
        """What the guide's optimiser moves, for μ and log σ."""
        free_scale = jnp.asarray(self.to_scale.inv(params.scale))
        return self.names.spread(params.location, "loc") | self.names.spread(free_scale, "scale")

    def free_gradient(
        self, free: dict[str, Array], params: MeanFieldParams, gradient: MeanFieldParams
    ) -> dict[str, Array]:
        """The gradient in what the guide's optimiser moves: dρ/du = (ds/du)/s, with the s that the step has anyway."""
        _, pull = jax.vjp(self.to_scale, self.names.gather(free, "scale"))
        (for_scale,) = pull(gradient.log_scale / params.scale)
        return self.names.spread(gradient.location, "loc") | self.names.spread(for_scale, "scale")


def map_guide(guide: AutoNormal | AutoDiagonalNormal, problem: Problem) -> GuideMap:
    """The map between a guide that has seen its model and the problem of that model.

    Raises:
        ValueError: where the two do not have the same latent sites.
    """
    shapes = {name: jnp.shape(value) for name, value in guide._init_locs.items()}
    expected = {name: jnp.shape(leaf) for name, leaf in problem.example.items()}
    if shapes != expected:
        raise ValueError(
            f"The guide has the sites {shapes}, the model {expected}. Make the guide of the same model: "
            f"{type(guide).__name__}(model)."
        )
    to_scale = biject_to(guide.scale_constraint)
    if isinstance(guide, AutoNormal):
        unravel = ravel_pytree(problem.example)[1]
        return GuideMap(SiteNames(guide.prefix, tuple(problem.example), unravel), to_scale)
    order = ravel_pytree(guide._unpack_latent(np.arange(problem.dim)))[0]
    return GuideMap(OneName(guide.prefix, np.asarray(order)), to_scale)


def through_guide(optim: _NumPyroOptim, guide: GuideMap) -> optax.GradientTransformationExtraArgs:
    """A NumPyro optimiser's steps on the guide's own unconstrained parameters, as an optax transformation."""

    def init(params):
        return optim.init(guide.write_free(params))

    def update(updates, state, params: Any = None, *, value=None, **extra):
        gradient = guide.free_gradient(optim.get_params(state), params, updates)
        state = optim.update(gradient, state, value=value)
        moved = guide.read_free(optim.get_params(state))
        return jax.tree.map(jnp.subtract, moved, params), state

    return optax.GradientTransformationExtraArgs(init, update)
