"""The Python blocks of the README and of the docs run, page by page, as a reader would run them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jointcv as jcv

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES = {
    str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
WITH_CODE = [name for name, path in PAGES.items() if BLOCK.search(path.read_text())]


def code_of(path: Path) -> str:
    """All blocks of a page, each at its own line, so that a traceback points at the page."""
    lines = [""] * len(path.read_text().splitlines())
    for block in BLOCK.finditer(path.read_text()):
        first = path.read_text().count("\n", 0, block.start(1))
        body = block.group(1).splitlines()
        lines[first : first + len(body)] = body
    return "\n".join(lines)


@pytest.mark.parametrize("name", WITH_CODE)
def test_code_runs(name, tmp_path):
    program = tmp_path / "page.py"
    program.write_text(code_of(PAGES[name]))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, f"{name} (lines as on the page)\n{done.stderr}"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    path = PAGES[name]
    targets = [target for target in LINK.findall(path.read_text()) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_pages_with_code_are_found():
    pages = {"README.md", "docs/quickstart.md", "docs/numpyro.md", "docs/extend.md", "docs/view.md"}
    assert pages <= set(WITH_CODE)


def test_reference_lists_every_public_name():
    listed = {
        line.rpartition(".")[2] for line in PAGES["docs/api.md"].read_text().splitlines() if ":::" in line
    }
    module = (ROOT / "src" / "jointcv" / "__init__.py").read_text()
    public = set(re.findall(r"import \w+ as (\w+)$", module, re.MULTILINE)) - {"numpyro"}
    assert public <= set(dir(jcv))
    assert public - listed == set()


def test_measured_tables_are_those_of_the_files():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "figures" / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = PAGES["docs/view.md"].read_text()
    assert page == tables.fill(page), "docs/numbers has changed: run python docs/figures/tables.py"
    emptied = page[: page.index(tables.BEGIN)] + tables.BEGIN + page[page.index(tables.END) :]
    assert tables.fill(emptied) == page and len(emptied) < len(page)
