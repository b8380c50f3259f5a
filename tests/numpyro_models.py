"""NumPyro models of many kinds, with small data: a table for the tests."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam

N = 23


class Case(NamedTuple):
    """A model, what is passed to `from_numpyro`, and what one row of its data is worth.

    `reference` replaces keyword arguments so that NumPyro's own potential energy is that of all data.
    """

    model: Callable
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    options: dict[str, Any] = {}
    reference: dict[str, Any] = {}
    row_entries: int = 0

    @property
    def reference_arguments(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments for NumPyro's own functions, which cannot index NumPy arrays under jit."""
        args = tuple(jnp.asarray(arg) if isinstance(arg, np.ndarray) else arg for arg in self.args)
        return args, self.kwargs | self.reference


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def features(columns: int, seed: int = 0):
    return jnp.asarray(random(seed).normal(size=(N, columns)))


def groups(count: int, seed: int):
    return jnp.asarray(random(seed).integers(0, count, N))


X, REAL, BINARY, COUNTS = features(3), features(1, 1)[:, 0], groups(2, 2), groups(9, 3)


def logistic(x, y, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def linear(x, y, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", len(y), subsample_size=batch):
        rows, target = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.deterministic("row_mean", rows @ w)
        numpyro.deterministic("row_noise", jnp.broadcast_to(sigma, target.shape))
        numpyro.sample("y", dist.Normal(rows @ w, sigma), obs=target)


def exponential_noise(x, y):
    with numpyro.plate("coefficients", 3):
        w = numpyro.sample("w", dist.Laplace(0, 1))
    sigma = numpyro.sample("sigma", dist.Exponential(2.0))
    precision = numpyro.deterministic("precision", 1 / sigma**2)
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.Normal(x[idx] @ w, precision**-0.5), obs=y[idx])


def poisson(x, y, exposure, batch=None):
    w = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3) + 0.3))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Poisson(exposure[idx] * jnp.exp(x[idx] @ w)), obs=y[idx])


def softmax(x, y, batch=None):
    with numpyro.plate("classes", 4, dim=-1), numpyro.plate("features", 3, dim=-2):
        w = numpyro.sample("w", dist.Normal(0, 1))
    standard = (x - x.mean(0)) / x.std(0)
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Categorical(logits=standard[idx] @ w), obs=y[idx])


def bradley_terry(winner, loser, players, batch=None):
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("players", players):
        skill = numpyro.sample("skill", dist.Normal(0, 1))
    with numpyro.plate("matches", len(winner), subsample_size=batch) as idx:
        margin = scale * (skill[winner[idx]] - skill[loser[idx]])
        numpyro.sample("won", dist.Bernoulli(logits=margin), obs=jnp.ones(margin.shape))


def crossed(row, column, y, sizes, batch=None):
    scales = numpyro.sample("scales", dist.HalfCauchy(1).expand([2]))
    effects = []
    for axis, name in enumerate(("row", "column")):
        with numpyro.plate(f"{name}s", sizes[axis]):
            effects.append(numpyro.sample(name, dist.Normal(0, scales[axis])))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        mean = effects[0][row[idx]] + effects[1][column[idx]]
        numpyro.sample("y", dist.Normal(mean, 0.7), obs=y[idx])


def movielens(x, user, y, users, batch=None):
    factors = x.shape[1]
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([factors, 5]).to_event(2))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1).expand([factors, 5]).to_event(2))
    with numpyro.plate("users", users):
        z = numpyro.sample("z", dist.Normal(mean, scale).to_event(2))
    with numpyro.plate("ratings", len(y), subsample_size=batch) as idx:
        logits = jnp.einsum("nf,nfk->nk", x[idx], z[user[idx]])
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y[idx])


def robust(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    freedom = numpyro.sample("freedom", dist.Gamma(2.0, 0.1))
    sigma = numpyro.sample("sigma", dist.Uniform(0.1, 5.0))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.StudentT(freedom, x[idx] @ w, sigma), obs=y[idx])


def masked(x, y, seen, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx, handlers.mask(mask=seen[idx]):
        numpyro.sample("y", dist.Normal(x[idx] @ w, 1.0), obs=y[idx])


def scaled(x, y, weights, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with handlers.scale(scale=0.3):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx, handlers.scale(scale=weights[idx]):
        numpyro.sample("y", dist.Normal(x[idx] @ w, sigma), obs=y[idx])


def two_sites(x, y, count, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        predictor = x[idx] @ w
        numpyro.sample("y", dist.Normal(predictor[:, 0], 1.0), obs=y[idx])
        numpyro.sample("count", dist.Poisson(jnp.exp(predictor[:, 1])), obs=count[idx])
        numpyro.factor("penalty", -0.1 * jnp.abs(predictor[:, 0] * y[idx]))


def observed_outside(x, y, pilot, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.factor("ridge", -0.5 * jnp.sum(w**2))
    with numpyro.plate("pilots", len(pilot)):
        numpyro.sample("pilot", dist.Normal(w.sum(), 2.0), obs=pilot)
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Normal(x[idx] @ w, 1.0), obs=y[idx])


def reparametrised(group, y, batch=None):
    def model(group, y):
        center = numpyro.sample("center", dist.Normal(0, 3))
        scale = numpyro.sample("scale", dist.HalfNormal(2))
        with numpyro.plate("groups", 5):
            effect = numpyro.sample("effect", dist.Normal(center, scale))
        with numpyro.plate("data", len(y), subsample_size=batch) as idx:
            numpyro.sample("y", dist.Normal(effect[group[idx]], 1.0), obs=y[idx])

    handlers.reparam(model, config={"effect": LocScaleReparam(0)})(group, y)


def improper(x, y):
    w = numpyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), event_shape=(3,)))
    sigma = numpyro.sample("sigma", dist.ImproperUniform(dist.constraints.positive, (), event_shape=()))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.Normal(x[idx] @ w, sigma), obs=y[idx])


def simplex_and_ordered(kind, y, levels, batch=None):
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(4)))
    base = dist.Normal(jnp.zeros(2), 1.0)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
    upper = numpyro.sample("upper", dist.Uniform(share[0], 2.0))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        numpyro.sample("kind", dist.Categorical(probs=share), obs=kind[idx])
        numpyro.sample("level", dist.OrderedLogistic(upper * y[idx], cuts), obs=levels[idx])


def without_plate(X, y, prior_scale):
    w = numpyro.sample("w", dist.Normal(0, prior_scale).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(X @ w, sigma).to_event(1), obs=y)


def unindexed_plate(X, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def multivariate(x, y, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 2]).to_event(2))
    spread = numpyro.sample("spread", dist.HalfNormal(1).expand([2]).to_event(1))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 1.5))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        noise = dist.MultivariateNormal(x[idx] @ w, scale_tril=spread[:, None] * correlation)
        numpyro.sample("y", noise, obs=y[idx])


def negative_binomial(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 1.0))
    with numpyro.plate("data", len(y)) as idx:
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(x[idx] @ w), concentration), obs=y[idx])


def repeated_measures(x, y, batch=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("times", y.shape[0], dim=-2):
        level = numpyro.sample("level", dist.Normal(0, 1).expand([y.shape[0], 1]))
        with numpyro.plate("data", y.shape[1], subsample_size=batch, dim=-1):
            rows = numpyro.subsample(x, event_dim=0)
            numpyro.sample("y", dist.Normal(level + slope * rows, 1.0), obs=numpyro.subsample(y, event_dim=0))


def mixture(y, batch=None):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    means = numpyro.sample("means", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("data", len(y), subsample_size=batch) as idx:
        components = dist.MixtureSameFamily(dist.Categorical(probs=weights), dist.Normal(means, 1.0))
        numpyro.sample("y", components, obs=y[idx])


PARTIAL = {"kwargs": {"batch": 5}, "reference": {"batch": None}}
ROWS = {"X": X, "y": REAL}

CASES = {
    "logistic": Case(logistic, (X, BINARY), row_entries=4, **PARTIAL),
    "logistic, whole plate": Case(logistic, (X, BINARY), row_entries=4),
    "logistic, NumPy arrays": Case(logistic, (np.asarray(X), np.asarray(BINARY)), row_entries=4),
    "linear, numpyro.subsample": Case(linear, (X, REAL), row_entries=4, **PARTIAL),
    "linear, whole plate, subsample": Case(linear, (X, REAL), row_entries=4),
    "linear, exponential noise": Case(exponential_noise, (X, REAL), row_entries=4),
    "Poisson": Case(poisson, (X, COUNTS, jnp.abs(REAL)), row_entries=5, **PARTIAL),
    "softmax": Case(softmax, (X, groups(4, 5)), row_entries=4, **PARTIAL),
    "Bradley-Terry": Case(
        bradley_terry, (groups(7, 6), (groups(7, 6) + 1 + groups(6, 7)) % 7, 7), row_entries=2, **PARTIAL
    ),
    "crossed": Case(crossed, (groups(4, 8), groups(6, 9), REAL, (4, 6)), row_entries=3, **PARTIAL),
    "MovieLens": Case(
        movielens, (features(18, 4), groups(6, 10), groups(5, 11), 6), row_entries=20, **PARTIAL
    ),
    "robust": Case(robust, (X, REAL), row_entries=4),
    "masked": Case(masked, (X, REAL, BINARY == 1), row_entries=5, **PARTIAL),
    "scaled": Case(scaled, (X, REAL, 0.5 + jnp.abs(REAL)), row_entries=5, **PARTIAL),
    "two sites and a factor": Case(two_sites, (X, REAL, COUNTS), row_entries=5, **PARTIAL),
    "observed outside": Case(
        observed_outside, (X, REAL, REAL[:4]), {"batch": 5}, {"data_plate": "data"}, {"batch": None}, 4
    ),
    "reparam": Case(reparametrised, (groups(5, 12), REAL), row_entries=2, **PARTIAL),
    "improper": Case(improper, (X, REAL), row_entries=4),
    "simplex and ordered": Case(
        simplex_and_ordered, (groups(4, 13), REAL, groups(3, 14)), row_entries=3, **PARTIAL
    ),
    "rows without a plate": Case(without_plate, (), {"prior_scale": 2.0}, {"data": ROWS}, ROWS, 4),
    "rows, unindexed plate": Case(
        unindexed_plate, (), {}, {"data": {"X": X, "y": BINARY}}, {"X": X, "y": BINARY}, 4
    ),
    "multivariate": Case(multivariate, (X, features(2, 15)), row_entries=5, **PARTIAL),
    "negative binomial": Case(negative_binomial, (X, COUNTS), row_entries=4),
    "repeated measures": Case(repeated_measures, (REAL, features(3, 16).T), row_entries=4, **PARTIAL),
    "mixture": Case(mixture, (REAL,), row_entries=1, **PARTIAL),
    "handlers around": Case(handlers.scale(logistic, scale=0.25), (X, BINARY), row_entries=4, **PARTIAL),
}
