"""The ELBO that runs are judged by: on the full data, with draws that are common to all runs.

one predictor a datum   quadrature of 100 nodes in float64: exact
more than one           noise in η, 16 draws
PPCA                    log p(x | W) through Σ x xᵀ, in float64: 128 pairs of draws ±ε of W, and nothing of jointcv
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jointcv as jcv
from jointcv.evaluate import full_gradient
from jointcv.paper.tasks import FACTOR_NOISE

NODES, DRAWS, PAIRS = 100, 16, 128
Judge = Callable[[jcv.MeanFieldParams], dict[str, float]]


def judge(task: str, problem: jcv.Problem) -> Judge:
    """A function of parameters.

    Where there is one predictor a datum it also tells the norm of the full-data gradient, of the library's own
    objective, whose quadrature has fewer nodes, and of the exact one.
    """
    if task == "ppca":
        return _factors(np.asarray(problem.data["x"], np.float64))
    view = jcv.find_view(problem).view
    if view.num_predictors > 1:  # pyright: ignore
        elbo = eqx.filter_jit(jcv.FullElbo(jcv.assemble(problem, view=view)[0], DRAWS))
        return lambda params: _estimate(np.asarray(elbo(params), np.float64))
    return _exact(problem)


def double(problem: jcv.Problem) -> jcv.Problem:
    """The same problem in float64, for use under `jax.enable_x64`."""

    def widen(leaf):
        return np.asarray(leaf, np.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jcv.Problem(
        log_prior=problem.log_prior,
        log_likelihood=problem.log_likelihood,
        data=jax.tree.map(widen, problem.data),
        example=jax.tree.map(widen, problem.example),
    )


def exact_objective(problem: jcv.Problem) -> jcv.Elbo:
    """The objective with 100 nodes of quadrature, or noise in η; of a problem in float64."""
    view = jcv.find_view(problem).view
    scalar = view.num_predictors == 1  # pyright: ignore
    noise = jcv.Quadrature(NODES) if scalar else jcv.PredictorNoise()
    return jcv.assemble(problem, view=view, noise=noise)[0]


def in_double(params: jcv.MeanFieldParams) -> jcv.MeanFieldParams:
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params)


def _estimate(draws: np.ndarray) -> dict[str, float]:
    return {"elbo": float(draws.mean()), "standard_error": float(draws.std(ddof=1) / draws.size**0.5)}


def _exact(problem: jcv.Problem) -> Judge:
    with jax.enable_x64(True):
        problem = double(problem)
        own, _, _ = jcv.assemble(problem)
        exact = exact_objective(problem)
        elbo, gradient = eqx.filter_jit(jcv.FullElbo(exact, 1)), eqx.filter_jit(full_gradient)

    def look(params):
        with jax.enable_x64(True):
            params = in_double(params)
            norms = [optax.tree.norm(gradient(one, params, jax.random.key(0))) for one in (own, exact)]
            return {
                "elbo": float(elbo(params)[0]),
                "gradient_norm": float(norms[0]),
                "exact_gradient_norm": float(norms[1]),
            }

    return look


def _factors(x: np.ndarray) -> Judge:
    """−½ [tr C⁻¹S + N log det C + N d log 2π], C = W Wᵀ + λ I, by Woodbury; S = Σ x xᵀ."""
    num_data, size = x.shape
    second = x.T @ x
    noise: np.ndarray | None = None

    def log_likelihood(factors: np.ndarray) -> np.ndarray:
        inner = FACTOR_NOISE * np.eye(factors.shape[-1]) + np.einsum("sik,sil->skl", factors, factors)
        seen = np.einsum("sik,sil->skl", factors, np.tensordot(factors, second, (1, 0)).transpose(0, 2, 1))
        distance = (
            np.trace(second) - np.trace(np.linalg.solve(inner, seen), axis1=1, axis2=2)
        ) / FACTOR_NOISE
        rank = factors.shape[-1]
        log_det = np.linalg.slogdet(inner)[1] + (size - rank) * math.log(FACTOR_NOISE)
        return -0.5 * (distance + num_data * (log_det + size * math.log(2 * math.pi)))

    def look(params):
        nonlocal noise
        location, log_scale = (np.asarray(leaf, np.float64) for leaf in (params.location, params.log_scale))
        if noise is None:
            noise = np.random.default_rng(0).standard_normal((PAIRS, location.size))
        step = np.exp(log_scale) * noise
        draws = [log_likelihood((location + way * step).reshape(PAIRS, size, -1)) for way in (1, -1)]
        pairs = (draws[0] + draws[1]) / 2
        log_prior = -0.5 * np.sum(location**2 + np.exp(2 * log_scale) + math.log(2 * math.pi))
        entropy = np.sum(log_scale) + 0.5 * location.size * (1 + math.log(2 * math.pi))
        return _estimate(pairs + log_prior + entropy)

    return look
