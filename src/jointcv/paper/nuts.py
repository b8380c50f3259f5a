"""How far the fits of a small task are from the posterior by NUTS, along their runs.

    mean error  ‖μ − E z‖,   variance error  ‖σ² − V z‖    (Euclidean norms)

The reference optimum is the mean field that descends the exact full-data ELBO (quadrature, no noise at all);
what is left of its error is that of the family.
"""

import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS

import jointcv as jcv
from jointcv.paper.files import NUTS as NUTS_COLUMNS
from jointcv.paper.files import add_rows, read_rows, surroundings, write_note
from jointcv.paper.sweep import Prepared, params_file

NUM_CHAINS = 4
REFERENCE_STEPS = 5000


def compare(prepared: Prepared, names: tuple[str, ...]) -> None:
    """Write the errors of every run that the sweep kept, and what NUTS and the reference say."""
    path, note = prepared.file(".nuts"), prepared.folder / f"{prepared.task.name}.nuts.json"
    if path.exists():
        return
    began = time.perf_counter()
    draws, divergences, warmup = _draw(prepared)
    sampled = time.perf_counter() - began
    flat = draws.reshape(-1, draws.shape[-1]).astype(np.float64)
    mean, variance = flat.mean(0), flat.var(0, ddof=1)
    fit = _reference(prepared)
    errors = _errors(np.asarray(fit.params.location), np.asarray(fit.params.log_scale), mean, variance)
    elbo = fit.elbo(jax.random.key(0), num_draws=2).value
    write_note(
        note,
        **surroundings(),
        rhat=float(np.max(split_gelman_rubin(draws))),
        rhat_by_coordinate=np.asarray(split_gelman_rubin(draws)).round(5).tolist(),
        effective_sample_size=float(np.min(effective_sample_size(draws))),
        chains=NUM_CHAINS,
        warmup=warmup,
        draws=draws.shape[1],
        divergences=divergences,
        reference={"mean_error": errors[0], "variance_error": errors[1], "elbo": elbo},
        notes=[
            "mean_error is the Euclidean norm of the difference of means, variance_error that of variances",
            "rows are means over the seeds of the sweep",
            f"reference: exact full-data ELBO (quadrature), Adam 0.05, cosine decay, {REFERENCE_STEPS} steps",
        ],
        seconds={"nuts": sampled},
    )
    add_rows(path, NUTS_COLUMNS, _rows(prepared, names, mean, variance))


def _draw(prepared: Prepared) -> tuple[np.ndarray, int, int]:
    problem = prepared.setting.problem
    num_draws = prepared.budget.nuts_draws
    warmup = num_draws // 5

    def model(x, y):
        z = numpyro.sample("z", dist.Normal().expand([problem.dim]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ z), obs=y)

    sampler = MCMC(
        NUTS(model),
        num_warmup=warmup,
        num_samples=num_draws,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(jax.random.key(0), problem.data["x"], problem.data["y"], extra_fields=("diverging",))
    draws = np.asarray(sampler.get_samples(group_by_chain=True)["z"])
    return draws, int(np.sum(sampler.get_extra_fields()["diverging"])), warmup


def _reference(prepared: Prepared) -> jcv.Fit:
    setting = prepared.setting
    objective, control, sampler = jcv.assemble(
        setting.problem,
        control=jcv.NaiveGradient(),
        sampler=jcv.FullBatch(),
        view=setting.view,
        noise=jcv.Quadrature(),
    )
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, REFERENCE_STEPS))
    algorithm = jcv.GradientDescent(
        objective=objective, control=control, sampler=sampler, optimizer=optimizer
    )
    return jcv.fit(algorithm, key=jax.random.key(0), num_steps=REFERENCE_STEPS)


def _errors(location, log_scale, mean, variance) -> tuple[float, float]:
    return (
        float(np.linalg.norm(location.astype(np.float64) - mean)),
        float(np.linalg.norm(np.exp(2 * log_scale.astype(np.float64)) - variance)),
    )


def _rows(prepared: Prepared, names: tuple[str, ...], mean, variance) -> list[dict]:
    elbos: dict[tuple, list[float]] = {}
    for row in read_rows(prepared.file()):
        place = row["estimator"], float(row["step_size"]), int(row["step"])
        elbos.setdefault(place, []).append(float(row["elbo"]))
    rows = []
    for name in names:
        for value in prepared.values(name):
            for step, errors in _along(prepared, name, value, mean, variance).items():
                if (name, value, step) not in elbos:
                    continue
                first, second = np.mean(errors, axis=0)
                rows.append(
                    {
                        "task": prepared.task.name,
                        "estimator": name,
                        "step_size": value,
                        "step": step,
                        "mean_error": float(first),
                        "variance_error": float(second),
                        "elbo": float(np.mean(elbos[name, value, step])),
                    }
                )
    return rows


def _along(prepared: Prepared, name: str, value: float, mean, variance) -> dict[int, list]:
    """Errors by step, one entry a seed."""
    errors: dict[int, list] = {}
    for seed in range(prepared.budget.num_seeds):
        path = params_file(prepared, name, value, seed)
        if not path.exists():
            continue
        with np.load(path) as arrays:
            for step, location, log_scale in zip(
                arrays["step"], arrays["location"], arrays["log_scale"], strict=True
            ):
                errors.setdefault(int(step), []).append(_errors(location, log_scale, mean, variance))
    return errors
