"""What the benchmarks share: the tasks, steps timed by turns, and their output."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jointcv as jcv
from jointcv.loop import advance, epoch_schedule, start


def step_timer(algorithm, num_steps: int) -> Callable[[], tuple[float, float]]:
    """A function that runs so many steps of one epoch and returns its wall and processor milliseconds a step."""
    import equinox as eqx

    run = start(algorithm, jax.random.key(0))
    schedule = epoch_schedule(algorithm, run.key, 0)
    num_steps = min(num_steps, schedule.place.shape[0] - 1)
    part = schedule.cut(1, num_steps)  # without the first step, which would renew what is due once an epoch

    @eqx.filter_jit(donate="all-except-first")
    def steps(fixed, run):
        return advance(*fixed[:1], run, fixed[1])[0]

    def measure():
        nonlocal run
        wall, processor = time.perf_counter(), time.process_time()
        run = jax.block_until_ready(steps((algorithm, part), run))
        return (
            (time.perf_counter() - wall) / num_steps * 1e3,
            (time.process_time() - processor) / num_steps * 1e3,
        )

    measure()
    return measure


def take_turns(
    timers: Mapping[str, Callable[[], tuple[float, float]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Medians and quartile spreads over rounds in which the timers take turns."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            seen[name].append(timer())
    return {name: _summary(np.asarray(times)) for name, times in seen.items()}


def _summary(times: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(times[:, 0], [0.25, 0.5, 0.75])
    return {"ms": float(middle), "spread": float(high - low), "cpu_ms": float(np.median(times[:, 1]))}


def machine() -> dict[str, object]:
    """What a number was measured on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    return {
        "commit": commit,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def options(description: str | None, **more) -> argparse.Namespace:
    """The command line that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the numbers here")
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def write(path: Path | None, results: object) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


def read(path: Path | None) -> dict:
    """What an earlier run has written, to go on from."""
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def in_child(script: str, arguments: list[str], cores: set[int]) -> Any:
    """The JSON that a script prints last, run by itself on these cores."""
    command = [sys.executable, script, *arguments]
    if hasattr(os, "sched_setaffinity"):
        code = (
            "import os, sys; os.sched_setaffinity(0, eval(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
        )
        command = [sys.executable, "-c", code, repr(cores), *command]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def load(task: str) -> jcv.Problem:
    """The paper's problem; of Tennis the skills alone, whose optimum −102,999.8 is known."""
    from jointcv.paper.tasks import TASKS

    problem = TASKS[task].load(None)
    return standard_skills(problem) if task == "tennis" else problem


def standard_skills(problem: jcv.Problem) -> jcv.Problem:
    """Tennis with its global scale fixed at 1: a standard normal prior, D = 5,524."""
    from jointcv.paper.tasks import log_normal

    def log_likelihood(skills, datum):
        return problem.log_likelihood({"log_scale": jnp.zeros(()), "skills": skills}, datum)

    return jcv.Problem(
        log_prior=log_normal,
        log_likelihood=log_likelihood,
        data=problem.data,
        example=problem.example["skills"],
    )
