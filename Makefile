# Everything works from a fresh clone with Python 3.11+, pip and make. Nothing needs root.
PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt

.PHONY: demo test test-slow docs lint types clean

## Train a small ViT on real digits and see where it looks, in about a minute
demo: .venv/demo-installed
	.venv/bin/vitrail demo

## Lint, format, types and all tests
test: .venv/dev-installed lint types
	.venv/bin/python -m pytest -n 2 -m 'not slow and not alone'
	.venv/bin/python -m pytest -m 'alone and not slow'

## The long proofs: kills, several processes, exports of every option, examples; some 15 minutes on two cores
test-slow: .venv/dev-installed
	.venv/bin/python -m pytest -m slow

## The documentation as a site in site/; a broken link is an error
docs: .venv/dev-installed
	.venv/bin/mkdocs build --strict -q

lint: .venv/dev-installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/dev-installed
	.venv/bin/mypy

## Remove the environment and caches, not your runs
clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Vitrail needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Use: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv

# pip runs only when the environment is new or what it should hold has changed.
.venv/demo-installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[train,inspect]'
	@touch $@

.venv/dev-installed: pyproject.toml course/pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[dev]' -e ./course
	@touch $@ .venv/demo-installed
