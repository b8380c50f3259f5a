"""A logistic regression whose intercepts vary by group, with a learned spread."""
# ruff: noqa: I001

import argparse

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer import SVI


def model(group, x, y, num_groups):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    with numpyro.plate("groups", num_groups):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
    with numpyro.plate("data", len(y), subsample_size=100) as idx:
        logits = effect[group[idx]] + slope * x[idx]
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[idx])


def simulate(num_data, num_groups):
    rng = np.random.default_rng(0)
    group = rng.integers(0, num_groups, num_data)
    x = rng.normal(size=num_data)
    effect = rng.normal(-1, 1, num_groups)
    y = rng.random(num_data) < 1 / (1 + np.exp(-(effect[group] + 0.8 * x)))
    return jnp.asarray(group), jnp.asarray(x), jnp.asarray(y, int)


def main(num_data, num_groups, num_steps):
    group, x, y = simulate(num_data, num_groups)
    guide = AutoNormal(model)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, num_steps))
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    result = svi.run(random.key(0), num_steps, group, x, y, num_groups, progress_bar=False)
    quantiles = guide.quantiles(result.params, [0.05, 0.5, 0.95])
    print("loss  ", result.losses[-100:].mean())
    print("mean  ", quantiles["mean"])
    print("spread", quantiles["spread"])
    print("slope ", quantiles["slope"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-data", type=int, default=100_000)
    parser.add_argument("--num-groups", type=int, default=500)
    parser.add_argument("--num-steps", type=int, default=10_000)
    main(**vars(parser.parse_args()))
