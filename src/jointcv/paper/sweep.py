"""The sweeps of a task: every estimator, step size and seed, and what a step takes."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

import jointcv as jcv
from jointcv.paper.estimators import ESTIMATORS, Estimator, Setting, evaluation
from jointcv.paper.fetch import cache_folder
from jointcv.paper.files import SWEEP, TIMING, add_rows, read_rows
from jointcv.paper.notes import Record
from jointcv.paper.tasks import Budget, Task

TIMINGS = 3
FEW_STEPS = 5
ALL_EPOCHS, THEN_EVERY = 20, 5  # which epochs are recorded


class ElboAndParams(eqx.Module):
    """What a sweep records: the ELBO's draws and the parameters."""

    elbo: jcv.FullElbo

    def __call__(self, params) -> tuple[Array, jcv.MeanFieldParams]:
        return self.elbo(params), params


@dataclass(frozen=True)
class Prepared:
    """A task with its data loaded and its model read, for a budget."""

    task: Task
    budget: Budget
    budget_name: str
    setting: Setting
    evaluation: jcv.Elbo
    folder: Path

    def file(self, kind: str = "") -> Path:
        return self.folder / f"{self.task.name}{kind}.csv"

    @property
    def note(self) -> Record:
        return Record(
            self.file().with_suffix(".json"), self.task, self.budget_name, self.budget, self.setting
        )

    def values(self, name: str) -> tuple[float, ...]:
        """The step sizes of an estimator; 0 stands for the natural gradient's own."""
        dial = ESTIMATORS[name].dial
        grids = {
            jcv.LearningRate: self.task.grid,
            jcv.SurrogateRate: self.task.smiso_grid,
            jcv.NoDial: (0.0,),
        }
        return grids[type(dial)][: self.budget.num_values]

    def length(self, estimator: Estimator) -> tuple[int, int]:
        """Epochs of a run, and between its records."""
        if not estimator.full_batch:
            return self.budget.epochs, 1
        every = max(1, self.budget.full_steps // self.budget.full_records)
        return self.budget.full_steps // every * every, every


def prepare(task: Task, budget_name: str, folder: Path) -> Prepared:
    """Load a task's data and read its model."""
    budget = task.budgets[budget_name]
    problem = task.load(budget.num_rows)
    view = jcv.find_view(problem).view
    batches = min(task.batch, problem.num_data), min(task.natural_batch, problem.num_data)
    setting = Setting(problem, view, task.form, batches[0], task.optimizer, batches[1], task.naive_epochs)
    return Prepared(task, budget, budget_name, setting, evaluation(problem, view), folder)


def run_sweeps(prepared: Prepared, names: tuple[str, ...]) -> None:
    """Every cell that is not yet in the task's file; a finished one is never run again."""
    done = {
        (row["estimator"], float(row["step_size"]), int(row["seed"])) for row in read_rows(prepared.file())
    }
    budget = prepared.budget
    algorithms = {name: ESTIMATORS[name].build(prepared.setting) for name in names}
    for seeds in _groups(range(budget.num_seeds), budget.seeds_at_once):
        for name, algorithm in algorithms.items():
            values = prepared.values(name)
            missing = [v for v in values if any((name, v, seed) not in done for seed in seeds)]
            for some in _groups(missing, budget.values_at_once or len(values)):
                _run_cells(prepared, name, algorithm, some, seeds, done)


def _run_cells(prepared: Prepared, name: str, algorithm: jcv.AbstractAlgorithm, values, seeds, done) -> None:
    began = time.perf_counter()
    estimator, budget = ESTIMATORS[name], prepared.budget
    draws = (1, 1) if _is_exact(prepared.evaluation) else (budget.draws, budget.final_draws)
    records = [ElboAndParams(jcv.FullElbo(prepared.evaluation, count)) for count in draws]
    epochs, every = prepared.length(estimator)
    checkpoints = jcv.sweep(
        algorithm,
        estimator.dial,
        values,
        jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32)),
        num_epochs=epochs,
        at=_worth_recording(epochs, every),
        record=records[0],
        final_record=records[1],
        progress=f"{prepared.task.name} {name}",
    )
    rows = []
    for s, seed in enumerate(seeds):
        for v, value in enumerate(values):
            if (name, value, seed) in done:
                continue
            done.add((name, value, seed))
            for checkpoint in checkpoints:
                elbos = checkpoint.record[0][s, v].astype(np.float64)
                error = elbos.std(ddof=1) / elbos.size**0.5 if elbos.size > 1 else 0.0
                rows.append(
                    {
                        "task": prepared.task.name,
                        "estimator": name,
                        "step_size": value,
                        "seed": seed,
                        "epoch": checkpoint.epoch,
                        "step": checkpoint.step,
                        "elbo": float(elbos.mean()),
                        "elbo_se": float(error),
                        "status": "completed" if checkpoint.alive[s, v] else "diverged",
                    }
                )
    add_rows(prepared.file(), SWEEP, rows)
    _keep_params(prepared, name, values, seeds, checkpoints)
    prepared.note.add("sweep", name, began, values, seeds)
    print(f"{prepared.task.name} {name} seeds {list(seeds)}: {time.perf_counter() - began:.1f} s", flush=True)


def _worth_recording(epochs: int, every: int) -> list[int]:
    """Of every so many epochs all of the first, then every fifth: evaluations take long, and files stay small."""
    return [
        epoch for epoch in range(every, epochs + 1, every) if epoch <= ALL_EPOCHS or epoch % THEN_EVERY == 0
    ]


def params_file(prepared: Prepared, name: str, value: float, seed: int) -> Path:
    """Where the parameters of a run are kept: at all checkpoints of small tasks, at the end of large ones."""
    folder = cache_folder() / "sweeps" / f"{prepared.task.name}-{prepared.budget_name}"
    return folder / f"{name}-{value:g}-{seed}.npz"


def _keep_params(prepared: Prepared, name, values, seeds, checkpoints) -> None:
    kept = checkpoints if prepared.setting.problem.dim < 100 else checkpoints[-1:]
    for s, seed in enumerate(seeds):
        for v, value in enumerate(values):
            path = params_file(prepared, name, value, seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(
                path,
                step=[checkpoint.step for checkpoint in kept],
                location=[checkpoint.record[1].location[s, v] for checkpoint in kept],
                log_scale=[checkpoint.record[1].log_scale[s, v] for checkpoint in kept],
            )


def run_timings(prepared: Prepared, names: tuple[str, ...]) -> None:
    """Milliseconds a step of every estimator alone, compiled and not vmapped."""
    done = {row["estimator"] for row in read_rows(prepared.file(".timing"))}
    for name in names:
        if name in done:
            continue
        began = time.perf_counter()
        add_rows(prepared.file(".timing"), TIMING, [_time(prepared, name)])
        prepared.note.add("timing", name, began, [], [0])


def _time(prepared: Prepared, name: str) -> dict:
    estimator, setting = ESTIMATORS[name], prepared.setting
    algorithm = estimator.build(setting)
    num_data, batch = setting.problem.num_data, algorithm.sampler.batch_size
    calls = estimator.calls(num_data, batch)
    if name == "joint-svrg":  # the full pass once an epoch
        calls += num_data / algorithm.sampler.steps_per_epoch(num_data)
    slow = calls > num_data and num_data > 10_000
    epoch_steps = algorithm.sampler.steps_per_epoch(num_data) * prepared.budget.timing_epochs
    steps = FEW_STEPS if slow or estimator.full_batch else epoch_steps
    options: dict[str, Any] = {"num_steps": steps, "chunk_size": steps}
    began = time.process_time()
    fit = jcv.fit(algorithm, key=jax.random.key(0), **options)
    first, taken = time.process_time() - began, []
    for _ in range(TIMINGS):
        began = time.process_time()
        fit = fit.extend(**options)
        taken.append((time.process_time() - began) / steps * 1e3)
    median = float(np.median(taken))
    return {
        "task": prepared.task.name,
        "estimator": name,
        "ms_per_step": median,
        "spread": float(max(taken) - min(taken)),
        "oracle_calls_per_step": float(calls),
        "compile_seconds": max(0.0, first - median * steps / 1e3),
    }


def best_value(prepared: Prepared, name: str) -> float:
    """The step size with the best final ELBO, in the mean over seeds, among runs that completed."""
    finals: dict[float, dict[int, tuple[int, float]]] = {}
    for row in read_rows(prepared.file()):
        if row["estimator"] == name:
            elbo = float(row["elbo"]) if row["status"] == "completed" else -np.inf
            finals.setdefault(float(row["step_size"]), {})[int(row["seed"])] = (int(row["step"]), elbo)
    if not finals:
        return prepared.values(name)[-1]
    scores = {value: np.mean([elbo for _, elbo in runs.values()]) for value, runs in finals.items()}
    return max(scores, key=lambda value: np.nan_to_num(scores[value], nan=-np.inf))


def _is_exact(objective: jcv.Elbo) -> bool:
    return isinstance(objective.noise, jcv.Quadrature)


def _groups(items, size: int) -> list[list]:
    items = list(items)
    return [items[i : i + size] for i in range(0, len(items), max(1, size))]
