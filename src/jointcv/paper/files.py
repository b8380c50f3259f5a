"""The result files: tidy rows that are added to, and one json a task."""

import csv
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

SWEEP = ("task", "estimator", "step_size", "seed", "epoch", "step", "elbo", "elbo_se", "status")
TIMING = ("task", "estimator", "ms_per_step", "spread", "oracle_calls_per_step", "compile_seconds")
PARTS = ("v_total", "v_data", "v_noise")
VARIANCE = ("task", "estimator", "step", "epoch", "trace_location", "trace_scale", *PARTS)
TABLE1 = ("task", "batch", *PARTS, "end_point", "draws")
NUTS = ("task", "estimator", "step_size", "step", "mean_error", "variance_error", "elbo")
PACKAGES = ("jointcv", "jax", "jaxlib", "equinox", "optax", "numpyro", "numpy")

Row = Mapping[str, Any]


def add_rows(path: Path, names: Sequence[str], rows: Iterable[Row]) -> None:
    """Add rows to a csv file, with a header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file; none if there is no file."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_note(path: Path, **entries: Any) -> None:
    """Add entries to a json file, in the place of earlier ones with these names."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | entries, indent=1, default=str) + "\n")


def add_run(path: Path, facts: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Say in a json file what wrote which rows, beside what it says of earlier runs.

    A run has "estimators", each with the "step_sizes" and "seeds" of its rows. What it has run again is taken
    from earlier runs, and it joins an earlier one that differs in nothing else.

    Args:
        path: of the file.
        facts: what is true of all rows.
        run: stage, estimators, seconds, date, and where it ran.
    """
    known = json.loads(path.read_text()) if path.exists() else {}
    new = json.loads(json.dumps(run, default=str))
    runs = [_without(old, new) for old in known.get("runs", [])]
    runs = [old for old in runs if old["estimators"]]
    same = next((old for old in runs if _origin(old) == _origin(new)), None)
    if same is None:
        runs.append(new)
    else:
        for name, cells in new["estimators"].items():
            before = same["estimators"].get(name, {"step_sizes": [], "seeds": []})
            same["estimators"][name] = {
                kind: list(dict.fromkeys(before[kind] + cells[kind])) for kind in before
            }
        same |= {"seconds": same["seconds"] + new["seconds"], "date": new["date"]}
    path.write_text(json.dumps({**facts, "runs": runs}, indent=1, default=str) + "\n")


def _origin(run: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key not in ("estimators", "seconds", "date")}


def _without(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """A run's entry without the cells that another has run again."""
    if old["stage"] != new["stage"]:
        return old
    kept = {}
    for name, cells in old["estimators"].items():
        again = new["estimators"].get(name)
        left = cells if again is None else _cells_left(cells, again)
        if left is not None:
            kept[name] = left
    return old | {"estimators": kept}


def _cells_left(cells: dict[str, list], again: dict[str, list]) -> dict[str, list] | None:
    """Step sizes × seeds without those that ran again; None if that is all of them."""
    left = {kind: [entry for entry in cells[kind] if entry not in again[kind]] for kind in cells}
    if not left["step_sizes"] and not left["seeds"]:
        return None
    if not left["seeds"]:
        return cells | {"step_sizes": left["step_sizes"]}
    if not left["step_sizes"]:
        return cells | {"seeds": left["seeds"]}
    return cells


def surroundings() -> dict[str, Any]:
    """Commit, device, versions and date of a run."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "commit": _commit(),
        "device": f"{device.platform} ({device.device_kind}), {_processor()}, {cores} core(s)",
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _commit() -> str:
    folder = Path(__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "not in a git checkout"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _plain(value: Any) -> Any:
    return f"{value:.9g}" if isinstance(value, float) else value
