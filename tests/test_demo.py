"""The demo, on a few flights."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
AIRLINES = 16


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(ROOT / "examples" / "flights.py"), "--output", str(folder)]
    options = ["--flights", "20000", "--epochs", "4"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, folder


def rows(output: str, first: str) -> list[list[str]]:
    """The lines of a table, from the one under its head to the next empty one."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith(first)) + 1
    stop = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    return [line.split() for line in lines[start:stop]]


def number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


def test_table_shows_what_the_controls_do(demo):
    table = {row[0] if row[0] != "joint," else "default": row for row in rows(demo[0], "batch")}
    assert list(table) == ["naive", "cv", "joint", "default"]
    elbo, location, log_scale = (
        {name: number(row[place]) for name, row in table.items()} for place in (-4, -3, -2)
    )
    assert location["joint"] < location["cv"] / 10 and location["default"] < location["joint"]
    assert log_scale["cv"] < log_scale["naive"] / 10
    assert max(elbo.values()) in (elbo["joint"], elbo["default"])


def test_every_airline_has_an_interval(demo):
    airlines = rows(demo[0], "airline")
    assert AIRLINES - 2 <= len(airlines) <= AIRLINES  # the smallest may have no flight among so few
    for row in airlines:
        low, high, middle = number(row[-3]), number(row[-1]), number(row[-4])
        assert 0 < low <= middle <= high


def test_figure_is_saved(demo):
    assert (demo[1] / "flights.png").stat().st_size > 20_000
