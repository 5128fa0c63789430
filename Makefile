# Everything runs in .venv. Targets that need it make it first, and again when pyproject.toml changes.

PYTHON ?= python3.11 python3
STAMP := .venv/.installed-dev
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint

help:
	@echo "make setup   a virtual environment in .venv with everything for development"
	@echo "make demo    generate text with the small model that comes with the package"
	@echo "make test    lint rules, then the tests, on CPU"
	@echo "make lint    lint rules, formatting and types"

setup: $(STAMP)

# The stamp comes last, so an installation that was interrupted is taken up again.
$(STAMP): pyproject.toml
	@if ! .venv/bin/python -c '$(IS_NEW_ENOUGH)' 2>/dev/null || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
		found=; for python in $(PYTHON); do \
			if "$$python" -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then found="$$python"; break; fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "No Python 3.11 or newer among: $(PYTHON). Name one: make setup PYTHON=/path/to/python" >&2; exit 1; \
		fi; \
		echo "setup: making .venv with $$($$found --version)"; \
		"$$found" -m venv --clear .venv || exit 1; \
	fi
	@echo "setup: installing kimi_jax and its development tools (the first time takes some minutes)"
	@.venv/bin/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@
	@echo "setup: done"

demo: setup
	@.venv/bin/kimi-jax generate "The Queen looked at Alice" --devices 8 --max-new-tokens 120 --temperature 0.6 --top-p 0.9 --seed 3

test: setup
	.venv/bin/ruff check
	JAX_PLATFORMS=cpu .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 8

lint: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright
