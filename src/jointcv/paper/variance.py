"""Variances of gradients along a run: of an estimator, and the parts of the naive gradient at the same place.

V_{n,ε} = V_{n,ε}[∇f(w; n, ε)],   V_n = V_n[E_ε ∇f(w; n, ε)],   V_ε = V_ε[∇f(w; ε)]
"""

from dataclasses import dataclass

import equinox as eqx

import jointcv as jcv


@dataclass(frozen=True)
class Parts:
    """The noise of the naive gradient of μ, as traces."""

    total: float
    data: float
    noise: float


def estimator_variance(fit: jcv.Fit, key, count: int) -> tuple[float, float]:
    """The traces of an estimator's variance for μ and for log σ, its memory as it stands in the run."""
    return jcv.variance_report(fit, key, num_draws=count, full_draws=2).own


def naive_parts(naive: jcv.Fit, params: jcv.MeanFieldParams, key, count: int, full_draws: int) -> Parts:
    """V_{n,ε}, V_n and V_ε.

    Args:
        naive: any run of the naive estimator, with the paper's noise (one ε for the whole z).
        params: where.
        key: of minibatches and ε.
        count: minibatches, each with two ε.
        full_draws: gradients on all data.
    """
    there = eqx.tree_at(lambda fit: (fit.params, fit.run.state.params), naive, (params, params))
    report = jcv.variance_report(there, key, num_draws=count, full_draws=full_draws)
    return Parts(report.total[0], report.data[0], report.noise[0])
