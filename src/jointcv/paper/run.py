"""Run a task of the paper: its stages in order, each resumable, results in a folder of small files."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jointcv as jcv
from jointcv.paper.estimators import ESTIMATORS
from jointcv.paper.files import TABLE1, VARIANCE, add_rows, read_rows, surroundings, write_note
from jointcv.paper.sweep import Prepared, best_value, params_file, prepare, run_sweeps, run_timings
from jointcv.paper.tasks import TASKS
from jointcv.paper.variance import estimator_variance, naive_parts

TASK_NAMES = (*TASKS, "dropout")
TIMED_TOO = ("inc",)  # too slow to run on large tasks, but a step can be timed
LARGE_MEMORY = 100_000_000  # entries of inc's table that are not worth timing
MANY_PLACES, FEW_PLACES = 10, 4
SEED = 0


def run_task(
    name: str,
    budget: str,
    folder: Path,
    *,
    estimators: tuple[str, ...] | None = None,
    stages: tuple[str, ...] | None = None,
) -> None:
    """Run what is missing of a task.

    Args:
        name: one of `TASK_NAMES`.
        budget: smoke, short or paper.
        folder: of the results.
        estimators: which; the task's by default.
        stages: which; all by default.

    Raises:
        ValueError: for a name that is not known.
    """
    known = {"task": (name, TASK_NAMES)} | {f"estimator {e}": (e, ESTIMATORS) for e in estimators or ()}
    known |= {f"stage {stage}": (stage, STAGES) for stage in stages or ()}
    for what, (given, names) in known.items():
        if given not in names:
            raise ValueError(f"{what}: {given!r} is not one of {', '.join(names)}.")
    if name == "dropout":
        from jointcv.paper.dropout import run_dropout

        run_dropout(budget, folder, estimators)
        return
    task = TASKS[name]
    prepared = prepare(task, budget, folder)
    names = tuple(e for e in estimators or task.estimators if e not in prepared.budget.skip)
    for stage in stages or tuple(STAGES):
        began = time.perf_counter()
        STAGES[stage](prepared, names)
        seconds = {stage: time.perf_counter() - began}
        write_note(folder / f"{name}.json", **_description(prepared, names), seconds=seconds)
        print(f"{name} {stage}: {seconds[stage]:.1f} s", flush=True)


def _description(prepared: Prepared, names: tuple[str, ...]) -> dict:
    task, problem = prepared.task, prepared.setting.problem
    return surroundings() | {
        "task": task.name,
        "budget": prepared.budget_name,
        "configuration": dataclasses.asdict(prepared.budget),
        "num_data": problem.num_data,
        "dim": problem.dim,
        "batch": prepared.setting.batch,
        "natural_batch": prepared.setting.natural_batch,
        "optimizer": task.optimizer.__name__,
        "step_sizes": {name: prepared.values(name) for name in names},
        "seeds": list(range(prepared.budget.num_seeds)),
        "dtype": str(problem.dtype),
        "notes": [*task.notes, *COMMON_NOTES],
    }


COMMON_NOTES = (
    "elbo is that of the full data, with exact expectations (quadrature) for one predictor a datum, noise in "
    "the predictors for more, and the prior in closed form; PPCA draws z. Draws are common to all runs",
    "runs of one seed share minibatches and noise across step sizes",
    "an epoch of a full-batch estimator is one step; the natural gradient's step size stands as 0",
    "milliseconds are processor time of a run alone, not vmapped, on one core: the median of three "
    "repetitions and their range. Processor time, because the machine is shared",
    "variance rows: trace_location and trace_scale are the estimator's at its own place after so many steps, "
    "at its best step size; v_total, v_data and v_noise are V_{n,eps}, V_n and V_eps of the naive gradient "
    "of the location there; small differences of V_n between rows are sampling noise",
    "inc and ens run on small tasks only: each step is a pass over all data",
    "oracle calls: gradients and Hessian products a step over data; f~ counts once",
)


def _timings(prepared: Prepared, names: tuple[str, ...]) -> None:
    form = prepared.task.form
    size = prepared.setting.problem.num_data * prepared.setting.problem.dim
    more = [name for name in TIMED_TOO if name not in names]
    linear = isinstance(form.view(prepared.setting), jcv.LinearView)
    run_timings(prepared, (*names, *(more if linear or size < LARGE_MEMORY else ())))


def _traces(prepared: Prepared, names: tuple[str, ...]) -> None:
    """Variances along a run of every estimator with a control."""
    path = prepared.file(".variance")
    done = {row["estimator"] for row in read_rows(path)}
    for name in names:
        if name not in done and not isinstance(ESTIMATORS[name].dial, jcv.SurrogateRate):
            add_rows(path, VARIANCE, _trace(prepared, name))


def _trace(prepared: Prepared, name: str) -> list[dict]:
    """In the middle of epochs, where an anchor is neither fresh nor at its oldest."""
    budget, setting = prepared.budget, prepared.setting
    algorithm = ESTIMATORS[name].build(setting)
    steps = algorithm.sampler.steps_per_epoch(setting.problem.num_data)
    epochs = budget.full_steps if ESTIMATORS[name].full_batch else budget.trace_epochs
    every = max(1, epochs // (FEW_PLACES if ESTIMATORS[name].full_batch else MANY_PLACES))
    naive = _naive_fit(prepared)
    fit, rows = (
        jcv.fit(
            _at_rate(algorithm, best_value(prepared, name)),
            key=jax.random.key(SEED),
            num_steps=max(1, steps // 2),
        ),
        [],
    )
    while True:
        step = int(fit.run.step)
        key = jax.random.fold_in(jax.random.key(1), step)
        location, scale = estimator_variance(fit, key, budget.trace_draws)
        parts = naive_parts(naive, fit.params, key, budget.trace_draws, max(2, budget.full_draws // 4))
        rows.append(
            {
                "task": prepared.task.name,
                "estimator": name,
                "step": step,
                "epoch": step / steps,
                "trace_location": location,
                "trace_scale": scale,
                "v_total": parts.total,
                "v_data": parts.data,
                "v_noise": parts.noise,
            }
        )
        if step / steps + every > epochs or fit.diverged:
            return rows
        fit = fit.extend(num_epochs=every)


def _naive_fit(prepared: Prepared) -> jcv.Fit:
    return jcv.fit(ESTIMATORS["naive"].build(prepared.setting), key=jax.random.key(SEED), num_steps=1)


def _at_rate(algorithm: jcv.AbstractAlgorithm, value: float) -> jcv.AbstractAlgorithm:
    """The algorithm with this rate in the first state of its optimiser; as it is where it has none."""
    if not isinstance(algorithm, jcv.GradientDescent):
        return algorithm
    optimizer = algorithm.optimizer

    def init(params):
        state: Any = optimizer.init(params)
        rate = state.hyperparams["learning_rate"]
        return state._replace(
            hyperparams=state.hyperparams | {"learning_rate": jnp.asarray(value, rate.dtype)}
        )

    return dataclasses.replace(algorithm, optimizer=optimizer._replace(init=init))


def _table1(prepared: Prepared, names: tuple[str, ...]) -> None:
    """The parts of the naive gradient's variance where joint ended."""
    path = prepared.file(".table1")
    if path.exists():
        return
    budget, setting = prepared.budget, prepared.setting
    name = "joint" if "joint" in names else names[0]
    value = best_value(prepared, name)
    params = _end_point(prepared, name, value)
    parts = naive_parts(
        _naive_fit(prepared), params, jax.random.key(2), budget.table_draws, budget.full_draws
    )
    row = {
        "task": prepared.task.name,
        "batch": setting.batch,
        "v_total": parts.total,
        "v_data": parts.data,
        "v_noise": parts.noise,
        "end_point": f"{name}, step size {value:g}, {budget.epochs} epochs, seed 0",
        "draws": budget.table_draws,
    }
    add_rows(path, TABLE1, [row])


def _end_point(prepared: Prepared, name: str, value: float) -> jcv.MeanFieldParams:
    path = params_file(prepared, name, value, 0)
    if not path.exists():
        algorithm = _at_rate(ESTIMATORS[name].build(prepared.setting), value)
        return jcv.fit(algorithm, key=jax.random.key(SEED), num_epochs=prepared.budget.epochs).params
    with np.load(path) as arrays:
        location, log_scale = (jnp.asarray(arrays[key][-1]) for key in ("location", "log_scale"))
    return jcv.MeanFieldParams(location, log_scale)


def _nuts(prepared: Prepared, names: tuple[str, ...]) -> None:
    if prepared.budget.nuts_draws:
        from jointcv.paper.nuts import compare

        compare(prepared, names)


STAGES = {"sweep": run_sweeps, "timing": _timings, "table1": _table1, "variance": _traces, "nuts": _nuts}
