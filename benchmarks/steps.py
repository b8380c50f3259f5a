"""Milliseconds a step, pinned to one core and on two: ours on the paper's tasks, and NumPyro's SVI on Tennis.

    JOINTCV_DATA=... python benchmarks/steps.py [--json PATH] [--rounds 7]

All of a task run in one process by turns, batch 100, Adam. "paper noise" is one ε of dimension D a step, and the
paper's own joint leaves log σ its naive gradient: "joint, location" does too, under a view that shows no squares of A,
so that the memory carries no d.
"""

import dataclasses
import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax

import jointcv as jcv
from common import in_child, load, machine, options, step_timer, take_turns, write
from jointcv.paper.estimators import LocationOnly

TASKS = ("tennis", "mnist", "movielens", "ppca")
STEPS = {"tennis": 1500, "mnist": 400, "movielens": 150, "ppca": 60}


def variants(task: str, problem: jcv.Problem) -> dict[str, object]:
    """Name → a function that builds the algorithm."""
    view = jcv.find_view(problem).view

    def descent(control, noise=None, view=view):
        objective, chosen, sampler = jcv.assemble(
            problem, control=control, view=view, noise=noise, batch_size=100
        )
        return jcv.GradientDescent(objective, chosen, sampler, optax.adam(1e-3))

    paper = jcv.ParameterNoise()
    if task == "ppca":
        memory, unsquared = jcv.PerBatch(), view
    else:
        memory, unsquared = jcv.PerDatum(), dataclasses.replace(view, has_squares=False)
    found = {
        "naive": lambda: descent(jcv.NaiveGradient(), paper),
        "cv": lambda: descent(jcv.MonteCarloCV(), paper),
        "joint": lambda: descent(jcv.JointCV(), paper),
        "joint, location": lambda: descent(LocationOnly(jcv.JointCV(memory)), paper, unsquared),
        "joint, SVRG": lambda: descent(jcv.JointCV(jcv.Anchor(every=10**9)), paper),
    }
    if task != "ppca":
        found["joint, noise in eta"] = lambda: descent(jcv.JointCV(), jcv.PredictorNoise())
        found["natural"] = lambda: jcv.NaturalGradient(rate=1e-4).build(
            *jcv.assemble(problem, control=jcv.JointCV(), view=view, batch_size=100)
        )
    if task == "tennis":
        found["joint, quadrature"] = lambda: descent(jcv.JointCV(), jcv.Quadrature())
    return found


def numpyro_timer(num_steps: int):
    """NumPyro's own naive SVI on Tennis, inside one compiled loop."""
    problem = load("tennis")
    winner, loser = problem.data["winner"], problem.data["loser"]

    def model():
        skill = numpyro.sample("skill", dist.Normal(jnp.zeros(problem.dim), 1).to_event(1))
        with numpyro.plate("matches", winner.shape[0], subsample_size=100) as index:
            logits = skill[winner[index]] - skill[loser[index]]
            numpyro.sample("won", dist.Bernoulli(logits=logits), obs=jnp.ones(100))

    guide = numpyro.infer.autoguide.AutoNormal(model)
    svi = numpyro.infer.SVI(model, guide, numpyro.optim.Adam(1e-3), numpyro.infer.Trace_ELBO())
    state = svi.init(jax.random.key(0))

    @jax.jit
    def loop(state):
        return jax.lax.scan(lambda state, _: svi.update(state), state, None, length=num_steps)[0]

    def measure():
        nonlocal state
        wall, processor = time.perf_counter(), time.process_time()
        state = jax.block_until_ready(loop(state))
        return (time.perf_counter() - wall) / num_steps * 1e3, (
            time.process_time() - processor
        ) / num_steps * 1e3

    measure()
    return measure


def measure(task: str, rounds: int) -> dict[str, dict[str, float]]:
    problem = load(task)
    timers = {name: step_timer(build(), STEPS[task]) for name, build in variants(task, problem).items()}
    if task == "tennis":
        timers["NumPyro SVI, naive"] = numpyro_timer(STEPS[task])
    return take_turns(timers, rounds)


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
        return
    chosen = options(__doc__, rounds=7, tasks=",".join(TASKS))
    results: dict = {"machine": machine(), "steps": {}}
    every = sorted(os.sched_getaffinity(0))
    for task in chosen.tasks.split(","):
        for cores in ({every[0]}, set(every[:2])):
            times = in_child(__file__, ["child", task, str(chosen.rounds)], cores)
            results["steps"].setdefault(task, {})[str(len(cores))] = times
            print(
                f"\n{task} on {len(cores)} core{'s' * (len(cores) > 1)}{'ms a step':>26}{'± ':>10}{'/ naive':>10}"
            )
            for name, time_ in times.items():
                ratio = time_["ms"] / times["naive"]["ms"]
                print(f"  {name:<24}{time_['ms']:>16.4f}{time_['spread']:>12.4f}{ratio:>10.2f}", flush=True)
    write(chosen.json, results)


if __name__ == "__main__":
    main()
