"""Natural steps on random generalised linear models: does any diverge, and how many are at the optimum in 50 epochs?

    python benchmarks/glms.py [--json PATH] [--models 20] [--epochs 50]

N from 1e3 to 1e5, D from 5 to 300, columns scaled over four decades, two of them nearly collinear in every third
model; Bernoulli, Poisson, Gaussian and softmax. ELBOs are of the full data, in float64, exact but for softmax, whose
differences are of common draws. The optimum is where a run five times as long ends, or L-BFGS on the full data from
there, whichever is better; "short" is how far below it 50 epochs end. "Fall" is the largest fall of the ELBO in an
epoch beyond three standard errors, of the parameters that `fit` would hand out then. A run whose ELBO is not finite
is infinitely short.
"""

import itertools
import math
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

import jointcv as jcv
from common import machine, options, write
from jointcv.loop import Chunk, result, run_chunk, start
from judge import double, exact_objective, in_double
from methods import for_scipy

KINDS = ("bernoulli", "poisson", "gaussian", "softmax")
CLASSES = 4
DRAWS = 64


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


def best_params(objective: jcv.Elbo, params: jcv.MeanFieldParams, num_draws: int) -> jcv.MeanFieldParams:
    """Where L-BFGS on the full data gets from here, in coordinates whose unit is σ."""

    def unravel(flat):
        step = flat.reshape(2, -1)
        return jcv.MeanFieldParams(params.location + params.scale * step[0], params.log_scale + step[1])

    evaluate = for_scipy(objective, unravel, jnp.float64, num_draws)
    start = np.zeros(2 * params.location.size)
    limits = {"maxiter": 1000, "maxfun": 1000, "ftol": 1e-15, "gtol": 1e-9}
    ended = scipy.optimize.minimize(evaluate, start, jac=True, method="L-BFGS-B", options=limits)
    return unravel(jnp.asarray(ended.x))


def measure(seed: int, num_epochs: int) -> dict:
    """Natural steps on a model, epoch by epoch, and how far the end is from the optimum."""
    name, problem = make(seed)
    key, began = jax.random.key(seed), time.perf_counter()
    fit = jcv.fit(problem, key=key, num_epochs=num_epochs)
    seconds = time.perf_counter() - began
    curve = along(fit.algorithm, key, num_epochs)
    longer = fit.extend(num_epochs=4 * num_epochs)
    with jax.enable_x64(True):
        objective = exact_objective(double(problem))
        num_draws = 1 if isinstance(objective.noise, jcv.Quadrature) else DRAWS
        elbo = eqx.filter_jit(jcv.FullElbo(objective, num_draws))
        values = np.stack([elbo(in_double(params)) for params in curve])
        others = [in_double(longer.params)]
        others.append(best_params(objective, others[0], num_draws))
        # The draws are not those that L-BFGS has seen: its own would flatter it.
        short = max(paired(np.asarray(elbo(params)), values[-1]) for params in others)
    falls = [paired(before, after) for before, after in itertools.pairwise(values)]
    return {
        "model": name,
        "status": fit.status,
        "elbo": float(values[-1].mean()),
        "short": max(0.0, short[0]),
        "short_error": short[1],
        "fall": max(0.0, *(fall - 3 * error for fall, error in falls)),
        "halvings": int(fit.history["halvings"][-1]),
        "batch": fit.algorithm.sampler.batch_size,
        "seconds": seconds,
    }


def along(algorithm: jcv.AbstractAlgorithm, key, num_epochs: int) -> list[jcv.MeanFieldParams]:
    """What a run hands out if it ends at the start, and after every epoch."""
    steps = algorithm.sampler.steps_per_epoch(algorithm.objective.num_data)
    run = start(algorithm, key)
    found = [jax.tree.map(np.array, algorithm.params(run.state))]  # a copy: the chunk takes the run's arrays
    for epoch in range(num_epochs):
        run, _, _ = run_chunk(algorithm, run, Chunk(epoch * steps, steps, 1), None)
        found.append(result(algorithm, run))
    return found


def paired(better: np.ndarray, worse: np.ndarray) -> tuple[float, float]:
    """The mean difference over common draws, and its standard error (0 for an exact ELBO)."""
    if not np.isfinite(worse).all():
        return math.inf, 0.0
    change = better - worse
    return float(change.mean()), float(change.std(ddof=1) / change.size**0.5) if change.size > 1 else 0.0


def main() -> None:
    chosen = options(__doc__, models=20, epochs=50, first=0)
    rows = []
    for seed in range(chosen.first, chosen.first + chosen.models):
        row = measure(seed, chosen.epochs)
        rows.append(row)
        print(
            f"{row['model']:<34} {row['status']:<10} elbo {row['elbo']:>14.3f}  "
            f"short by {row['short']:>10.4f} ± {row['short_error']:<8.1g} largest fall {row['fall']:>9.3g}  "
            f"taken back {row['halvings']:>2}  batch {row['batch']:>4}  {row['seconds']:>5.1f} s",
            flush=True,
        )
        jax.clear_caches()
    near = float(np.mean([row["short"] < 1e-3 for row in rows]))
    lost = sum(row["short"] == math.inf or row["status"] != "completed" for row in rows)
    fell = sum(row["fall"] > 0 for row in rows)
    print(
        f"\nwithin 1e-3 of the optimum after {chosen.epochs} epochs: {near:.0%}; without a finite ELBO: {lost}; "
        f"whose ELBO fell in some epoch: {fell}, at most by {max(row['fall'] for row in rows):.2g}"
    )
    write(chosen.json, {"machine": machine(), "models": rows, "within_1e-3": near, "lost": lost})


if __name__ == "__main__":
    main()
