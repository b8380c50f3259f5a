"""Ranking players by their matches (Bradley and Terry 1952), in a training loop of one's own."""
# ruff: noqa: I001

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
from jointcv.numpyro import SVI


def model(winner, loser, num_players):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("players", num_players):
        skill = numpyro.sample("skill", dist.Normal(0, scale))
    with numpyro.plate("matches", len(winner), subsample_size=100) as idx:
        logits = skill[winner[idx]] - skill[loser[idx]]
        numpyro.sample("won", dist.Bernoulli(logits=logits), obs=jnp.ones_like(logits))


def simulate(num_data, num_players):
    rng = np.random.default_rng(0)
    skill = rng.normal(0, 1.5, num_players)
    first, gap = rng.integers(0, num_players, num_data), rng.integers(1, num_players, num_data)
    second = (first + gap) % num_players
    first_won = rng.random(num_data) < 1 / (1 + np.exp(skill[second] - skill[first]))
    winner, loser = np.where(first_won, first, second), np.where(first_won, second, first)
    return jnp.asarray(winner), jnp.asarray(loser), skill


def main(num_data, num_players, num_steps):
    winner, loser, skill = simulate(num_data, num_players)
    arguments = (winner, loser, num_players)
    guide = AutoDiagonalNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO())

    @jax.jit
    def train(state):
        return jax.lax.scan(lambda state, _: svi.update(state, *arguments), state, None, length=num_steps)

    state, losses = train(svi.init(random.key(0), *arguments))
    median = guide.median(svi.get_params(state))
    print("loss       ", losses[-100:].mean())
    print("scale      ", median["scale"])
    print("correlation", np.corrcoef(median["skill"], skill)[0, 1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-data", type=int, default=50_000)
    parser.add_argument("--num-players", type=int, default=1000)
    parser.add_argument("--num-steps", type=int, default=10_000)
    main(**vars(parser.parse_args()))
