# `make demo` runs the main job, `make test` passes the tests; both do their own set-up.
.PHONY: help setup system compiled demo test campaign newest-slurm campaign-and-newest second-look campaign-crash coverage-core bench bench-checkpoint bench-gpu bench-recovery bench-frameworks bench-engines bench-verify bench-save-scale bench-storage bench-agents lint clean test-slurm-newest torch-oldest test-torch-oldest test-frameworks test-frameworks-oldest test-state-packages docs docs-serve docs-packages dist dist-packages test-packages

PYTHON ?= python3
SUDO := $(shell [ "$$(id -u)" = 0 ] || command -v sudo)
# slurmd starts jobs as other users, so a lab needs root; what runs as root leaves nothing in the checkout
AS_ROOT = $(SUDO) env PYTHONDONTWRITEBYTECODE=1 TEST_REQUIRE_SLURM=$(TEST_REQUIRE_SLURM) TEST_SEED=$(TEST_SEED)
# more at a time than there are cores: stories mostly wait for Slurm
AT_ONCE ?= 4
# modules stay together and long tests come first: tests/scheduling.py
ONE = -p no:cacheprovider --timeout=600
PYTEST = $(ONE) -n $(AT_ONCE) --dist loadscope --durations=40 --durations-min=5 -p tests.second_look --write-failed $(FAILED)
FAILED := .venv/failed-tests
LINTED := .venv/lint.log
LINT = $(V)/ruff check . && $(V)/ruff format --check . && $(V)/mypy && $(V)/mypy --python-version 3.10 --package stepkeeper_trainer && $(V)/lint-imports --no-logo
PACKAGES := slurmctld slurmd slurm-client munge python3-venv strace gcc libc6-dev btrfs-progs e2fsprogs bubblewrap lmod charliecloud-runtime debootstrap rpm chromium
V := .venv/bin

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: system .venv/.ready  ## everything for development, demo and tests, in .venv

# Slurm for the lab cluster.  Without root or apt the tests that need it are skipped, with the reason.
system:
	@missing=$$(for package in $(PACKAGES); do dpkg -s $$package >/dev/null 2>&1 || echo $$package; done); \
	if [ -n "$$missing" ]; then \
	    if command -v apt-get >/dev/null && { [ "$$(id -u)" = 0 ] || [ -n "$(SUDO)" ]; }; then \
	        $(SUDO) env DEBIAN_FRONTEND=noninteractive sh -c \
	            "apt-get update -q && apt-get install -y -q --no-install-recommends $$(echo $$missing)"; \
	    else \
	        echo "not installed, and no root to do it:" $$missing "- tests on a real Slurm will be skipped"; \
	    fi; \
	fi

# torch first: whatever depends on it would otherwise pull a CUDA build
.venv/.ready: pyproject.toml tests/requirements-torch.txt tests/requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(V)/pip install --quiet -r tests/requirements-torch.txt
	$(V)/pip install --quiet -e . -r tests/requirements-dev.txt
	@touch $@

# each process of a test would compile what it imports: what runs as root writes no bytecode.  It takes a second
compiled: setup
	@$(V)/python -m compileall -q supervisor trainer tests

demo: compiled  ## a training job on a real Slurm is preempted and loses nothing
	$(AS_ROOT) $(V)/python -m tests.demo

# style and types are looked at while the first stories wait for Slurm; what they say comes at the end
test: compiled  ## all tests, the stories on a real Slurm included, and `lint`
	@{ $(LINT); } >$(LINTED) 2>&1 & linting=$$!; \
	$(AS_ROOT) $(V)/python -m pytest -m 'not campaign and not newest and not frameworks' $(PYTEST); tested=$$?; \
	wait $$linting || { cat $(LINTED); exit 1; }; tail -n 2 $(LINTED); exit $$tested

campaign: compiled  ## the long ones: each event, at each moment of a run
	$(AS_ROOT) $(V)/python -m pytest -m 'campaign and not newest' $(PYTEST)

newest-slurm: compiled  ## build the newest Slurm, where that has not been done
	$(AS_ROOT) $(V)/python -m tests.lab.newest_or_skip

# one session instead of two, so that nobody waits for the last one twice
campaign-and-newest: newest-slurm  ## both `make campaign` and `make test-slurm-newest`; PART=K/N plays one part
	$(AS_ROOT) $(V)/python -m pytest -m 'campaign or newest' $(PYTEST) $(if $(PART),-p tests.scheduling --campaign-part $(PART))

second-look: setup  ## what failed in the session before, if it was very little, once more and alone
	$(AS_ROOT) $(V)/python -m tests.second_look $(FAILED) tests/unsteady.txt $(ONE)

campaign-crash: setup  ## killed at every call and request that changes a checkpoint: over 1,000, 8 minutes of a core
	STEPKEEPER_CRASH_STRIDE=1 $(V)/python -m pytest -m campaign tests/trainer/test_crash.py -rP $(PYTEST)

coverage-core: setup  ## every branch of the rules is played by a scenario or a test
	COVERAGE_FILE=.venv/coverage-core $(V)/python -m coverage run -m pytest -q -p no:cacheprovider tests/core --ignore tests/core/test_properties.py
	COVERAGE_FILE=.venv/coverage-core $(V)/python -m coverage report

test-slurm-newest: setup  ## the Slurm client and a preemption on the newest Slurm; skipped loudly where it cannot be built
	$(AS_ROOT) $(V)/python -m tests.lab.newest_or_skip $(V)/python -m pytest -m newest $(PYTEST)

# an environment of its own, outside of the checkout: 3 GB of packages where the index has no CPU build
TORCH_OLDEST ?= /var/tmp/stepkeeper-torch-oldest
TORCH_OLDEST_WITHIN_S ?= 900
OLDEST = TORCH_OLDEST=$(TORCH_OLDEST) TORCH_OLDEST_WITHIN_S=$(TORCH_OLDEST_WITHIN_S) $(V)/python -m tests.torch_oldest
torch-oldest: setup  ## make that environment, where that has not been done
	$(OLDEST) --only-make

test-torch-oldest: setup  ## the trainer library on the oldest torch and Python it supports; skipped loudly where they cannot be had
	$(OLDEST) $(ONE) -n $(AT_ONCE)

# environments of their own, kept outside of the checkout: FRAMEWORKS_CACHE says where
test-frameworks: compiled  ## checkpoints of the real Hugging Face, Lightning, DeepSpeed, Megatron ...: written, torn, chosen, resumed
	$(AS_ROOT) FRAMEWORKS_CACHE=$(FRAMEWORKS_CACHE) $(V)/python -m tests.frameworks.environments
	$(AS_ROOT) FRAMEWORKS_CACHE=$(FRAMEWORKS_CACHE) $(V)/python -m pytest -m frameworks tests/frameworks tests/stories/test_framework_matrix.py tests/stories/test_framework_limits.py $(PYTEST) -rs

test-frameworks-oldest: compiled  ## saves on notice with the oldest Lightning and Accelerate to which `--attach` attaches
	$(AS_ROOT) FRAMEWORKS_VERSIONS=oldest FRAMEWORKS_CACHE=$(FRAMEWORKS_CACHE) $(V)/python -m tests.frameworks.environments huggingface lightning
	$(AS_ROOT) FRAMEWORKS_VERSIONS=oldest FRAMEWORKS_CACHE=$(FRAMEWORKS_CACHE) $(V)/python -m pytest -m frameworks tests/frameworks/test_attach.py -k "lightning or accelerate" $(PYTEST) -rs

# an environment of its own, which has the packages of .venv besides
STATE_PACKAGES ?= /var/tmp/stepkeeper-state-packages
PURELIB = -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
test-state-packages: setup  ## resumes with torchao, bitsandbytes, torchdata.nodes and Hugging Face's streaming data sets
	@cmp -s tests/requirements-state-packages.txt $(STATE_PACKAGES)/.ready || \
	    { rm -rf $(STATE_PACKAGES) && $(PYTHON) -m venv $(STATE_PACKAGES); }
	@$(V)/python $(PURELIB) >"$$($(STATE_PACKAGES)/bin/python $(PURELIB))/project.pth"
	@cmp -s tests/requirements-state-packages.txt $(STATE_PACKAGES)/.ready || \
	    { $(STATE_PACKAGES)/bin/pip install --quiet -r tests/requirements-state-packages.txt && \
	    cp tests/requirements-state-packages.txt $(STATE_PACKAGES)/.ready; }
	PYTHONPATH=trainer:supervisor:. $(STATE_PACKAGES)/bin/python -m pytest $(ONE) -rP tests/trainer/test_state_packages.py

# the site of docs/, in an environment of its own: nobody else needs these packages
DOCS_PACKAGES ?= /var/tmp/stepkeeper-docs
MKDOCS = env NO_MKDOCS_2_WARNING=true $(DOCS_PACKAGES)/bin/mkdocs
docs-packages:
	@flock $(DOCS_PACKAGES).lock sh -c 'cmp -s tests/requirements-docs.txt $(DOCS_PACKAGES)/.ready || \
	    { rm -rf $(DOCS_PACKAGES) && $(PYTHON) -m venv $(DOCS_PACKAGES) && \
	    $(DOCS_PACKAGES)/bin/pip install --quiet -r tests/requirements-docs.txt && \
	    cp tests/requirements-docs.txt $(DOCS_PACKAGES)/.ready; }'  # two at once would remove what the other one makes

# without --quiet: that would hide the warnings from --strict, and nothing would end the build
docs: docs-packages  ## the site, into build/site; a link or an anchor that leads nowhere ends it
	$(MKDOCS) build --strict --clean

docs-serve: docs-packages  ## the site on http://127.0.0.1:8000, while pages are edited
	$(MKDOCS) serve --dev-addr 127.0.0.1:8000

# wheel, sdist, .deb, .rpm, single file, SBOM; in an environment of its own too
DIST ?= dist
DIST_PACKAGES ?= /var/tmp/stepkeeper-dist
dist-packages:
	@cmp -s tests/requirements-dist.txt $(DIST_PACKAGES)/.ready || { rm -rf $(DIST_PACKAGES) && $(PYTHON) -m venv $(DIST_PACKAGES) && \
	    $(DIST_PACKAGES)/bin/pip install --quiet -r tests/requirements-dist.txt && \
	    cp tests/requirements-dist.txt $(DIST_PACKAGES)/.ready; }

dist: dist-packages  ## wheel, sdist, Debian package and RPM of the node agent, single file, SBOM: into dist/
	rm -rf $(DIST)
	$(DIST_PACKAGES)/bin/python -m build --no-isolation --outdir $(DIST) .
	$(DIST_PACKAGES)/bin/python -m twine check --strict $(DIST)/*
	$(DIST_PACKAGES)/bin/python packages/build.py $(DIST)/*.whl $(DIST)

test-packages: setup  ## the packages are installed, upgraded and purged in a clean Debian root; skipped where tools are missing
	$(AS_ROOT) $(V)/python -m pytest tests/packages $(PYTEST) -rs

bench: setup  ## what a preemption, a lost GPU and the node agent cost (docs/benchmarks.md)
	$(AS_ROOT) $(V)/python -m tests.bench_preemption
	$(AS_ROOT) $(V)/python -m tests.bench_fault
	$(AS_ROOT) $(V)/python -m tests.bench_agent
	$(AS_ROOT) $(V)/python -m tests.bench_start

bench-checkpoint: setup  ## what checkpoints cost, against torch's own (docs/benchmarks-checkpoint.md)
	$(V)/python -m tests.bench_checkpoint $(BENCH)

# torch with CUDA is not what `setup` installs: give the Python of an environment that has it
bench-gpu: $(if $(GPU_PYTHON),,setup)  ## the tests that need a GPU, then what saves and loads cost on a GPU, against torch's own; GPU_PYTHON=PATH
	PYTHONPATH=trainer:supervisor:. $(or $(GPU_PYTHON),$(V)/python) -m pytest $(ONE) -m gpu -rs tests/trainer
	PYTHONPATH=trainer:supervisor:. $(or $(GPU_PYTHON),$(V)/python) -m tests.bench_gpu $(BENCH)

bench-frameworks: compiled  ## unmodified scripts of four frameworks, alone and under us (docs/frameworks-recovery.md)
	$(AS_ROOT) FRAMEWORKS_CACHE=$(FRAMEWORKS_CACHE) $(V)/python -m tests.frameworks.environments
	$(AS_ROOT) FRAMEWORKS_CACHE=$(FRAMEWORKS_CACHE) $(V)/python -m tests.bench_frameworks $(BENCH)

bench-engines: compiled  ## a save of Hugging Face and of Lightning, by themselves and by our library (docs/frameworks.md)
	FRAMEWORKS_CACHE=$(FRAMEWORKS_CACHE) $(V)/python -m tests.frameworks.environments
	FRAMEWORKS_CACHE=$(FRAMEWORKS_CACHE) $(V)/python -m tests.bench_engines $(BENCH)

bench-verify: setup  ## deep verification of other frameworks' checkpoints against `cat` (docs/frameworks.md)
	$(V)/python -m tests.bench_verify $(BENCH)

bench-control-plane: setup  ## one supervisor with 64, 1,024 and 10,000 simulated nodes (docs/scale.md)
	$(V)/python -m tests.bench_control_plane $(BENCH)

bench-agents: setup  ## 1,000 and 10,000 node agents against one real slurmctld (docs/scale.md)
	$(AS_ROOT) $(V)/python -m tests.bench_agents $(BENCH)

bench-save-scale: setup  ## what a save costs rank 0 of 64, 256 and 1,024 simulated ranks (docs/scale.md)
	$(V)/python -m tests.bench_save_scale $(BENCH)

bench-storage: setup  ## what a save asks of shared storage, and the sockets of a rank, counted (docs/scale.md)
	$(V)/python -m tests.bench_storage $(BENCH)

bench-recovery: setup  ## recoveries under us and six other ways, side by side (docs/benchmarks-recovery.md)
	$(AS_ROOT) $(V)/python -m tests.bench_recovery $(BENCH)

lint: setup  ## style, types, and the import contracts
	$(LINT)

clean:  ## remove what `setup` made
	rm -rf .venv build/site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
