"""What the committed result files say: runs, curves, and how soon a curve reaches a value."""

import csv
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jointcv.paper.reference import ESTIMATORS, TASKS

WORDS = frozenset({"task", "estimator", "status", "end_point", "optimizer"})
Columns = Mapping[str, np.ndarray]


class MissingResults(ValueError):
    """A file of results, or what should be in it, is not there; the message names it."""


@dataclass(frozen=True)
class Curve:
    """ELBO against steps, the best step size chosen anew at each of them.

    Attributes:
        estimator: whose.
        steps: where the ELBO was evaluated.
        epochs: the passes over the data by then.
        mean: over seeds.
        deviation: one standard deviation over seeds.
        step_size: the best at that step.
        seeds: how many.
    """

    estimator: str
    steps: np.ndarray
    epochs: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    step_size: np.ndarray
    seeds: int

    @property
    def best(self) -> float:
        return float(self.mean.max())

    def at(self, step: float) -> tuple[float, float]:
        """Mean and standard error of the mean at the last evaluation up to a step."""
        index = max(int(np.searchsorted(self.steps, step, side="right")) - 1, 0)
        return float(self.mean[index]), float(self.deviation[index] / np.sqrt(self.seeds))

    def time_to(self, target: float) -> tuple[float, float]:
        """Steps and epochs to the first evaluation at or above a target; infinite if there is none."""
        reached = np.flatnonzero(self.mean >= target)
        if not reached.size:
            return np.inf, np.inf
        return float(self.steps[reached[0]]), float(self.epochs[reached[0]])


@dataclass(frozen=True)
class Sweep:
    """All runs of one estimator on one task.

    Attributes:
        estimator: whose.
        step_sizes: the grid; 0 or NaN stands for a step size that a formula gives.
        steps: where the ELBO was evaluated.
        epochs: the passes over the data by then.
        elbo: step sizes × seeds × steps, NaN where a run was not evaluated or had diverged.
        diverged: step sizes; whether a seed diverged.
    """

    estimator: str
    step_sizes: np.ndarray
    steps: np.ndarray
    epochs: np.ndarray
    elbo: np.ndarray
    diverged: np.ndarray

    @property
    def seeds(self) -> int:
        return self.elbo.shape[1]

    def curve(self) -> Curve:
        """The best step size at each step; a step size counts only where every seed of it has a value."""
        mean = self._means()
        best = mean.argmax(axis=0)
        columns = np.arange(len(self.steps))
        known = np.isfinite(mean[best, columns])
        best, columns = best[known], columns[known]
        if not columns.size:
            raise MissingResults(f"every run of {self.estimator} diverged")
        values = self.elbo[best, :, columns]
        return Curve(
            self.estimator,
            self.steps[columns],
            self.epochs[columns],
            mean[best, columns],
            _deviation(values),
            self.step_sizes[best],
            int(np.isfinite(values).sum(axis=1).max()),
        )

    def finals(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation over seeds at the end, by step size; NaN where a seed diverged."""
        mean = self._means()
        means, deviations = np.full((2, len(self.step_sizes)), np.nan)
        for row in np.flatnonzero(~self.diverged):
            known = np.flatnonzero(np.isfinite(mean[row]))
            if known.size:
                means[row] = mean[row, known[-1]]
                deviations[row] = _deviation(self.elbo[row, :, known[-1]])
        return means, deviations

    def _means(self) -> np.ndarray:
        known = np.isfinite(self.elbo)
        expected = known.sum(axis=1).max(axis=1, keepdims=True)
        count = known.sum(axis=1)
        total = np.where(known, self.elbo, 0.0).sum(axis=1)
        complete = (count == expected) & (count > 0)
        return np.where(complete, total / np.maximum(count, 1), -np.inf)


def _deviation(values: np.ndarray) -> np.ndarray:
    """Sample standard deviation over the last axis, zero for one value, NaN left out."""
    known = np.isfinite(values)
    count = known.sum(axis=-1)
    mean = np.where(known, values, 0.0).sum(axis=-1) / np.maximum(count, 1)
    squares = np.where(known, (values - mean[..., None]) ** 2, 0.0).sum(axis=-1)
    return np.asarray(np.sqrt(squares / np.maximum(count - 1, 1)))


def read(results: Path, name: str) -> Columns:
    """The columns of a CSV file.

    Args:
        results: the folder.
        name: of the file, such as "mnist.timing.csv".

    Raises:
        MissingResults: the file is missing or has no rows.
    """
    path = results / name
    if not path.is_file():
        raise MissingResults(f"{path} is missing")
    stamp = path.stat()
    columns = _read(path, stamp.st_mtime_ns, stamp.st_size)
    if not columns or not len(next(iter(columns.values()))):
        raise MissingResults(f"{path} has no rows")
    return columns


@functools.lru_cache(maxsize=64)
def _read(path: Path, modified: int, size: int) -> Columns:
    with path.open(newline="") as file:
        rows = list(csv.reader(line for line in file if not line.startswith("#")))
    if not rows:
        return {}
    names, *body = rows
    columns = list(zip(*(row for row in body if len(row) == len(names)), strict=True))
    return {name: _column(name, values) for name, values in zip(names, columns, strict=False)}


def _column(name: str, values: tuple[str, ...]) -> np.ndarray:
    if name in WORDS:
        return np.asarray(values)
    return np.asarray([_number(value) for value in values])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def rows(columns: Columns, **equal: str) -> dict[str, np.ndarray]:
    """The rows in which the named columns have the given words."""
    keep = np.ones(len(next(iter(columns.values()))), bool)
    for name, word in equal.items():
        keep &= columns[name] == word
    return {name: values[keep] for name, values in columns.items()}


def record(results: Path, name: str) -> dict[str, Any]:
    """A JSON file of results, such as "mnist.json"; empty if it is missing."""
    path = results / name
    return json.loads(path.read_text()) if path.is_file() else {}


def estimators(columns: Columns) -> list[str]:
    """The estimators in a file, in the order of all tables and legends."""
    found = set(columns["estimator"].tolist())
    return [name for name in ESTIMATORS if name in found] + sorted(found - set(ESTIMATORS))


def sweeps(results: Path, task: str) -> dict[str, Sweep]:
    """All runs on a task by estimator.

    Raises:
        MissingResults: `<task>.csv` is missing or empty.
    """
    columns = read(results, f"{task}.csv")
    return {name: _sweep(name, rows(columns, estimator=name)) for name in estimators(columns)}


def _sweep(estimator: str, columns: Columns) -> Sweep:
    step_sizes, size_index = np.unique(columns["step_size"], return_inverse=True)
    seeds, seed_index = np.unique(columns["seed"], return_inverse=True)
    steps, first, step_index = np.unique(columns["step"], return_index=True, return_inverse=True)
    failed = np.char.startswith(np.char.lower(columns["status"]), "diverged") | ~np.isfinite(columns["elbo"])
    elbo = np.full((len(step_sizes), len(seeds), len(steps)), np.nan)
    elbo[size_index, seed_index, step_index] = np.where(failed, np.nan, columns["elbo"])
    diverged = np.isin(np.arange(len(step_sizes)), size_index[failed])
    return Sweep(estimator, step_sizes, steps, columns["epoch"][first], elbo, diverged)


def curves(results: Path, task: str) -> dict[str, Curve]:
    """The retrospectively best curve of every estimator that did not always diverge.

    Raises:
        MissingResults: `<task>.csv` is missing or empty.
    """
    found = {}
    for name, sweep in sweeps(results, task).items():
        try:
            found[name] = sweep.curve()
        except MissingResults:
            continue
    if not found:
        raise MissingResults(f"every run in {results / f'{task}.csv'} diverged")
    return found


def seconds_per_step(results: Path, task: str) -> dict[str, float]:
    """A compiled step's time by estimator, compilation left out; empty if it was not measured."""
    try:
        columns = read(results, f"{task}.timing.csv")
    except MissingResults:
        return {}
    times = {name: columns["ms_per_step"][columns["estimator"] == name] for name in estimators(columns)}
    return {name: float(np.median(value)) / 1000 for name, value in times.items() if np.isfinite(value).any()}


def available(results: Path, suffix: str = ".csv") -> list[str]:
    """The tasks of the paper that have a file with this suffix, in the paper's order."""
    return [task for task in TASKS if (results / f"{task}{suffix}").is_file()]
