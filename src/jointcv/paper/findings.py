"""What agrees with the paper and what does not: sentences computed from the result files."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jointcv.paper.arrivals import Arrival, arrival
from jointcv.paper.cells import NOTHING, Cell, Table, duration, elbo, fixed, ratio, scientific
from jointcv.paper.outcomes import Curve, MissingResults, curves, read, record, rows, seconds_per_step
from jointcv.paper.reference import (
    MNIST_TARGET,
    MNIST_TARGET_SECONDS,
    ORDER,
    TASKS,
)
from jointcv.paper.tables import (
    FACTOR,
    best_errors,
    beyond,
    our_variances,
    paper_ratio,
    step_costs,
    variance_ratios,
)

AGREES, DIFFERS, OPEN, NOTED = "agrees", "differs", "open", "noted"
OURS = ("ours", "natural")
SAME = 0.02  # a difference below this share of the whole spread counts as none, when seeds cannot tell
SLACK = 1.25
FULL_PASS = ("inc", "ens", "full-naive", "full-cv")  # a GPU hides what a pass over all data costs a CPU
RHAT = 1.01


@dataclass(frozen=True)
class Finding:
    """A sentence, the task it is about, and whether it agrees with the paper.

    Attributes:
        task: as in `TASKS`.
        verdict: "agrees", "differs", "open" where results are missing, "noted" where the paper has no claim.
        sentence: computed from results.
    """

    task: str
    verdict: str
    sentence: str


def findings(results: Path, task: str) -> list[Finding]:
    """All that the results say about a task, one finding a claim; a missing file is a finding too."""
    found = []
    for claim in (_order, _speed, _mnist, _floors, _table1, _costs, _nuts):
        try:
            found += [Finding(task, verdict, sentence) for verdict, sentence in claim(results, task)]
        except MissingResults as error:
            found.append(Finding(task, OPEN, f"{error}."))
    return list(dict.fromkeys(found))


Said = Iterator[tuple[str, str]]


def _order(results: Path, task: str) -> Said:
    """The order of the estimators at the last step that all of them have."""
    found = curves(results, task)
    joint = joint_name(found)
    order = [name for name in (joint, *ORDER[1:]) if name is not None and name in found]
    if len(order) < 2:
        yield OPEN, f"Of {', '.join(ORDER)} only {', '.join(order) or 'none'} has runs: no order yet."
        return
    names = [*order, *(name for name in ("inc",) if name in found)]
    step = min(found[name].steps[-1] for name in names)
    values = {name: found[name].at(step) for name in names}
    sentence = f"After {step:,.0f} steps, best step sizes: {_ranking(task, values)}. "
    expected = f"the paper's order, {', '.join(order)}"
    wrong = [(a, b) for a, b in zip(order, order[1:], strict=False) if _below(a, b, values)]
    if wrong:
        what = " and ".join(f"{b} is ahead of {a} by {_gap(values[b][0] - values[a][0])}" for a, b in wrong)
        yield DIFFERS, f"{sentence}Not {expected}: {what}."
    else:
        yield AGREES, f"{sentence}That is {expected}."
    if "inc" in values and joint is not None:
        yield NOTED, _beside_inc(found[joint], found["inc"], values, seconds_per_step(results, task))


def _ranking(task: str, values: Mapping[str, tuple[float, float]]) -> str:
    """The estimators from the best on, with ≈ between those that seeds cannot tell apart."""
    ranked = sorted(values, key=lambda name: -values[name][0])
    beats = "<" if task == "dropout" else ">"
    shown = f"{ranked[0]} {elbo(task, values[ranked[0]][0])}"
    for better, name in zip(ranked, ranked[1:], strict=False):
        sign = "≈" if _close(better, name, values) else beats
        shown += f" {sign} {name} {elbo(task, values[name][0])}"
    return shown


def _beside_inc(
    joint: Curve, inc: Curve, values: Mapping[str, tuple[float, float]], seconds: Mapping[str, float]
) -> str:
    """What inc, which passes over all data in every step, has over joint, and what it costs."""
    gap = values["inc"][0] - values[joint.estimator][0]
    told = f"inc, a pass over all data a step, ends {_gap(abs(gap))} {'above' if gap > 0 else 'below'} joint"
    target = min(joint.best, inc.best)
    own, other = arrival(joint, target, seconds), arrival(inc, target, seconds)
    told += f"; {fixed(target)}, which both reach, takes joint{_there('', own)} and inc{_there('', other)}"
    return told + "."


def _close(a: str, b: str, values: Mapping[str, tuple[float, float]]) -> bool:
    """Whether seeds cannot tell two means apart, or their difference is a small share of the whole spread."""
    means = [mean for mean, _ in values.values()]
    error = math.hypot(values[a][1], values[b][1])
    return abs(values[a][0] - values[b][0]) <= max(2 * error, SAME * (max(means) - min(means)))


def _below(a: str, b: str, values: Mapping[str, tuple[float, float]]) -> bool:
    return values[a][0] < values[b][0] and not _close(a, b, values)


def _speed(results: Path, task: str) -> Said:
    """How soon joint is at naive's and at cv's best."""
    found, seconds = curves(results, task), seconds_per_step(results, task)
    joint = joint_name(found)
    if joint is None:
        yield OPEN, "joint has no runs."
        return
    for base in ("naive", "cv"):
        if base not in found:
            yield OPEN, f"{base} has no runs."
            continue
        target = found[base].best
        reference = arrival(found[base], target, seconds)
        own = arrival(found[joint], target, seconds)
        verdict, sentence = _comparison(joint, base, elbo(task, target), own, reference, found[joint], task)
        yield verdict, sentence
    for name in OURS:
        if name in found:
            yield NOTED, f"{name} reaches {_arrivals(found, name, seconds)}."


def _arrivals(found: Mapping[str, Curve], name: str, seconds: Mapping[str, float]) -> str:
    """When an estimator is at each best of the paper's, in words."""
    told = []
    for base in ("naive", "cv", "joint"):
        if base in found:
            place = arrival(found[name], found[base].best, seconds)
            when = _there("", place) if math.isfinite(place.steps) else " not"
            told.append(f"{base}'s best{when}")
    return "; ".join(told)


def joint_name(found: Mapping[str, Curve]) -> str | None:
    """The paper's joint estimator that was run: with a table, else with an anchor."""
    return next((name for name in ("joint", "joint-svrg") if name in found), None)


def _comparison(
    joint: str, base: str, target: str, own: Arrival, reference: Arrival, curve: Curve, task: str
) -> tuple[str, str]:
    if not math.isfinite(own.steps):
        return DIFFERS, (
            f"{joint} does not reach {base}'s best, {target}: its own best is {elbo(task, curve.best)} "
            f"after at most {curve.steps[-1]:,.0f} steps."
        )
    sentence = f"{joint} reaches {base}'s best, {target}, after {own.steps:,.0f} steps, {base} after "
    sentence += f"{reference.steps:,.0f}: {_times(reference.steps, own.steps, 'fewer', 'more')}"
    if not math.isfinite(own.seconds) or not math.isfinite(reference.seconds):
        return (AGREES if own.steps < reference.steps else DIFFERS), f"{sentence}. No step was timed."
    sentence += (
        f"; in {duration(own.seconds)} against {duration(reference.seconds)}: "
        f"{_times(reference.seconds, own.seconds, 'faster', 'slower')}."
    )
    good = own.steps < reference.steps and own.seconds < reference.seconds
    return (AGREES if good else DIFFERS), sentence


def _times(above: float, below: float, good: str, bad: str) -> str:
    if below <= 0 or above <= 0:
        return "from the start"
    factor = above / below
    if 0.98 < factor < 1.02:
        return "the same"
    return f"{ratio(factor)} times {good}" if factor > 1 else f"{ratio(1 / factor)} times {bad}"


def _epochs(count: float) -> str:
    return "1 epoch" if count == 1 else f"{count:,.3g} epochs" if count < 100 else f"{count:,.0f} epochs"


def _there(name: str, place: Arrival) -> str:
    time = f" and {duration(place.seconds)}" if math.isfinite(place.seconds) else ""
    return f"{name} after {place.steps:,.0f} steps ({_epochs(place.epochs)}){time}"


def _mnist(results: Path, task: str) -> Said:
    """Steps and seconds to the ELBO at which the paper compares times."""
    if task != "mnist":
        return
    found, seconds = curves(results, task), seconds_per_step(results, task)
    names = [name for name in ("naive", "cv", "joint", *OURS) if name in found]
    places = {name: arrival(found[name], MNIST_TARGET, seconds) for name in names}
    told = []
    for name, place in places.items():
        if math.isfinite(place.steps):
            paper = MNIST_TARGET_SECONDS.get(name)
            beside = f" (paper about {duration(paper)} on a GPU)" if paper else ""
            told.append(_there(name, place) + beside)
        else:
            told.append(f"{name} not within {found[name].steps[-1]:,.0f} steps")
    baselines = [places[name].steps for name in ("naive", "cv") if name in places]
    first = "joint" in places and math.isfinite(places["joint"].steps)
    first = first and all(places["joint"].steps <= steps for steps in baselines)
    yield (AGREES if first else DIFFERS), f"An ELBO of {fixed(MNIST_TARGET)}: {'; '.join(told)}."


def _floors(results: Path, task: str) -> Said:
    """Whether joint's variance is below what cv and inc cannot pass."""
    columns = read(results, f"{task}.variance.csv")
    last = {name: _last(columns, name) for name in ("naive", "cv", "joint", "ours")}
    if last["joint"] is None:
        yield OPEN, f"{task}.variance.csv has no trace of joint."
        return
    joint = last["joint"]
    floors = {"V_n": joint["v_data"], "V_ε": joint["v_noise"]}
    floors = {name: value for name, value in floors.items() if math.isfinite(value)}
    if not floors:
        return
    variance = joint["trace_location"]
    under = [name for name, value in floors.items() if variance < value]
    shown = ", ".join(f"{name} {scientific(value)}" for name, value in floors.items())
    others = [
        f"{name} {scientific(entry['trace_location'])}"
        for name, entry in last.items()
        if name != "joint" and entry is not None
    ]
    sentence = f"Variance of the location gradient at the end of its trace: joint {scientific(variance)}"
    sentence += f" ({', '.join(others)}); the floors there are {shown}. "
    if len(under) == len(floors):
        yield AGREES, sentence + f"joint is below {' and '.join(under)}."
    else:
        over = [name for name in floors if name not in under]
        yield DIFFERS, sentence + f"joint is not below {' and '.join(over)}."


def _last(columns: Mapping[str, np.ndarray], estimator: str) -> dict[str, float] | None:
    own = rows(columns, estimator=estimator)
    known = np.isfinite(own["trace_location"])
    if not known.any():
        return None
    at = int(np.argmax(np.where(known, own["step"], -1)))
    return {name: float(values[at]) for name, values in own.items() if values.dtype.kind == "f"}


def _table1(results: Path, task: str) -> Said:
    """How many cells of Table 1 are within a factor of the paper's."""
    if TASKS[task].variances is None:
        return
    ours, end_point, _, _ = our_variances(results, task)
    quotients = [quotient for _, _, quotient in variance_ratios(TASKS[task], ours)]
    off = [not math.isfinite(quotient) or beyond(quotient) for quotient in quotients]
    shown = ", ".join(ratio(quotient) for quotient in quotients)
    sentence = f"Table 1, ours ÷ paper's for V_{{n,ε}}, V_n, V_ε: {shown}. "
    if not any(off):
        yield AGREES, sentence + f"All within a factor of {FACTOR:g}."
    else:
        sentence += f"{sum(off)} of {len(off)} beyond a factor of {FACTOR:g}: ours is at "
        yield DIFFERS, sentence + f"{end_point or 'our end point'}, the paper's end point is not published."


def _costs(results: Path, task: str) -> Said:
    """Times of a step relative to naive's, beside the paper's."""
    costs = {name: quotient for name, _, quotient, _ in step_costs(results, task) if math.isfinite(quotient)}
    paper = {name: paper_ratio(task, name) for name in costs}
    costs.pop("naive", None)
    if not costs:
        return
    told = [
        f"{name} {ratio(quotient)}" + (f" (paper {ratio(paper[name])})" if math.isfinite(paper[name]) else "")
        for name, quotient in costs.items()
    ]
    sentence = f"Time of a step relative to naive's: {', '.join(told)}. "
    compared = [name for name in costs if name not in FULL_PASS and math.isfinite(paper[name])]
    dearer = [name for name in compared if costs[name] > SLACK * paper[name]]
    if not compared:
        yield NOTED, sentence + "The paper has no times for this task."
    elif dearer:
        yield DIFFERS, sentence + f"More than a quarter above the paper's ratio: {', '.join(dearer)}."
    else:
        yield AGREES, sentence + f"No more than a quarter above the paper's ratio: {', '.join(compared)}."


def _nuts(results: Path, task: str) -> Said:
    """R-hat, and how far joint and naive end from NUTS."""
    if task not in ("sonar", "australian"):
        return
    columns = read(results, f"{task}.nuts.csv")
    entries = record(results, f"{task}.nuts.json")
    rhat = _largest(entries.get("rhat", math.nan))
    if math.isfinite(rhat):
        chains, draws, divergences = (
            _largest(entries.get(name)) for name in ("chains", "draws", "divergences")
        )
        text = f"NUTS: largest R-hat {rhat:.4f} over {chains:,.0f} chains of {draws:,.0f} draws, "
        text += f"{divergences:,.0f} divergences."
        yield (AGREES if rhat < RHAT else DIFFERS), text
    ends = {name: best_errors(columns, name) for name in dict.fromkeys(columns["estimator"].tolist())}
    if "joint" not in ends or "naive" not in ends:
        return
    joint, naive = ends["joint"], ends["naive"]
    closer = [joint[kind][-1] <= naive[kind][-1] for kind in ("mean_error", "variance_error")]
    told = [
        f"of the {kind} joint {joint[f'{kind}_error'][-1]:.3g} and naive {naive[f'{kind}_error'][-1]:.3g}"
        for kind in ("mean", "variance")
    ]
    verdict = AGREES if all(closer) else DIFFERS
    yield verdict, f"Error against NUTS at the end: {', '.join(told)}."


def _largest(value) -> float:
    """The largest number in what a JSON record holds: a number, a list or a dictionary."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return max((_largest(entry) for entry in value), default=math.nan)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _gap(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def overview(results: Path) -> Table:
    """One line a task: the best ELBO of the main estimators and how much sooner joint is at naive's.

    Raises:
        MissingResults: no task has been run.
    """
    shown = ("naive", "cv", "joint", *OURS)
    lines, missing = [], []
    for name, task in TASKS.items():
        try:
            found = curves(results, name)
        except MissingResults as error:
            missing.append(f"{error}.")
            continue
        values = [found[key].best if key in found else math.nan for key in shown]
        best = max((value for value in values if math.isfinite(value)), default=math.nan)
        cells = [
            Cell(elbo(name, value) if math.isfinite(value) else NOTHING, value, value == best)
            for value in values
        ]
        lines.append((Cell(task.title), *cells, *_gains(results, name, found)))
    if not lines:
        raise MissingResults(" ".join(missing))
    return Table(
        "Best ELBO over step sizes, and how much sooner joint is at naive's best",
        ("task", *shown, "fewer steps by", "faster by"),
        tuple(lines),
        ("Marked: the best of the line. Of dropout the training objective, which falls.", *missing),
    )


def _gains(results: Path, task: str, found: Mapping[str, Curve]) -> list[Cell]:
    joint, seconds = joint_name(found), seconds_per_step(results, task)
    if joint is None or "naive" not in found:
        return [Cell(NOTHING), Cell(NOTHING)]
    target = found["naive"].best
    own, base = arrival(found[joint], target, seconds), arrival(found["naive"], target, seconds)
    if not math.isfinite(own.steps) or own.steps <= 0:
        return [Cell("not reached"), Cell(NOTHING)]
    gains = (base.steps / own.steps, base.seconds / own.seconds)
    return [Cell(f"{ratio(gain)}×" if math.isfinite(gain) else NOTHING, gain) for gain in gains]
