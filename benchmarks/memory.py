"""Memory of the joint control: bytes of its table and mean, and the peak of the process beside the naive gradient's.

JOINTCV_DATA=... python benchmarks/memory.py [--json PATH]
"""

import json
import os
import resource
import sys

import jax
import optax

import jointcv as jcv
from common import in_child, load, machine, options, write

TASKS = ("tennis", "mnist", "movielens", "ppca")


def measure(task: str, which: str) -> dict[str, float]:
    """One run of a few hundred steps, in a process of its own."""
    problem = load(task)
    control = jcv.JointCV() if which == "joint" else jcv.NaiveGradient()
    noise = jcv.ParameterNoise() if which == "naive" or task == "ppca" else None
    fit = jcv.fit(
        problem,
        key=jax.random.key(0),
        control=control,
        noise=noise,
        optimizer=optax.adam(1e-3),
        batch_size=100,
        num_steps=300,
        naive_epochs=0,
    )
    state = fit.run.state
    extra = sum(leaf.nbytes for leaf in jax.tree.leaves((fit.run.table, state.memory)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"extra_bytes": extra, "peak_bytes": peak, "num_data": problem.num_data, "dim": problem.dim}


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3])))
        return
    chosen = options(__doc__)
    results: dict = {"machine": machine(), "memory": {}}
    print(
        f"{'task':<12}{'table + mean':>14}{'paper, N x 2D':>16}{'peak naive':>13}{'peak joint':>13}{'ratio':>8}"
    )
    for task in TASKS:
        cores = os.sched_getaffinity(0)
        naive, joint = (in_child(__file__, ["child", task, which], cores) for which in ("naive", "joint"))
        paper = 8 * joint["num_data"] * joint["dim"]
        results["memory"][task] = {"naive": naive, "joint": joint, "paper_bytes": paper}
        peaks = naive["peak_bytes"], joint["peak_bytes"]
        print(
            f"{task:<12}{joint['extra_bytes'] / 1e6:>11.2f} MB{paper / 1e9:>13.1f} GB"
            f"{peaks[0] / 1e6:>10.0f} MB{peaks[1] / 1e6:>10.0f} MB{peaks[1] / peaks[0]:>8.2f}",
            flush=True,
        )
    write(chosen.json, results)


if __name__ == "__main__":
    main()
