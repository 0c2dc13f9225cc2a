# Everything a person types. Each target sets up what it needs; PYTHON=path takes an existing environment instead.
.PHONY: setup demo demo-rl bench-trl test test-all test-share test-unit durations mutants coverage slow-map test-gpu test-vllm setup-vllm test-agents setup-agents test-tinker setup-tinker test-next setup-next wheels-gpu check bench soak decoders docs clean

SHELL := bash
# Tests start many processes, which would compile every module anew where the environment forbids to keep compiled ones.
export PYTHONDONTWRITEBYTECODE :=

ifdef PYTHON
PY := $(PYTHON)
SETUP := .types/drivetrain
export PYTHONPATH := $(CURDIR)/.types
else
PY := .venv/bin/python
SETUP := setup
endif


# The repository root is the package: a link gives it its name where it is not installed.
.types/drivetrain:
	mkdir -p .types && ln -sfn .. .types/drivetrain

setup: .types/drivetrain
	@bash .ci/setup
	@echo "the environment is in .venv; activate it with: source .venv/bin/activate"

demo: $(SETUP)
	$(PY) -m drivetrain.cli demo $(if $(NPROC),--nproc $(NPROC))

# GRPO, PPO, Megatron-core, and rewards without a learning signal; half an hour to an hour on two cores.
demo-rl: $(SETUP)
	$(PY) -m drivetrain.cli demo grpo
	$(PY) -m drivetrain.cli demo grpo --algorithm ppo --output runs/demo-ppo
	$(PY) -m drivetrain.cli demo grpo --engine mcore --output runs/demo-grpo-mcore
	$(PY) -m drivetrain.cli demo grpo --shuffled --output runs/demo-grpo-shuffled

# Files side by side, one more than there are cores: much of a test's time is a process waiting for another one.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores + 1 : 4)))
# A process that crashes fails the run: its test would be run again, and crash again, as often as there may be new processes.
PYTEST_OPTIONS := -n $(WORKERS) --dist loadfile --max-worker-restart 0
PYTEST := $(PY) -m pytest $(PYTEST_OPTIONS)

# Everything that is not slow: what a change is tested with.
test: $(SETUP)
	$(PYTEST) -m "not slow"

test-all: $(SETUP)
	$(PYTEST)

# What continuous integration runs: the fast tests, the part SHARE of the slow ones, and those that execute what has changed since a commit.
SHARE ?= 0/7
test-share: $(SETUP)
	$(PYTEST) --slow-share $(SHARE) $(if $(SINCE),--changed-since $(SINCE))

test-unit: $(SETUP)
	$(PYTEST) -m "not slow" tests/unit

durations: $(SETUP)
	$(PYTEST) -m "not slow" --durations 20 --durations-min 0.5

# Deliberate defects: which of them the fast tests catch.
mutants: $(SETUP)
	$(PY) tests/mutants.py $(if $(ALL),--all)

# Of product code, by the fast tests, then by all of them; every process that they start is counted. About an hour.
coverage: OTHER_ENVIRONMENT = */generation/vllm/*
coverage: $(SETUP)
	$(PY) -m coverage erase
	-$(PY) -m coverage run -m pytest $(PYTEST_OPTIONS) -m "not slow"
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report > .coverage-fast.txt
	$(PY) -m coverage report --omit="$(OTHER_ENVIRONMENT)" | grep TOTAL > .coverage-fast-here.txt
	-$(PY) -m coverage run -m pytest $(PYTEST_OPTIONS) -m slow
	$(PY) -m coverage combine --quiet --append
	$(PY) -m coverage report
	@echo "the fast tests alone: $$(tail -n 3 .coverage-fast.txt | grep TOTAL)"
	@echo "without the code that make test-vllm runs: $$($(PY) -m coverage report --omit="$(OTHER_ENVIRONMENT)" | grep TOTAL)"
	@echo "and the fast tests alone: $$(cat .coverage-fast-here.txt)"

# Which modules each slow test executes, for the choice of test-share: an hour or more. Of some files: make slow-map FILES=tests/e2e/test_rl.py
slow-map: $(SETUP)
	$(PY) tests/slow_map.py $(FILES)

# Only the files with tests for a GPU: others import packages that a GPU machine may lack. What make wheels-gpu collected is used as well.
test-gpu: GPU_TESTS = $(shell grep -rlE --include='test_*.py' '^(pytestmark = |@)pytest\.mark\.gpu' tests/distributed tests/e2e)
test-gpu: $(SETUP)
	@for wheel in $(wildcard .wheels/*.whl); do $(PY) -m zipfile -e $$wheel .wheels/site; done
	PYTHONPATH=$(PYTHONPATH):$(CURDIR)/.wheels/site $(PY) .ci/gpu_needs.py; lacks=$$?; \
	PYTHONPATH=$(PYTHONPATH):$(CURDIR)/.wheels/site $(PY) -m pytest -m gpu -vv -rs $(GPU_TESTS) && exit $$lacks

# vLLM has an environment of its own, and no part in continuous integration.
setup-vllm: $(SETUP)
	.ci/setup-vllm

test-vllm: setup-vllm
	PYTHONPATH=$(CURDIR)/.types .venv-vllm/bin/python -m pytest -p no:cacheprovider tests/distributed/test_vllm.py -v -rs

# So have the environments of other projects.
setup-tinker: $(SETUP)
	.ci/setup-tinker

# The training service with clients of several versions, each in a Python environment of its own.
test-tinker: setup-tinker
	$(PY) -m pytest tests/e2e/test_tinker_versions.py tests/e2e/test_tinker_recipes.py

setup-agents: $(SETUP)
	.ci/setup-agents

test-agents: setup-agents
	$(PY) -m pytest -p no:cacheprovider tests/e2e/test_foreign_environments.py -v -rs

# For a GPU machine without a network that has PyTorch, transformers and pytest, Python 3.12 on Linux, but not these.
GPU_WHEELS := omegaconf datasets dill multiprocess tensordict pyvers megatron-core msgspec pyzmq
wheels-gpu: $(SETUP)
	rm -rf .wheels
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
		--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
		--constraint constraints.txt --dest .wheels $(GPU_WHEELS)
	@size=$$(git ls-files -z | cat - <(printf '%s\0' .wheels/*.whl) | xargs -0 du -cm | tail -1 | cut -f1); \
		echo "checkout and wheels: $$size MB"; test $$size -lt 60

check: $(SETUP) .types/drivetrain
	$(PY) .ci/check_files.py
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	MYPYPATH=.types:tests:examples $(PY) -m mypy $(addprefix -p drivetrain.,checkpoint_tools engine environments generation losses media rewards serve trainers workers) -m drivetrain.cli -m drivetrain.commands -m drivetrain.lazy_imports -m drivetrain.launch
	MYPYPATH=.types:tests:examples $(PY) -m mypy tests benchmarks examples docs
	PYTHONPATH=.types $(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"
	$(PY) -m pytest tests/unit/test_config.py -k "package_list"

bench: $(SETUP)
	$(PY) -m benchmarks

# With the newest releases, on Python 3.12: the parity table, conformance of both engines, merge, and the engines' own tests.
setup-next:
	.ci/setup-next

test-next: setup-next .types/drivetrain
	PYTHONPATH=$(CURDIR)/.types:$(CURDIR)/tests OMP_NUM_THREADS=1 .venv-next/bin/python -m pytest -p no:cacheprovider -n 2 --dist loadfile -rs \
		$(addprefix tests/distributed/test_,parity.py conformance.py merge.py mcore.py fsdp.py fsdp_parts.py families.py adapters.py)

# In turns with TRL, which has an environment of its own.
bench-trl: $(SETUP)
	.ci/setup-trl
	$(PY) -m benchmarks --only rl trl step mcore preference

# Which decoders of the installed transformers run packed, and why the others are refused.
decoders: $(SETUP)
	OMP_NUM_THREADS=1 PYTHONPATH=.types:tests $(PY) tests/decoders.py

soak: $(SETUP)
	$(PY) tests/soak.py --kills $(or $(KILLS),200)
	PYTHONPATH=$(CURDIR)/.types:$(CURDIR)/tests $(PY) tests/rl_soak.py --kills $(or $(KILLS),100)
	PYTHONPATH=$(CURDIR)/.types:$(CURDIR)/tests $(PY) tests/rl_soak.py --kills $(or $(KILLS),100) --agents
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.types:$(CURDIR)/tests $(PY) tests/tinker_load.py

docs: $(SETUP)
	$(PY) -m docs.reference
	$(PY) -m docs.algorithms
	$(PY) -m docs.sizes
	$(PY) -m docs.llms
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "open site/index.html"

clean:
	rm -rf .venv .types .wheels build dist site runs *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
