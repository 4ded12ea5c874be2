# Everything that CI calls and that the README names.
#
# The tests run on the newest JAX where a Python for it (3.12 or later) is installed; a sample of
# them, and with `test-full` all, on the lowest supported version.

SHELL := /bin/bash
.DELETE_ON_ERROR:

PYENV_PYTHONS := $(wildcard $(HOME)/.pyenv/versions/3.1[2-9].*/bin/python3)
NEW_PYTHON := $(shell for p in python3.14 python3.13 python3.12 python3 $(PYENV_PYTHONS); do \
	$$p -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 12)' 2>/dev/null \
	&& echo $$p && break; done)
# A distribution's Python is optimised, those that pyenv builds are not: tests take 5% longer.
OLD_PYTHON := $(shell for p in /usr/bin/python3.11 python3.11 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; assert sys.version_info >= (3, 11)' 2>/dev/null \
	&& echo $$p && break; done)
ifeq ($(OLD_PYTHON),)
OLD_PYTHON := $(NEW_PYTHON)
endif
ifeq ($(OLD_PYTHON),)
$(error jax_scalify needs Python 3.11 or later, and none was found on the PATH)
endif
MAIN_PYTHON := $(or $(NEW_PYTHON),$(OLD_PYTHON))

VENV ?= .venv
VENV_LOWEST ?= .venv-lowest
VENV_ACCELERATORS ?= .venv-accelerators
VENV_GPU ?= .venv-gpu
# The demo takes a GPU if there is one. All else runs on the CPU, but for targets that empty this.
DEMO_PLATFORMS := $(JAX_PLATFORMS)
DEMO_VENV = $(if $(shell nvidia-smi -L 2>/dev/null),$(VENV_GPU),$(VENV))
export JAX_PLATFORMS ?= cpu
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Tests start many processes: without bytecode that is kept, each compiles JAX's sources again.
export PYTHONDONTWRITEBYTECODE =
# In the order of their names: the last files, of doctests, are short, and no worker waits long.
PYTEST_FLAGS ?= -q -n 2 --dist loadfile --no-loadscope-reorder
EXAMPLES = digits_mlp digits_cnn digits_equinox digits_vit masked_lm

.PHONY: environments other-checks ci docs site package examples release-check demo test test-full test-nightly test-newest test-lowest lint format table3 bench-cost coverage \
	scale-quality golden golden-accelerators float16-training parity parity-seeds fp8 block-scales gpu-fp8 gpu-steps gradient-errors gradients optimizers soak tracking numerics umup fuzz fuzz-steps fuzz-lowest accelerators integrations scale-out kept clean

demo:  ## train a GPT in every precision: table and plot under runs/demo
	@echo "This makes the environment $(DEMO_VENV), which takes some minutes the first time."
	@echo "Then a GPT learns English in nine precisions, on a GPU if there is one, into runs/demo:"
	@echo "about three minutes on two free CPU cores. Stopped, it goes on."
	@$(MAKE) --no-print-directory $(DEMO_VENV)/.installed
	@mkdir -p runs/demo
	JAX_PLATFORMS=$(DEMO_PLATFORMS) $(DEMO_VENV)/bin/python -m examples.gpt --preset all --steps 100 --out runs/demo --resume

# The tests on the newest JAX and, beside them, the targets $(1), so that no core waits for the last
# tests of a run. What these print comes when all has ended.
define tests-beside
@$(MAKE) --no-print-directory -j2 environments
@others=$$(mktemp); failed=0; \
$(MAKE) --no-print-directory --keep-going $(1) > "$$others" 2>&1 & pid=$$!; \
$(MAKE) --no-print-directory test-newest || failed=1; \
wait $$pid || failed=1; \
cat "$$others"; rm "$$others"; exit $$failed
endef

test:  ## the tests on the newest JAX, and a sample of them on the lowest
	$(call tests-beside,$(if $(NEW_PYTHON),test-lowest,environments))

ci:  ## what CI runs: the tests, lint, the site and the package
	$(call tests-beside,other-checks)

environments: $(VENV)/.installed $(if $(NEW_PYTHON),$(VENV_LOWEST)/.installed)  ## what all else runs in

other-checks: lint site package $(if $(NEW_PYTHON),test-lowest)

test-newest: $(VENV)/.installed
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS)

test-lowest: $(VENV_LOWEST)/.installed
	$(VENV_LOWEST)/bin/python -m pytest $(PYTEST_FLAGS) -n 1 --sample 25

# What a coming JAX breaks, in an environment of its own; the bounds of pyproject.toml do not hold.
test-nightly: $(VENV)/.installed  ## a report on the newest pre-release of JAX, of what the registry has
	$(VENV)/bin/python scripts/test_nightly.py --python $(MAIN_PYTHON)

test-full: $(VENV)/.installed $(VENV_LOWEST)/.installed  ## every test on both versions
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS) --full
	$(VENV_LOWEST)/bin/python -m pytest $(PYTEST_FLAGS) --full

lint: $(VENV)/.installed  ## formatting, lint, types and the prose of the pages
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/python scripts/check_prose.py

format: $(VENV)/.installed
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: site  ## the site, and its examples, links and reference as tests
	$(VENV)/bin/python -m pytest $(PYTEST_FLAGS) $(wildcard tests/test_doc*.py) tests/test_tutorial.py tests/test_architecture.py jax_scalify

# A broken link and a public name without documentation are errors.
site: $(VENV)/.installed  ## the site, under docs/_build/html
	rm -rf docs/_build
	$(VENV)/bin/python -m sphinx -q -W --keep-going -n -b html docs docs/_build/html
	@echo docs/_build/html/index.html

package: $(VENV)/.installed  ## wheel and sdist, as a user would meet them
	$(VENV)/bin/python scripts/check_package.py

examples: $(VENV)/.installed  ## the small examples, in every precision: tables, and pictures under runs
	set -e; for name in $(EXAMPLES); do $(VENV)/bin/python -m examples.$$name; done

release-check: lint test-full site examples  ## all that has to hold before a release
	$(VENV)/bin/python docs/tutorial.py
	$(VENV)/bin/python scripts/check_package.py --release

table3: $(VENV)/.installed  ## Table 3 of the paper; goes on where it was stopped
	$(VENV)/bin/python -m benchmarks.accuracy.table3

# The newest JAX comes last: it writes the page from the results of both.
bench-cost: $(VENV)/.installed $(VENV_LOWEST)/.installed  ## compile time, size, step time, memory; docs/cost.md
	$(VENV_LOWEST)/bin/python -m benchmarks.cost.steps --repeats 1
	$(VENV)/bin/python -m benchmarks.cost.steps --docs docs/cost.md

scale-quality: $(VENV)/.installed  ## RMS of every activation and gradient's data, for eight models
	$(VENV)/bin/python -m benchmarks.accuracy.scale_quality

golden: $(VENV)/.installed  ## what has moved since the golden file: scales, losses and sizes of eight models
	$(VENV)/bin/python -m benchmarks.golden

golden-accelerators: $(VENV_ACCELERATORS)/.installed
	$(VENV_ACCELERATORS)/bin/python -m benchmarks.golden --parts accelerators

float16-training: $(VENV)/.installed  ## a GPT, a Llama and a BERT with everything in float16, and with FP8
	$(VENV)/bin/python -m benchmarks.accuracy.float16_training

# Cells that are stored are not trained again; the last tables are of `parity-seeds`, as stored. A
# calibration of the LSTM, 32 steps of it unrolled, takes a quarter of an hour to compile for a CPU.
PARITY_SEEDS = $(VENV)/bin/python -m benchmarks.accuracy.parity_seeds
PARITY_GPU = --table benchmarks/results/parity-NVIDIA-H200-jax0.11.2.json --modes dynamic frozen
PARITY_FP8 = fp8-hidden fp8 fp8-moment fp8-gradients
PARITY_PARTS = fp8-forward fp8-backward fp8-attention-in fp8-attention-out fp8-up fp8-down
PARITY_FINISHES = fp8-finish-10 fp8-finish-20

parity: $(VENV)/.installed  ## float16 and FP8 against float32, with dynamic and with static scales
	$(VENV)/bin/python -m benchmarks.accuracy.parity --models gpt4 llama moe bert vit resnet
	$(VENV)/bin/python -m benchmarks.accuracy.parity --models lstm --modes dynamic
	$(VENV)/bin/python -m benchmarks.accuracy.parity --models resnet --modes dynamic --seeds 0 1 2 3 4 5 6 7 8 9 10 11
	$(VENV)/bin/python -m benchmarks.accuracy.parity --models gpt4 --variants fp8-hidden --modes frozen --seeds 0 --steps 25000
	$(PARITY_SEEDS) $(PARITY_GPU) --variants bfloat16 float16 $(PARITY_FP8)
	$(PARITY_SEEDS) $(PARITY_GPU) --models gpt4 llama --variants $(PARITY_PARTS) $(PARITY_FINISHES)
	$(PARITY_SEEDS) $(PARITY_GPU) --steps 5000 --variants float16 float16-fp8-moments
	$(PARITY_SEEDS) $(PARITY_GPU) --steps 25000
	$(PARITY_SEEDS) --table benchmarks/results/parity-cpu-jax0.12.0.1.json --modes dynamic frozen --variants $(PARITY_FP8)

fp8: $(VENV)/.installed  ## FP8 matmuls: ours, Flax's and (if installed) Qwix's
	$(VENV)/bin/python -m benchmarks.accuracy.fp8

block-scales: $(VENV)/.installed  ## MXFP8, MXFP4, NVFP4 with our scales and without: errors of matmuls, losses
	$(VENV)/bin/python -m benchmarks.accuracy.block_scales

gradient-errors: $(VENV)/.installed  ## what FP8 does to gradients at the same weights, by pass and by layer
	$(VENV)/bin/python -m benchmarks.accuracy.gradient_errors

gradients: $(VENV)/.installed  ## a GPT on eight devices whose gradients travel in float32, float16, E5M2
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(VENV)/bin/python -m benchmarks.accuracy.gradients

optimizers: $(VENV)/.installed  ## every optimizer of optax with float16 state, and the alternatives
	$(VENV)/bin/python -m benchmarks.accuracy.optimizers

soak: $(VENV)/.installed  ## 20,000 steps with everything in float16: is any of the state out of range?
	$(VENV)/bin/python -m benchmarks.accuracy.soak

numerics: $(VENV)/.installed  ## what float16 and E5M2 lose of a GPT's training step; docs/numerics.md
	$(VENV)/bin/python -m benchmarks.accuracy.numerics_page

umup: $(VENV)/.installed  ## do learning rates transfer under u-µP? FP8 and float16 by unit scaling
	$(VENV)/bin/python -m benchmarks.transfer.umup

tracking: $(VENV)/.installed  ## what a record of scales and ranges each 100 steps costs
	$(VENV)/bin/python -m benchmarks.cost.tracking

# On a machine with an H100 or a newer GPU, and JAX for it: `.venv/bin/pip install 'jax[cuda13]'`.
gpu-fp8: $(VENV)/.installed  ## matmuls and transformer layers in bfloat16 and FP8, on a GPU
	JAX_PLATFORMS= $(VENV)/bin/python -m benchmarks.cost.gpu_fp8

gpu-steps: $(VENV)/.installed  ## whole training steps in bfloat16, float16 and FP8, on a GPU
	JAX_PLATFORMS= $(VENV)/bin/python -m benchmarks.cost.gpu_steps

parity-seeds: $(VENV)/.installed  ## models of parity, 128 seeds and more of each, on a GPU
	JAX_PLATFORMS= $(PARITY_SEEDS) --models gpt4 llama moe bert --variants float32 bfloat16 float16 $(PARITY_FP8)
	JAX_PLATFORMS= $(PARITY_SEEDS) --models lstm --seeds 256 --variants float32 bfloat16 float16 $(PARITY_FP8)
	JAX_PLATFORMS= $(PARITY_SEEDS) --models vit --seeds 384 --variants float32 bfloat16 float16 $(PARITY_FP8)
	JAX_PLATFORMS= $(PARITY_SEEDS) --models gpt4 llama moe bert --variants float16 fp8-hidden --modes frozen
	JAX_PLATFORMS= $(PARITY_SEEDS) --models lstm --seeds 256 --variants float16 fp8-hidden --modes frozen
	JAX_PLATFORMS= $(PARITY_SEEDS) --models vit --seeds 384 --variants float16 fp8-hidden --modes frozen
	JAX_PLATFORMS= $(PARITY_SEEDS) --models gpt4 --variants $(PARITY_PARTS)
	JAX_PLATFORMS= $(PARITY_SEEDS) --models gpt4 llama --variants $(PARITY_FINISHES)
	JAX_PLATFORMS= $(PARITY_SEEDS) --models gpt4 llama --seeds 32 --steps 5000 --variants float32 float16 float16-fp8-moments
	JAX_PLATFORMS= $(PARITY_SEEDS) --models gpt4 --seeds 32 --steps 25000 --variants float32 float16 fp8-hidden --modes dynamic frozen

# The compilers of GPUs and TPUs, 6 GB, in an environment of their own; no such device is needed.
# CUDA 12: the figures in docs/ were compiled with it.
accelerators: $(VENV_ACCELERATORS)/.installed  ## what steps cost on H100, B200 and TPUs; docs/accelerators.md
	$(VENV_ACCELERATORS)/bin/python -m benchmarks.cost.accelerators --docs docs/accelerators.md

integrations: $(VENV)/.installed  ## the pages of docs/integrations, each in the environment of its library
	$(VENV)/bin/python -m benchmarks.integrations

scale-out: $(VENV_ACCELERATORS)/.installed  ## what Llamas of 8b to 405b ask of H100s and TPUs; docs/scale_out.md
	$(VENV_ACCELERATORS)/bin/python -m benchmarks.cost.scale_out --docs docs/scale_out.md

kept: $(VENV_ACCELERATORS)/.installed  ## memory of training steps, bfloat16 and FP8, on an H100; of docs/fp8.md
	$(VENV_ACCELERATORS)/bin/python -m benchmarks.cost.kept

# The newest JAX comes last: it writes the page from the results of both.
coverage: $(VENV)/.installed $(VENV_LOWEST)/.installed  ## JAX's own test harnesses, and docs/coverage.md
	status=0; for venv in $(VENV_LOWEST) $(VENV); do \
		$$venv/bin/python -m benchmarks.coverage.sweep || status=1; done; exit $$status

# Goes on where it was stopped; failures are kept as programs under .fuzz.
N ?= 10000
SEED ?= 0
fuzz: $(VENV)/.installed  ## N random programs of a SEED, scalified and plain
	$(VENV)/bin/python -m tests.fuzz --programs $(N) --seed $(SEED)

fuzz-steps: $(VENV)/.installed  ## N random training steps of a SEED, 50 times each: do scales stay beside the state?
	$(VENV)/bin/python -m tests.fuzz --steps --programs $(N) --seed $(SEED)

fuzz-lowest: $(VENV_LOWEST)/.installed
	$(VENV_LOWEST)/bin/python -m tests.fuzz --programs $(N) --seed $(SEED)

# $(1): a Python, $(2): the environment, $(3): what is installed into it. uv takes 17 seconds where pip
# takes 80; pip does it where uv is not to be had, or does not know the index that pip knows.
define environment
$(1) -m venv $(2)
$(2)/bin/python -m pip install -q --upgrade pip uv \
	&& $(2)/bin/uv pip install -q --python $(2)/bin/python $(3) \
	|| $(2)/bin/python -m pip install -q --no-compile $(3)
@touch $(2)/.installed
endef

$(VENV)/.installed: pyproject.toml
	$(call environment,$(MAIN_PYTHON),$(VENV),-e '.[dev]')

# The lowest supported JAX, on the lowest Python that is installed.
$(VENV_LOWEST)/.installed: pyproject.toml
	$(call environment,$(OLD_PYTHON),$(VENV_LOWEST),-e '.[test]' jax==0.10.2 jaxlib==0.10.2)

$(VENV_ACCELERATORS)/.installed: pyproject.toml
	$(call environment,$(MAIN_PYTHON),$(VENV_ACCELERATORS),-e '.[test]' 'jax[cuda12]' 'jax[tpu]' qwix)

# Not $(VENV): the tests there must not find a plugin for GPUs.
$(VENV_GPU)/.installed: pyproject.toml
	$(call environment,$(MAIN_PYTHON),$(VENV_GPU),-e '.[examples]' 'jax[cuda13]')

clean:
	rm -rf $(VENV) $(VENV_LOWEST) $(VENV_ACCELERATORS) $(VENV_GPU) .venv-nightly .venv-integrations .jax_cache .pytest_cache .ruff_cache .hypothesis runs docs/_build
