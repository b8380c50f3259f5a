"""Natural steps on random generalised linear models: does any diverge, and how many are at the optimum in 50 epochs?

    python benchmarks/glms.py [--json PATH] [--models 20] [--epochs 50]

N from 1e3 to 1e5, D from 5 to 300, columns scaled over four decades, two of them nearly collinear in every third
model; Bernoulli, Poisson, Gaussian and softmax. The optimum is the best of this run and one five times as long.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import jointcv as jcv
from common import machine, options, write

KINDS = ("bernoulli", "poisson", "gaussian", "softmax")
CLASSES = 4


def make(seed: int) -> tuple[str, jcv.Problem]:
    """A random model, with data drawn from it."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    num_data = int(10 ** rng.uniform(3, 5))
    dim = int(10 ** rng.uniform(np.log10(5), np.log10(300)))
    dim = min(dim, 3_000_000 // num_data)
    x = rng.standard_normal((num_data, dim))
    if seed % 3 == 0:
        x[:, 1] = x[:, 0] + 0.05 * rng.standard_normal(num_data)
    scales = 10 ** rng.uniform(-2, 2, dim)
    truth = rng.standard_normal((dim, CLASSES)) / np.sqrt(dim)
    eta = x @ truth
    if kind == "bernoulli":
        y = rng.random(num_data) < 1 / (1 + np.exp(-eta[:, 0]))
    elif kind == "poisson":
        y = rng.poisson(np.exp(eta[:, 0]))
    elif kind == "gaussian":
        y = eta[:, 0] + 0.5 * rng.standard_normal(num_data)
    else:
        y = np.argmax(eta + rng.gumbel(size=eta.shape), axis=1)
    x = (x * scales).astype(np.float32)
    spread = jnp.asarray(1 / scales, jnp.float32)  # the prior knows the units

    def log_likelihood(z, datum):
        if kind == "softmax":
            return jax.nn.log_softmax(datum["x"] @ z)[datum["y"]]
        eta = datum["x"] @ z
        if kind == "bernoulli":
            return datum["y"] * eta - jax.nn.softplus(eta)
        if kind == "poisson":
            return datum["y"] * eta - jnp.exp(eta)
        return -0.5 * ((datum["y"] - eta) / 0.5) ** 2

    def log_prior(z):
        return -0.5 * jnp.sum((z.T / spread) ** 2)

    shape = (dim, CLASSES) if kind == "softmax" else (dim,)
    y = y.astype(np.int32 if kind == "softmax" else np.float32)
    problem = jcv.Problem(
        log_prior=log_prior, log_likelihood=log_likelihood, data={"x": x, "y": y}, example=jnp.zeros(shape)
    )
    return f"{kind} {num_data} x {dim}{' collinear' if seed % 3 == 0 else ''}", problem


def main() -> None:
    chosen = options(__doc__, models=20, epochs=50, first=0)
    rows = []
    for seed in range(chosen.first, chosen.first + chosen.models):
        name, problem = make(seed)
        began = time.perf_counter()
        fit = jcv.fit(problem, key=jax.random.key(seed), num_epochs=chosen.epochs)
        seconds = time.perf_counter() - began
        at_end = fit.elbo(jax.random.key(1), num_draws=16)
        best = fit.extend(num_epochs=4 * chosen.epochs).elbo(jax.random.key(1), num_draws=16)
        short = max(best.value, at_end.value) - at_end.value
        curve = fit.history["epoch_elbo"][:: fit.algorithm.sampler.steps_per_epoch(problem.num_data)]
        falls = np.diff(curve[1:])
        rows.append(
            {
                "model": name,
                "status": fit.status,
                "elbo": at_end.value,
                "short": short,
                "fall": float(-min(falls.min(), 0)),
                "halvings": int(fit.history["halvings"][-1]),
                "batch": fit.algorithm.sampler.batch_size,
                "seconds": seconds,
            }
        )
        row = rows[-1]
        print(
            f"{name:<34} {row['status']:<10} elbo {row['elbo']:>14.3f}  short by {short:>10.4f}  largest fall "
            f"{row['fall']:>9.3g}  taken back {row['halvings']:>2}  batch {row['batch']:>4}  {seconds:>5.1f} s",
            flush=True,
        )
    near = np.mean([row["short"] < 1e-3 for row in rows])
    print(f"\nwithin 1e-3 of the optimum after {chosen.epochs} epochs: {near:.0%}")
    write(chosen.json, {"machine": machine(), "models": rows, "within_1e-3": float(near)})


if __name__ == "__main__":
    main()
