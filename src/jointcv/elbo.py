"""The negative ELBO, f(w) = E_n E_ε f(w; n, ε).

f(w; n, ε) = K_n + P − H(w),     K_n = −N log p(x_n | z),  P = −log p(z),  z = T_w(ε)
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jointcv.family import MeanField, MeanFieldParams, entropy
from jointcv.noise import AbstractNoise, Pair, PaperNoise, ParameterNoise, Summary
from jointcv.objective import AbstractObjective
from jointcv.prior import AbstractPrior
from jointcv.problem import Problem
from jointcv.view import AbstractView


class ElboDraws(eqx.Module):
    """The noise of the data term, and the ε of the prior."""

    data: PyTree[Array]
    prior: Array


class ElboCotangent(eqx.Module):
    """A gradient: the data term's before its pull-back, and all that has none."""

    data: Pair
    rest: MeanFieldParams


class Elbo(AbstractObjective):
    """f(w; n, ε) of a mean field: a view of the data, a kind of noise, and a prior."""

    problem: Problem
    family: MeanField
    view: AbstractView
    noise: AbstractNoise
    prior: AbstractPrior

    @property
    def data(self):
        return self.problem.data

    @property
    def num_data(self):
        return self.problem.num_data

    def init(self, key):
        return self.family.init(key, self.problem)

    def admits(self, params):
        widest = math.log(jnp.finfo(params.log_scale.dtype).max) / 2  # so that σ² and 1/σ² are finite
        return jnp.all(jnp.isfinite(params.location)) & jnp.all(jnp.abs(params.log_scale) < widest)

    def draw(self, key, params, data, part=0):
        data_key, prior_key = jax.random.split(key)
        draws = self.noise.draw(data_key, self.view, data, part)
        if isinstance(self.noise, ParameterNoise | PaperNoise):
            return ElboDraws(draws, draws)  # one z for the data and the prior
        return ElboDraws(draws, self.prior.draw(prior_key, params.location))

    def remember(self, params, data):
        return self.noise.remember(self.view, params, data)

    def value(self, entry, params, data, weights, draws):
        return self.noise.value(self.view, entry, params, data, weights, draws.data)

    def rest(self, params, draws):
        return self.prior.value(params, draws.prior) - entropy(params)

    def gradient(self, entry, params, data, weights, draws):
        data_term = self.noise.gradient(self.view, entry, params, data, weights, draws.data)
        prior = self.prior.gradient(params, draws.prior)
        return ElboCotangent(data_term, MeanFieldParams(prior.location, prior.log_scale - 1))

    def sampled(self, entry, params, data, weights, draws):
        data_term = self.noise.sampled(self.view, entry, params, data, weights, draws.data)
        return ElboCotangent(data_term, self.prior.sampled(params, draws.prior))

    def summarise(self, entry, data, weights):
        return self.noise.gather(self.view, self.noise.digest(self.view, entry, data, weights), data)

    def change(self, entry, before, data, weights):
        now, then = (self.noise.digest(self.view, place, data, weights) for place in (entry, before))
        return jax.tree.map(jnp.subtract, now, then)

    def expected(self, summary, params):
        return self.lift(
            jax.tree.map(jnp.add, self.noise.expected(summary, params), self.prior.expected(params))
        )

    def lift(self, gradient):
        nothing = jnp.zeros((), gradient.location.dtype)
        return ElboCotangent(Pair(nothing, nothing), gradient)

    def pull_both(self, cotangent, change, params, data, draws):
        digest = Summary(None, None) if change is None else change
        data_term, change = self.noise.pull_both(self.view, cotangent.data, digest, params, data, draws.data)
        return jax.tree.map(jnp.add, data_term, cotangent.rest), change


def fold_prior(problem: Problem) -> Problem:
    """The paper's form: log p(z)/N joins every datum's log likelihood, so that the prior goes into the table."""

    def log_likelihood(z, datum):
        return problem.log_likelihood(z, datum) + problem.log_prior(z) / problem.num_data

    return Problem(
        log_prior=lambda z: jnp.zeros((), problem.dtype),
        log_likelihood=log_likelihood,
        data=problem.data,
        example=problem.example,
        constrain=problem.constrain,
    )
