# Every target installs what it needs into .venv, from nothing but python3 (3.11 to 3.13).

PYTHON ?= python3
WORKERS ?= 2

bin := .venv/bin
versions := constraints/versions.txt
benchmarks := steps memory natural ablation glms

.PHONY: demo test lint format docs bench clean

demo: .venv/installed-demo
	$(bin)/python examples/flights.py

test: .venv/installed-dev
	$(bin)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: .venv/installed-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright

format: .venv/installed-dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --quiet --strict

bench: $(benchmarks:%=bench-output/%.json)

# A benchmark is run again each time it is asked for; natural and ablation go on from the runs that their file has.
.PHONY: $(benchmarks:%=bench-output/%.json)
bench-output/%.json: .venv/installed-dev
	mkdir -p bench-output
	$(bin)/python benchmarks/$*.py --json $@

clean:
	rm -rf .venv site demo-output bench-output

.venv/bin/pip:
	$(PYTHON) -m venv --clear .venv

.venv/installed-%: pyproject.toml $(versions) | .venv/bin/pip
	$(bin)/python -m pip install --quiet --disable-pip-version-check --constraint $(versions) --editable ".[$*]"
	touch $@
