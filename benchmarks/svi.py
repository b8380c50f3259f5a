"""Milliseconds a step on Tennis: NumPyro's own SVI, and the drop-in with and without control, in one process.

    JOINTCV_DATA=... python benchmarks/svi.py [--json]

Every number is the median over rounds that take turns, so that a busy machine is unfair to none. Compilation is not
counted. "update" is `svi.update` in a `lax.scan` of the user's own, "run" is `svi.run`. "cpu" is the process's own
time, of all its threads: what counts where other programs share the cores.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import jointcv as jcv

BATCH_SIZE = 100


def bradley_terry(winner, loser, num_players):
    with numpyro.plate("players", num_players):
        skill = numpyro.sample("skill", dist.Normal(0, 1))
    with numpyro.plate("matches", len(winner), subsample_size=BATCH_SIZE) as idx:
        logits = skill[winner[idx]] - skill[loser[idx]]
        numpyro.sample("won", dist.Bernoulli(logits=logits), obs=jnp.ones_like(logits))


def by_update(svi, state, arguments, num_steps: int) -> Callable[[], None]:
    """The steps in a loop of the user's own, which is what NumPyro's `run` does without a progress bar."""

    @jax.jit
    def loop(state):
        return jax.lax.scan(lambda state, _: svi.update(state, *arguments), state, None, length=num_steps)

    return lambda: jax.block_until_ready(loop(state)[1])


def by_run(svi, state, arguments, num_steps: int) -> Callable[[], None]:
    def run():
        result = svi.run(None, num_steps, *arguments, progress_bar=False, init_state=state)
        jax.block_until_ready(result.losses)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    with np.load(Path(os.environ["JOINTCV_DATA"]) / "tennis.npz") as data:
        winner, loser = jnp.asarray(data["winner_ids"]), jnp.asarray(data["loser_ids"])
        players = int(data["num_player"])
    arguments = (winner, loser, players)

    def make(kind, **control):
        guide = AutoNormal(bradley_terry)
        return kind(bradley_terry, guide, numpyro.optim.Adam(1e-3), Trace_ELBO(), **control)

    numpyros, joint = make(numpyro.infer.SVI), make(jcv.numpyro.SVI)
    naive = make(jcv.numpyro.SVI, control=jcv.NaiveGradient())
    loops = {}
    for name, svi, way in (
        ("numpyro", numpyros, by_update),
        ("jointcv naive, run", naive, by_run),
        ("jointcv joint, run", joint, by_run),
        ("jointcv joint, update", joint, by_update),
    ):
        state = svi.init(jax.random.key(0), *arguments)
        loops[name] = way(svi, state, arguments, options.steps)
        loops[name]()
    seconds, cpu = {name: [] for name in loops}, {name: [] for name in loops}
    for _ in range(options.rounds):
        for name, loop in loops.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            loop()
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - cpu_began)
    report = {"cores": len(os.sched_getaffinity(0))}
    for clock, times in (("wall", seconds), ("cpu", cpu)):
        report[clock] = {
            name: 1e3 * float(np.median(values)) / options.steps for name, values in times.items()
        }
        report[f"{clock}, joint over numpyro"] = (
            report[clock]["jointcv joint, run"] / report[clock]["numpyro"]
        )
    if options.json:
        print(json.dumps(report))
        return
    for name in loops:
        print(f"{name:24s}{report['wall'][name]:8.4f} ms{report['cpu'][name]:8.4f} ms cpu")
    print(
        f"joint over numpyro      {report['wall, joint over numpyro']:8.2f}"
        f"   {report['cpu, joint over numpyro']:8.2f} cpu"
    )


if __name__ == "__main__":
    main()
