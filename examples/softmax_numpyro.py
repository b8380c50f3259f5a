"""Softmax regression with ten classes on many data."""
# ruff: noqa: I001

import argparse

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer import SVI

NUM_CLASSES = 10


def model(x, y):
    with numpyro.plate("classes", NUM_CLASSES, dim=-1), numpyro.plate("features", x.shape[1], dim=-2):
        weights = numpyro.sample("weights", dist.Normal(0, 1))
    with numpyro.plate("data", len(y), subsample_size=200) as idx:
        numpyro.sample("y", dist.Categorical(logits=x[idx] @ weights), obs=y[idx])


def simulate(num_data, num_features):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_data, num_features)) / np.sqrt(num_features)
    logits = x @ rng.normal(0, 3, (num_features, NUM_CLASSES)) + rng.gumbel(size=(num_data, NUM_CLASSES))
    return jnp.asarray(x), jnp.asarray(logits.argmax(axis=1))


def main(num_data, num_features, num_steps):
    x, y = simulate(num_data, num_features)
    guide = AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(5e-3), Trace_ELBO())
    result = svi.run(random.key(0), num_steps, x, y, progress_bar=False)
    weights = guide.sample_posterior(random.key(1), result.params, sample_shape=(50,))["weights"]
    predicted = (x @ weights.mean(axis=0)).argmax(axis=1)
    print("loss    ", result.losses[-100:].mean())
    print("accuracy", (predicted == y).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-data", type=int, default=100_000)
    parser.add_argument("--num-features", type=int, default=100)
    parser.add_argument("--num-steps", type=int, default=10_000)
    main(**vars(parser.parse_args()))
