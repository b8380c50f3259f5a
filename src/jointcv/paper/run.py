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
from jointcv.paper.files import TABLE1, VARIANCE, add_rows, read_rows
from jointcv.paper.sweep import Prepared, best_value, params_file, prepare, run_sweeps, run_timings
from jointcv.paper.tasks import TASKS
from jointcv.paper.variance import estimator_variance, naive_parts

TASK_NAMES = (*TASKS, "dropout")
TIMED_TOO = ("inc",)  # too slow to run on large tasks, but a step can be timed
LARGE_MEMORY = 10_000_000  # entries of inc's table that are not worth timing
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
        stages: which; the task's by default.

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
    names = estimators or task.estimators
    for stage in stages or task.stages:
        began = time.perf_counter()
        STAGES[stage](prepared, names)
        print(f"{name} {stage}: {time.perf_counter() - began:.1f} s", flush=True)


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
            began = time.perf_counter()
            add_rows(path, VARIANCE, _trace(prepared, name))
            prepared.note.add("variance", name, began, [best_value(prepared, name)], [SEED])


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
    began = time.perf_counter()
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
        "end_point": f"{name}, step size {value:g}, {budget.epochs} epochs, seed {SEED}",
        "draws": budget.table_draws,
    }
    add_rows(path, TABLE1, [row])
    prepared.note.add("table1", name, began, [value], [SEED])


def _end_point(prepared: Prepared, name: str, value: float) -> jcv.MeanFieldParams:
    path = params_file(prepared, name, value, SEED)
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
