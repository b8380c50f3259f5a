"""What the joint control adds and what the metric adds: natural steps and Adam, with naive, cv and joint.

    JOINTCV_DATA=... python benchmarks/ablation.py [--json PATH] [--tasks tennis,mnist,ppca]

Every row is the ELBO after the same number of epochs: at the step that natural steps with the joint control end with of
themselves (the median γ of their coordinates), and at the best of a grid of steps and decays. naive and cv have the
paper's noise; joint has it in one row, and in the other the noise that is its default. Natural steps take the default's
batch size and γ/(1 + decay·epoch), Adam the paper's batch size and a constant step or a cosine.
"""

import json
import math
import os
import sys
from collections.abc import Mapping

import jax
import optax

import jointcv as jcv
from common import in_child, load, machine, options, read, write
from jointcv.paper.cells import NOTHING, Cell, Table
from jointcv.paper.tasks import TASKS
from judge import judge

EPOCHS = {"tennis": 20, "mnist": 40, "ppca": 15}
CONTROLS: Mapping[str, tuple[jcv.AbstractControl, jcv.ParameterNoise | None]] = {
    "naive": (jcv.NaiveGradient(), jcv.ParameterNoise()),
    "cv": (jcv.MonteCarloCV(), jcv.ParameterNoise()),
    "joint": (jcv.JointCV(), jcv.ParameterNoise()),
    "joint, default noise": (jcv.JointCV(), None),
}
RATES = {
    "tennis": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    "mnist": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    "ppca": (0.03, 0.01, 0.003, 0.001, 3e-4, 1e-4),
}
DECAYS = {"natural": (0.0, 0.1, 1.0), "adam": (0.0, 1.0)}  # of Adam: constant, and a cosine to zero
KEYS = jax.random.split(jax.random.key(0), 1)


def by_itself(task: str, epochs: int) -> dict:
    """Natural steps with the joint control as they come: their step, their batch size and where they end."""
    problem = load(task)
    linear = isinstance(jcv.find_view(problem).view, jcv.LinearView)
    fit = jcv.fit(
        problem,
        key=jax.random.key(0),
        optimizer=None if linear else jcv.NaturalGradient(),
        num_epochs=epochs,
    )
    rate, batch = float(fit.history["rate"][-1]), fit.algorithm.sampler.batch_size
    return {"machine": machine(), "rate": rate, "batch": batch} | judge(task, problem)(fit.params)


def grid(task: str, epochs: int, kind: str, control: str, batch: int, rate: float) -> list[dict]:
    """The ELBO at the end of every run of a kind of steps with a control."""
    problem = load(task)
    view, look = jcv.find_view(problem).view, judge(task, problem)
    chosen, noise = CONTROLS[control]
    start = jcv.ConstantStart() if isinstance(view, jcv.LinearView) else jcv.RandomStart()
    objective, chosen, sampler = jcv.assemble(
        problem,
        control=chosen,
        noise=noise,
        view=view,
        batch_size=batch if kind == "natural" else TASKS[task].batch,
        family=jcv.MeanField(start),
    )
    steps = epochs * sampler.steps_per_epoch(objective.num_data)
    rows = []
    for decay in DECAYS[kind]:
        if kind == "natural":
            algorithm = jcv.NaturalGradient(rate=rate, decay=decay).build(objective, chosen, sampler)
            dial, rates = jcv.SurrogateRate(), (rate, *RATES[task])
        else:
            optimizer = optax.inject_hyperparams(adam, ("num_steps",))(1e-3, steps if decay else None)
            algorithm = jcv.GradientDescent(
                objective=objective, control=chosen, sampler=sampler, optimizer=optimizer
            )
            dial, rates = jcv.LearningRate(), TASKS[task].grid
        *_, last = jcv.sweep(
            algorithm, dial, rates, KEYS, num_epochs=epochs, at=(epochs,), record=lambda params: params
        )
        for place, value in enumerate(rates):
            params = jax.tree.map(lambda leaf, place=place: leaf[0, place], last.record)
            elbo = look(params)["elbo"] if last.alive[0, place] else math.nan
            rows.append({"rate": value, "decay": decay, "elbo": elbo if math.isfinite(elbo) else None})
    return rows


def adam(learning_rate, num_steps: int | None) -> optax.GradientTransformation:
    """Adam with a constant step, or with one that falls to zero."""
    schedule = (
        optax.constant_schedule(1.0) if num_steps is None else optax.cosine_decay_schedule(1.0, num_steps)
    )
    return optax.chain(optax.adam(learning_rate), optax.scale_by_schedule(schedule))


def table(task: str, epochs: int, runs: Mapping[str, dict]) -> Table:
    """A row for every kind of steps and control."""
    default = runs["by itself"]
    rows = [
        (
            Cell("natural, joint: as it comes"),
            _elbo(default["elbo"]),
            Cell(NOTHING),
            Cell(f"γ {default['rate']:.3g}, batch {default['batch']}"),
        )
    ]
    for name, found in runs.items():
        if name == "by itself":
            continue
        best = max(found["rows"], key=lambda row: -math.inf if row["elbo"] is None else row["elbo"])
        is_natural = name.startswith("natural")
        same = found["rows"][0]["elbo"] if is_natural else None  # the first rate is that of the default
        decay = f"decay {best['decay']:g}" if is_natural else "cosine"
        setting = f"{best['rate']:.3g}, {decay if best['decay'] else 'constant'}"
        rows.append((Cell(name), _elbo(same), _elbo(best["elbo"]), Cell(setting)))
    columns = ("steps, control", "ELBO at that step", "ELBO at its best", "its best")
    return Table(f"{task}: after {epochs} epochs", columns, tuple(rows))


def _elbo(value: float | None) -> Cell:
    return Cell(NOTHING) if value is None else Cell(f"{value:,.1f}", value)


def names(task: str) -> list[tuple[str, str]]:
    """Kind and control of every row; a whole view has but one noise."""
    controls = [name for name in CONTROLS if task != "ppca" or CONTROLS[name][1] is not None]
    return [(kind, control) for kind in ("natural", "adam") for control in controls]


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        task, epochs, *rest = sys.argv[2:]
        if not rest:
            print(json.dumps(by_itself(task, int(epochs))))
            return
        kind, control, batch, rate = rest
        rows = grid(task, int(epochs), kind, control, int(batch), float(rate))
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    chosen = options(__doc__, tasks=",".join(EPOCHS), epochs=0)
    results = read(chosen.json)
    for task in chosen.tasks.split(","):
        epochs = chosen.epochs or EPOCHS[task]
        runs = results.setdefault(f"{task}, {epochs} epochs", {})
        child = ["child", task, str(epochs)]
        cores = os.sched_getaffinity(0)
        if "by itself" not in runs:
            runs["by itself"] = in_child(__file__, child, cores)
            write(chosen.json, results)
        default = runs["by itself"]
        for kind, control in names(task):
            name = f"{kind}, {control}"
            if name not in runs:
                more = [kind, control, str(default["batch"]), repr(default["rate"])]
                runs[name] = in_child(__file__, [*child, *more], cores)
                write(chosen.json, results)
        print(f"\n{table(task, epochs, runs)}", flush=True)


if __name__ == "__main__":
    main()
