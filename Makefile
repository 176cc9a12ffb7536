# Works on a fresh machine with Python >= 3.11, pip and make; everything is installed into .venv, once.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TORCH := $(shell grep '^torch==' constraints.txt)
# One thread a process, so that two test workers fit two cores.
export OMP_NUM_THREADS ?= 1
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup -q
VARIANTS := on-avx2-in-random-order on-default-kernels-with-two-threads

.PHONY: demo test unit quick slow matrix variants $(VARIANTS) lint

demo: $(STAMP)
	$(BIN)/nanguard demo

test: $(STAMP)
	@$(MAKE) -j 2 lint unit  # the type checker takes one core for a minute

unit: $(STAMP)
	$(PYTEST) -m "not slow"

# The core, and of the host layer what tells most in little time.
QUICK := tests/core tests/report tests/test_layering.py tests/test_surface.py tests/hf/trainer/test_arguments.py \
	tests/hf/compat/test_trainer.py tests/hf/test_guarded_trainer.py

quick: lint
	$(PYTEST) -m "not slow and not distributed" $(QUICK)

slow: variants
	$(PYTEST) -m slow --timeout=3600

# The laws with older and newer versions of the hosts; writes the table of docs/versions.md.
matrix: $(STAMP)
	$(BIN)/python -m tests.version_matrix

# The tests of `make test` twice more: on the kernels of other CPUs, and as a background job or nohup starts them.
variants: $(VARIANTS)

on-avx2-in-random-order: export ATEN_CPU_CAPABILITY := avx2
on-avx2-in-random-order: export ONEDNN_MAX_CPU_ISA := AVX2
on-avx2-in-random-order: export MKL_ENABLE_INSTRUCTIONS := AVX2
on-avx2-in-random-order: OPTIONS := --shuffle $(shell date +%s)
on-avx2-in-random-order: BEFORE := trap '' INT HUP;
on-default-kernels-with-two-threads: export ATEN_CPU_CAPABILITY := default
on-default-kernels-with-two-threads: export ONEDNN_MAX_CPU_ISA := SSE41
on-default-kernels-with-two-threads: export MKL_ENABLE_INSTRUCTIONS := SSE4_2
on-default-kernels-with-two-threads: export OMP_NUM_THREADS := 2

$(VARIANTS): $(STAMP)
	@echo "==== make test $@ ===="
	@$(BEFORE) $(PYTEST) -m "not slow" $(OPTIONS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python must be 3.11 or newer, got $$($(PYTHON) --version 2>&1). Run make PYTHON=/path/to/python3."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $(STAMP)
