"""What Gauss–Hermite quadrature costs the ELBO of a fit: Σ_n [E_2J ℓ_n − E_J ℓ_n], with J nodes and with 2J."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, Scalar

from jointcv.checks import check_type
from jointcv.elbo import Elbo
from jointcv.family import MeanFieldParams
from jointcv.fit import Fit
from jointcv.noise import Quadrature

DATA_AT_ONCE = 10_000


def quadrature_error(fit: Fit) -> float:
    """How many nats the ELBO at the end of a run is off by its quadrature, against twice as many nodes.

    The error falls geometrically with the nodes, so what is beyond twice as many is small beside it.

    Args:
        fit: a run whose noise is `Quadrature()`, the default of models with one predictor a datum.

    Returns:
        The sum over the data, signed: the fit's ELBO less the more exact one.
    """
    check_type("fit", fit, Fit, "Pass what jointcv.fit returned.")
    objective = fit.algorithm.objective
    if not isinstance(objective, Elbo) or not isinstance(objective.noise, Quadrature):
        raise ValueError(
            f"fit has noise={getattr(objective, 'noise', None)!r}, no quadrature. "
            "Its ELBO is estimated by draws: fit.elbo(key) tells the standard error."
        )
    finer = dataclasses.replace(objective, noise=Quadrature(2 * objective.noise.nodes))
    return float(_excess_loss(objective, finer, fit.params))


@eqx.filter_jit
def _excess_loss(objective: Elbo, finer: Elbo, params: MeanFieldParams) -> Float[Scalar, ""]:
    """Datum by datum: the two sums over all data are too close for float32."""

    def difference(datum):
        row = jax.tree.map(lambda leaf: leaf[None], datum)
        share = jnp.full(1, 1 / objective.num_data, params.location.dtype)
        exact, own = (one.noise.value(one.view, None, params, row, share, None) for one in (finer, objective))
        return exact - own

    return jnp.sum(jax.lax.map(difference, objective.data, batch_size=min(DATA_AT_ONCE, objective.num_data)))
