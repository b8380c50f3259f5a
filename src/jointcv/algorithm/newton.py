"""A Newton step of the location on all data, by conjugate gradients in the metric s of the family:

    H d = −g,   x = s^½ d:   (s^-½ H s^-½) x = −s^-½ g

The metric of a mean field is diagonal, and along collinear predictors steps in it are slow. Here `H = ∇²[K + P]` is
known by its products, a pass over the data each, and `g` is the gradient on all data with the noise of ε controlled.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Scalar

from jointcv.control import MonteCarloCV
from jointcv.elbo import Elbo
from jointcv.evaluate import full_gradient, naive_gradient
from jointcv.family import MeanFieldParams
from jointcv.memory import Recall
from jointcv.smoothness import hessian_product, see_all

ENOUGH = 0.03  # of the residual: what is left is for later
LEAST_CURVATURE = 1e-6  # of a direction, relative to the metric's; less is flat or negative


class Newton(NamedTuple):
    """A step of the location, and the Hessian products that it took."""

    step: Float[Array, " dim"]
    products: Int[Scalar, ""]


def newton_step(
    objective: Elbo, params: MeanFieldParams, key: Key[Array, ""], most: Int[Scalar, ""]
) -> Newton:
    """−H⁻¹ g, as far as so many products with H bring it, or until a direction has no curvature.

    Args:
        objective: the negative ELBO.
        params: where.
        key: of the noise in g.
        most: Hessian products.
    """
    gradient = full_gradient(objective, params, key, gradient=_controlled_gradient).location
    target = -params.scale * gradient
    size = jnp.linalg.norm(target)
    sight = see_all(objective, params)

    def unfinished(carry):
        _, residual, _, count, curved = carry
        return (count < most) & curved & (jnp.linalg.norm(residual) > ENOUGH * size)

    def turn(carry):
        x, residual, direction, count, _ = carry
        bent = params.scale * hessian_product(objective, params, sight, params.scale * direction)
        square, curvature = residual @ residual, direction @ bent
        curved = curvature > LEAST_CURVATURE * (direction @ direction)
        length = jnp.where(curved, square / jnp.where(curved, curvature, 1), 0)
        left = residual - length * bent
        turned = left + (left @ left) / square * direction
        return x + length * direction, left, turned, count + 1, curved

    start = (jnp.zeros_like(target), target, target, jnp.zeros((), jnp.int32), jnp.isfinite(size))
    x, _, _, count, _ = jax.lax.while_loop(unfinished, turn, start)
    return Newton(params.scale * x, count)


def _controlled_gradient(objective, params, batch, draws):
    correction = MonteCarloCV().correct(objective, Recall(None, None), params, batch, draws)
    return jax.tree.map(jnp.add, naive_gradient(objective, params, batch, draws), correction)
