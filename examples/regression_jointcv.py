"""Bayesian regression on many data, with unknown noise and a subsampled plate."""
# ruff: noqa: I001

import argparse

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from jointcv.numpyro import SVI


def model(x, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 10))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with numpyro.plate("data", x.shape[0], subsample_size=100) as idx:
        obs = None if y is None else y[idx]
        numpyro.sample("y", dist.Normal(intercept + x[idx] @ slopes, sigma), obs=obs)


def simulate(num_data):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_data, 5))
    y = 2 + x @ np.array([1.0, -2.0, 0.5, 0.0, 3.0]) + 0.7 * rng.normal(size=num_data)
    return jnp.asarray(x), jnp.asarray(y)


def main(num_data, num_steps):
    x, y = simulate(num_data)
    guide = AutoNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(5e-3), Trace_ELBO())
    result = svi.run(random.key(0), num_steps, x, y, progress_bar=False)
    median = guide.median(result.params)
    predictive = Predictive(model, guide=guide, params=result.params, num_samples=100)
    draws = predictive(random.key(1), x)["y"]
    print("loss     ", result.losses[-100:].mean())
    print("slopes   ", median["slopes"])
    print("sigma    ", median["sigma"], "±", result.params["sigma_auto_scale"] * median["sigma"])
    print("predicted", draws.mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-data", type=int, default=100_000)
    parser.add_argument("--num-steps", type=int, default=10_000)
    main(**vars(parser.parse_args()))
