"""The NumPyro examples: two versions that differ in one line, and both run."""

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SIZES = {
    "regression": ["--num-data=300", "--num-steps=300"],
    "hierarchical": ["--num-data=300", "--num-groups=5", "--num-steps=300"],
    "bradley_terry": ["--num-data=300", "--num-players=8", "--num-steps=300"],
    "softmax": ["--num-data=300", "--num-features=4", "--num-steps=300"],
}


@pytest.mark.parametrize("name", SIZES)
def test_versions_differ_in_one_line(name):
    versions = [
        (EXAMPLES / f"{name}_{library}.py").read_text().splitlines() for library in ("numpyro", "jointcv")
    ]
    changes = [line for line in difflib.ndiff(*versions) if line[:2] in ("- ", "+ ")]
    assert changes == ["- from numpyro.infer import SVI", "+ from jointcv.numpyro import SVI"]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["numpyro", "jointcv"])
@pytest.mark.parametrize("name", SIZES)
def test_version_runs(name, library):
    script = EXAMPLES / f"{name}_{library}.py"
    run = subprocess.run([sys.executable, script, *SIZES[name]], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "nan" not in run.stdout
    assert "loss" in run.stdout
