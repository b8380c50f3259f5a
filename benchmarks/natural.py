"""Natural steps: epochs and seconds to the levels of every task, beside Adam, NumPyro's SVI and L-BFGS.

    JOINTCV_DATA=... python benchmarks/natural.py [--json PATH] [--tasks tennis,mnist] [--parts levels,peers]

Every run is a process of its own. ELBO evaluations are off the clock; seconds are given with and without compilation.
`--only adam` takes the runs whose name begins so, `--shorten 10` a tenth of the epochs. A run that PATH already has, as
long as it is to be, is kept, unless `--again 1`.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax

from common import in_child, load, machine, options, read, write
from jointcv.paper.cells import NOTHING, Cell, Table, duration
from judge import double, judge
from methods import Method, Record, natural, peers


@dataclass(frozen=True)
class Goal:
    """What natural steps are to reach on a task.

    Args:
        epochs: of the run, which goes on a little beyond what is asked.
        levels: ELBO and the epochs that are asked for it. Of MovieLens the level is the best of Adam.
        gradient_norm: and at most this, where the ELBO is exact.
        wide: whether the run is in float64.
    """

    epochs: int
    levels: tuple[tuple[float, int], ...] = ()
    gradient_norm: float = math.inf
    wide: bool = False


OPTIMUM = {"australian": -244.98653, "sonar": -141.73436, "tennis": -102_999.8, "ppca": -59_120_140.0}
GOALS = {
    "australian": Goal(200, ((OPTIMUM["australian"] - 1e-4, 150),), 1e-6, wide=True),
    "sonar": Goal(800, ((OPTIMUM["sonar"] - 1e-4, 600),), 1e-6, wide=True),
    "tennis": Goal(60, ((OPTIMUM["tennis"] - 1, 20), (OPTIMUM["tennis"] - 0.1, 40))),
    "mnist": Goal(60, ((-25_000.0, 15), (-24_100.0, 40))),
    "movielens": Goal(30),
    "ppca": Goal(30, ((OPTIMUM["ppca"] - 100, 15),)),
}
PARTS = "levels", "peers"
Runs = Mapping[str, dict]


def methods(task: str, part: str) -> dict[str, Method]:
    if part == "levels":
        return {"natural": partial(natural, num_epochs=GOALS[task].epochs)}
    return peers(task)


def measure(task: str, part: str, name: str, shorten: int) -> dict:
    """One run, in a process of its own."""
    goal, method = GOALS[task], methods(task, part)[name]
    if goal.wide or name.endswith("float64"):
        jax.config.update("jax_enable_x64", True)
    problem = load(task)
    # A peer has done its work at the last level; MovieLens has none, and all its epochs count.
    enough = max((level for level, _ in goal.levels), default=math.inf) if part == "peers" else math.inf
    record = Record(judge(task, problem), enough)
    length = max(1, method.keywords["num_epochs"] // shorten)
    partial(method, num_epochs=length)(double(problem) if goal.wide else problem, record)
    return {"machine": machine(), "overhead": record.overhead, "notes": record.notes, "rows": record.rows}


def reached(run: dict, level: float, gradient_norm: float = math.inf) -> dict | None:
    """The first row at a level."""
    for row in run["rows"]:
        if row["elbo"] >= level and row.get("gradient_norm", 0.0) <= gradient_norm:
            return row
    return None


def best(run: dict) -> float:
    return max((row["elbo"] for row in run["rows"] if math.isfinite(row["elbo"])), default=-math.inf)


def levels_of(task: str, runs: Runs) -> tuple[tuple[float, int], ...]:
    """The task's levels; of MovieLens the best that Adam reaches, if it has run."""
    adam = [best(run) for name, run in runs.items() if name.startswith("adam")]
    return ((max(adam), 30),) if task == "movielens" and adam else GOALS[task].levels


def levels_table(results: Mapping[str, Runs]) -> Table:
    """Natural steps, with nothing chosen by hand."""
    rows = []
    for task, runs in results.items():
        if "natural" not in runs:
            continue
        run, goal = runs["natural"], GOALS[task]
        for level, asked in levels_of(task, runs) or ((math.inf, 30),):
            row = reached(run, level, goal.gradient_norm)
            rows.append((Cell(task), _precise(level), Cell(str(asked), asked), *_when(run, row), *_end(run)))
    columns = (
        "task",
        "level",
        "asked",
        "epochs",
        "seconds",
        "and compiling",
        "last ELBO",
        "gradient",
        "exact",
    )
    notes = (
        "Australian and Sonar: with a gradient norm of at most 1e-6. MovieLens: the level is the best of Adam.",
        "gradient: the norm at the last epoch, with the library's quadrature; exact: with 100 nodes.",
    )
    return Table("Natural steps: epochs to the levels, no step size given", columns, tuple(rows), notes)


def peers_table(task: str, runs: Runs) -> Table:
    """The fastest setting of every kind, by level."""
    rows = []
    for level, _ in levels_of(task, runs):
        kinds: dict[str, list[str]] = {}
        for name in runs:
            kinds.setdefault(name.split(",")[0], []).append(name)
        for kind, names in kinds.items():
            there = {name: row for name in names if (row := reached(runs[name], level))}
            name = min(there, key=lambda name: there[name]["seconds"], default="")
            closest = max(names, key=lambda name: best(runs[name]))
            when = _when(runs[name or closest], there.get(name))
            setting = (name or closest).partition(", ")[2] or "as it comes"
            rows.append(
                (Cell(kind), _precise(level), *when, _precise(best(runs[name or closest])), Cell(setting))
            )
    columns = ("method", "level", "epochs", "seconds", "and compiling", "best ELBO", "setting")
    notes = ("Of settings that reach the level the one that does in the fewest seconds, else the closest.",)
    return Table(f"{task}: seconds to the levels", columns, tuple(rows), notes)


def _precise(value: float) -> Cell:
    digits = 5 if abs(value) < 1000 else 1
    return Cell(f"{value:,.{digits}f}" if math.isfinite(value) else NOTHING, value)


def _when(run: dict, row: dict | None) -> tuple[Cell, Cell, Cell]:
    if row is None:
        return Cell(NOTHING), Cell(NOTHING), Cell(NOTHING)
    seconds, cold = row["seconds"], row["seconds"] + run["overhead"]
    return Cell(str(row["epoch"]), row["epoch"]), Cell(duration(seconds), seconds), Cell(duration(cold), cold)


def _end(run: dict) -> tuple[Cell, ...]:
    last = run["rows"][-1]
    norms = [last.get(name, math.nan) for name in ("gradient_norm", "exact_gradient_norm")]
    return _precise(last["elbo"]), *(Cell(f"{n:.1e}" if math.isfinite(n) else NOTHING, n) for n in norms)


def wanted(task: str, runs: Runs, chosen: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Part and name of the runs that are asked for and not there yet."""
    for part in chosen.parts.split(","):
        for name in methods(task, part):
            known = runs.get(name, {}).get("shorten") == chosen.shorten and not chosen.again
            if name.startswith(chosen.only) and not known:
                yield part, name


def show(task: str, name: str, run: dict) -> None:
    last = run["rows"][-1]
    print(
        f"{task:<11}{name:<58}{last['epoch']:>5} epochs{last['seconds']:>9.2f} s  "
        f"+{run['overhead']:>6.1f} s compiling  ELBO {last['elbo']:.5f}",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        task, part, name, shorten = sys.argv[2:]
        print(json.dumps(measure(task, part, name, int(shorten))))
        return
    chosen = options(__doc__, tasks=",".join(GOALS), parts=",".join(PARTS), only="", again=0, shorten=1)
    results = read(chosen.json)
    for task in chosen.tasks.split(","):
        runs = results.setdefault(task, {})
        for part, name in wanted(task, runs, chosen):
            arguments = ["child", task, part, name, str(chosen.shorten)]
            runs[name] = in_child(__file__, arguments, os.sched_getaffinity(0)) | {"shorten": chosen.shorten}
            show(task, name, runs[name])
            write(chosen.json, results)
        if len(runs) > 1:
            print(f"\n{peers_table(task, runs)}", flush=True)
    print(f"\n{levels_table(results)}")


if __name__ == "__main__":
    main()
