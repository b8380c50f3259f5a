"""The view of a problem: read from the jaxpr of its log likelihood, or stated by hand. Both are checked on the data."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Scalar

from jointcv.checks import check_type
from jointcv.linear import NoSplit, Split, offenders, rows_vary, split, squares_hold, state, verify
from jointcv.problem import Problem, check_scalar
from jointcv.view import AbstractView, LinearView, WholeView

KINKS = "a loss of straight pieces: its second derivative does not tell its curvature, so no natural steps"
PROBES = 64  # data whose losses are looked at for kinks


class Found(eqx.Module):
    """What reading the model gave: a view and, in words, why it is not a better one or what was done for it."""

    view: AbstractView
    reason: str = eqx.field(static=True, default="")


def find_view(problem: Problem) -> Found:
    """The smallest view of the data that the model's jaxpr shows.

    A few data whose predictors collide (a player against himself) move out of the data into the part that is
    handled in full, so that the squared map holds for all that are left.
    """
    check_type("problem", problem, Problem, "Pass jointcv.Problem(...).")
    datum = problem.take(0)
    found = split(problem.likelihood_at, _zero(problem), datum)
    if isinstance(found, NoSplit):
        return Found(WholeView(problem), found.reason)
    wrong = _differs(found, problem)
    if wrong is not None:
        return Found(WholeView(problem), f"a linear view was read but does not hold: {wrong}")
    return _look_through(found, problem)


def linear_view(
    problem: Problem, *, predict: Callable[[Any, Any], Any], loss: Callable[[Any, Any], Scalar]
) -> LinearView:
    """A view that is stated by hand: log p(x_n | z) = −loss(predict(z, datum), datum), with `predict` affine in z.

    Args:
        problem: the model.
        predict: `predict(z, datum)`, the predictors η of one datum, an array or a pytree of arrays.
        loss: `loss(η, datum)`, a scalar.

    Returns:
        A view for `fit(problem, view=...)`.

    Raises:
        ValueError: where value or gradient is not that of the log likelihood, or `predict` is not affine.

    Examples:
        >>> view = jcv.linear_view(
        ...     problem,
        ...     predict=lambda z, datum: datum["x"] @ z,
        ...     loss=lambda eta, datum: jax.nn.softplus(eta) - datum["y"] * eta,
        ... )  # doctest: +SKIP
    """
    check_type("problem", problem, Problem, "Pass jointcv.Problem(...).")
    for name, function in (("predict", predict), ("loss", loss)):
        if not callable(function):
            raise ValueError(f"{name}={function!r} is not a function. Pass {name}(…, datum) of one datum.")
    datum = problem.take(0)
    check_scalar("loss", loss, jax.eval_shape(predict, problem.example, datum), datum)
    stated = state(lambda z, datum: predict(problem.unravel(z), datum), loss, _zero(problem), datum)
    wrong = _differs(stated, problem)
    if wrong is not None:
        raise ValueError(
            f"predict and loss are not the log likelihood, or predict is not affine in z: {wrong}. "
            "Pass predict(z, datum), affine in z, and loss(η, datum) with log_likelihood = −loss."
        )
    return _look_through(stated, problem).view  # pyright: ignore


def set_apart(problem: Problem, few: np.ndarray) -> Problem:
    """The same posterior, with the few data of this mask in the part that is not subsampled."""
    apart = problem.take(np.flatnonzero(few))

    def log_prior(z):
        likelihoods = jax.vmap(problem.log_likelihood, (None, 0))(z, apart)
        return problem.log_prior(z) + jnp.sum(likelihoods)

    return Problem(
        log_prior=log_prior,
        log_likelihood=problem.log_likelihood,
        data=problem.take(np.flatnonzero(~few)),
        example=problem.example,
        constrain=problem.constrain,
    )


def _look_through(split: Split, problem: Problem) -> Found:
    """The view of a split that holds, with the squared map where that holds too."""
    same_rows = not rows_vary(split, problem.take(0))
    is_curved = _is_curved(split, problem)
    made = partial(LinearView, split=split, same_rows=same_rows, is_curved=is_curved)
    reason = squares_hold(split, _zero(problem), problem.data)
    if reason is None:
        return Found(made(problem, has_squares=True), "" if is_curved else KINKS)
    few = np.asarray(offenders(split, _zero(problem), problem.data))
    if few.sum() <= max(16, problem.num_data // 1000) and few.sum() < problem.num_data:
        view = made(set_apart(problem, few), has_squares=True)
        return Found(view, f"{reason}: handled in full at every step, beside the prior")
    return Found(made(problem, has_squares=False), reason)


def _is_curved(split: Split, problem: Problem) -> bool:
    """False where in some predictor ℓ'' is zero wherever it is looked at, and yet ℓ' is not the same everywhere."""
    rows = problem.take(np.linspace(0, problem.num_data - 1, min(PROBES, problem.num_data)).astype(int))
    bends, slopes = _probe(split, rows, _zero(problem))
    return not bool(jnp.any(jnp.all(bends == 0, axis=0) & jnp.any(slopes[0] != slopes[1], axis=0)))


@eqx.filter_jit
def _probe(split: Split, rows, z):
    """diag ℓ'' at random predictors of these data; and ℓ' there, before and after a step along its own predictor."""

    def look(datum, key):
        eta_key, step_key = jax.random.split(key)
        eta = split.predict(z, datum) + 3 * jax.random.normal(eta_key, (split.num_predictors,), z.dtype)
        slope = jax.grad(lambda eta: split.outer(eta, datum))
        units = jnp.eye(eta.size, dtype=eta.dtype)
        steps = 10 * jax.random.normal(step_key, eta.shape, eta.dtype)[:, None] * units
        bend = jax.vmap(lambda unit: unit @ jax.jvp(slope, (eta,), (unit,))[1])(units)
        moved = jax.vmap(lambda step, unit: unit @ slope(eta + step))(steps, units)
        return bend, (slope(eta), moved)

    keys = jax.random.split(jax.random.key(0), jax.tree.leaves(rows)[0].shape[0])
    return jax.vmap(look)(rows, keys)


def _differs(split: Split, problem: Problem) -> str | None:
    return verify(split, problem.likelihood_at, _zero(problem), problem.data, jax.random.key(0))


def _zero(problem: Problem):
    return jnp.zeros(problem.dim, problem.dtype)
