"""Fills the tables of view.md from numbers/*.json, which two benchmarks write. Run from anywhere.

JOINTCV_DATA=... python benchmarks/steps.py --json docs/numbers/steps.json
JOINTCV_DATA=... python benchmarks/memory.py --json docs/numbers/memory.json
python docs/figures/tables.py
"""

import json
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "view.md"
BEGIN = "<!-- numbers: written by docs/figures/tables.py from docs/numbers/*.json -->"
END = "<!-- end of numbers -->"
TASKS = {"tennis": "Tennis", "mnist": "MNIST", "movielens": "MovieLens", "ppca": "PPCA"}


def main() -> None:
    PAGE.write_text(fill(PAGE.read_text()))


def fill(page: str) -> str:
    """The page, with the tables between its marks."""
    steps, memory = (
        json.loads((DOCS / "numbers" / f"{name}.json").read_text()) for name in ("steps", "memory")
    )
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    parts = [BEGIN, memory_table(memory), step_tables(steps), END]
    return before + "\n\n".join(parts) + after


def memory_table(results: dict) -> str:
    rows = []
    for task, sizes in results["memory"].items():
        naive, joint = sizes["naive"], sizes["joint"]
        row = [
            TASKS[task],
            f"{joint['num_data']:,}",
            f"{joint['dim']:,}",
            f"{joint['extra_bytes'] / 1e6:.1f} MB",
            f"{sizes['paper_bytes'] / 1e9:.1f} GB",
            f"{naive['peak_bytes'] / 1e6:,.0f} MB",
            f"{joint['peak_bytes'] / 1e6:,.0f} MB",
        ]
        rows.append(row)
    head = ["", "N", "D", "table and mean", "N × 2D numbers", "process, naive", "process, joint"]
    words = (
        "What `joint` keeps, beside the table of a location and a scale for every datum, and the peak memory of the "
        f"whole process ([memory.json](numbers/memory.json); {machine(results)}):"
    )
    return f"{wrapped(words)}\n\n{table(head, rows)}"


def step_tables(results: dict) -> str:
    """A table for one core and one for two; all estimators that any task has, in the order of the file."""
    tasks = results["steps"]
    words = (
        "Milliseconds a step, batch 100, and in brackets the ratio to `naive` of the same task and run "
        f"([steps.json](numbers/steps.json); {machine(results)}). Where nothing else is said, a step draws one `ε` of "
        "dimension D, as in the paper; Adam moves all but the natural steps."
    )
    parts = [wrapped(words)]
    for cores, title in (("1", "Pinned to one core:"), ("2", "On two cores:")):
        names = dict.fromkeys(name for times in tasks.values() for name in times[cores])
        rows = [[name, *(cell(times[cores], name) for times in tasks.values())] for name in names]
        parts += [title, table(["", *(TASKS[task] for task in tasks)], rows)]
    return "\n\n".join(parts)


def cell(times: dict, name: str) -> str:
    if name not in times:
        return ""
    milliseconds, naive = times[name]["ms"], times["naive"]["ms"]
    return f"{milliseconds:.3f} ({milliseconds / naive:.2f})"


def machine(results: dict) -> str:
    """What the numbers were measured on."""
    said = results["machine"]
    return (
        f"commit {said['commit']}, {said['date']}, JAX {said['jax']} on {said['device'].upper()}, "
        f"{said['cores']} cores, load {said['load']:.1f}"
    )


def wrapped(words: str) -> str:
    return textwrap.fill(words, 120, break_on_hyphens=False)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
