# The few commands of a checkout. Everything they need and this machine lacks is fetched by scripts/bootstrap.
#   make             configure and build (PRESET=debug, asan or tsan: another kind)
#   make install PREFIX=folder   builds the libraries and programs alone, and installs them there
#   make wheel       the wheel for other machines, in build/dist: no MPI, netCDF, HDF5 or hwloc, no newer instructions; judged by auditwheel
#   make deb         Debian packages of the build, in build/dist: tessera-base without libtorch, and tessera
#   make release VERSION=0.2.0   sources, wheel, packages, documentation, notes and sums, in build/dist (ARGS="--before PREFIX": binary compatibility)
#   make demo        the winds example on real data, on 2 ranks; the report is build/winds-report.html
#   make relief      the relief example on 1 to 4 ranks (fetches 28 MB); the report is build/relief/report.html
#   make test        everything: Python's torch, format, build, all tests, lint
#   make bench       the benchmarks (NAME=comm: one of them; ARGS="--only 'reduce.*mpi'": some of its cases)
#   make sweep       PyTorch's operator database on sharded tensors under every condition, about 20 minutes; writes docs/operator_table.md
#   make zoo         models of transformers and diffusers on several axes at once, and models of torchvision, timm, neuraloperator and torch.nn
#                    on sharded inputs, beside one process; writes docs/model_table.md
#   make test-long   the tests that make test leaves out for their time
#   make test-2.11   build and test with the oldest libtorch that is supported
#   make test-mpich  the MPI part with MPICH; make test-stubs: without MPI and NCCL
#   make test-gpu    what has a way for CUDA, on this machine's GPU, with any libtorch (TORCH=folder); results in build/gpu.json
#   make test-device  everything that runs on the stand-in device, in ROUNDS=20 orders of its streams (docs/gpu.md)
#   make test-slurm  srun, sbatch, torchrun and mpirun inside, host files and requeueing on a real Slurm of two nodes (needs root; CASES="places plan")
#   make soak        4 ranks of 2 hosts for HOURS=2: groups made and closed, ranks that die, strangers; nothing may grow (needs root)
#   make tsan        ThreadSanitizer on the rooms up to comm and ranks that are threads, without Gloo, MPI and NCCL
#   make asan        AddressSanitizer and UndefinedBehaviorSanitizer on all rooms, without MPI, Python, examples and benchmarks
#   make hostile     the drawn suites of hostile cases for HOURS=1, with seeds that nobody has run
#   make test-pytorch   PyTorch's own distributed tests over the backend tessera, as far as they need no GPU; writes docs/pytorch_tests.md
#   make fuzz        clang's libFuzzer on each parser of what strangers write, and on the store's frames, SECONDS_EACH=600 (needs clang)
#   make notebooks   the tutorials that have Python as notebooks, run, in build/notebooks
#   make types       mypy --strict and pyright's rules on every documented program of Python
#   make docs-browser   the documentation in a headless Chromium: every page wide and narrow, light and dark, and the search (ARGS="--pictures build/shots")
#   make format, make lint, make docs, make clean
SHELL := /bin/bash
PRESET ?= release
JOBS ?= 2
NAME ?=
ARGS ?=
RANKS ?= 2
HOURS ?= 2
ROUNDS ?= 20
SECONDS_EACH ?= 600
LINT ?=
VERSION ?=
CASES ?=
BUILD := build/$(PRESET)
RUN := scripts/env
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# Tests wait for each other, for time limits and for files: one more of them than cores keeps the cores at work.
export CTEST_PARALLEL_LEVEL := $(shell echo $$(($(JOBS) + 1)))

.PHONY: all bootstrap python configure build bindings install wheel deb release demo relief test ctest test-long bench sweep zoo format lint types notebooks docs docs-browser test-2.11 test-mpich test-stubs test-gpu test-device test-slurm soak hostile test-pytorch tsan asan fuzz clean help
all: build

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

bootstrap:
	@scripts/bootstrap

python: bootstrap
	@scripts/bootstrap --python

configure: bootstrap
	@$(RUN) cmake --preset $(PRESET) $(CMAKE_ARGS)

build: configure
	@$(RUN) cmake --build --preset $(PRESET)

install: configure
	@test -n "$(PREFIX)" || { echo "say where to: make install PREFIX=$$HOME/tessera" >&2; exit 2; }
	@$(RUN) cmake --build --preset $(PRESET) --target tessera_installed
	@$(RUN) cmake --install $(BUILD) --prefix "$(PREFIX)" > /dev/null
	@echo "Installed in $(PREFIX)"

demo: configure
	@$(RUN) cmake --build --preset $(PRESET) --target tessera_cli winds
	$(RUN) $(BUILD)/bin/tessera run -n $(RANKS) -- $(BUILD)/bin/winds --report build/winds-report.html
	@echo "The report: file://$(CURDIR)/build/winds-report.html"

relief: configure
	@$(RUN) cmake --build --preset $(PRESET) --target tessera_cli tessera_doctor relief
	@$(RUN) showcases/relief/run $(BUILD) build/relief $(ARGS)
	@echo "The report: file://$(CURDIR)/build/relief/report.html"

test:
	@scripts/stage fetch $(MAKE) --no-print-directory python
	@scripts/stage format $(MAKE) --no-print-directory lint LINT=format
	@scripts/stage build $(MAKE) --no-print-directory build
	@scripts/stage tests $(MAKE) --no-print-directory ctest
	@scripts/stage lint $(MAKE) --no-print-directory lint

ctest:
	@$(RUN) scripts/tests $(PRESET) $(BUILD) $(CTEST_ARGS)

test-long: python build
	@$(RUN) ctest --test-dir $(BUILD) -C Long -L long --output-on-failure --no-tests=error $(CTEST_ARGS)

bench: configure
	@$(RUN) cmake --build --preset $(PRESET) --target all benchmarks
	@$(RUN) scripts/bench $(BUILD) $(NAME) $(ARGS)

# What Python loads and starts ranks with, without the tests.
bindings: python configure
	@$(RUN) cmake --build --preset $(PRESET) --target tessera_python tessera_cli

sweep: bindings
	@$(RUN) scripts/sweep $(BUILD)

# mypy's half is a part of `make test` too (python.types).
types: python
	@scripts/bootstrap --types
	@.env/bin/python tests/python/typed.py build/types

notebooks: python build
	@PYTHONPATH=$(BUILD)/python .env/bin/python scripts/notebooks.py build/notebooks --run

# Not a part of `make test`: what it fetches is not needed by anything else.
zoo: bindings
	@scripts/bootstrap --zoo
	@$(RUN) scripts/zoo $(BUILD) $(ARGS)

# For other machines: compiles the libraries once more, without what those may lack.
wheel: python
	@scripts/bootstrap --wheel
	@$(RUN) scripts/wheel $(ARGS)

deb: build
	@$(RUN) scripts/deb $(BUILD) build/dist

format: bootstrap
	@scripts/bootstrap --lint
	@$(RUN) scripts/format

# All that a release consists of, in build/dist; refused while something stands in its way.
release: bootstrap
	@$(RUN) scripts/release $(VERSION) $(ARGS)

lint: bootstrap
	@scripts/bootstrap --lint
	@$(RUN) scripts/lint $(LINT)

docs: bootstrap
	@scripts/bootstrap --docs
	@$(RUN) scripts/docs

docs-browser: docs
	@scripts/bootstrap --browser
	@$(RUN) python3 tests/docs/browser.py $(ARGS) build/docs/html

# Its own environment and build folder; nothing of the others is touched.
test-2.11: bootstrap
	@scripts/bootstrap --torch 2.11.0
	@$(RUN) cmake --preset release -B build/torch-2.11 -DTESSERA_TORCH="$$(echo $(CURDIR)/.env-2.11.0/lib/python3*/site-packages/torch)"
	@$(RUN) cmake --build build/torch-2.11
	@$(RUN) ctest --test-dir build/torch-2.11 --output-on-failure --no-tests=error $(CTEST_ARGS)

# Parts of comm in other ways: only the rooms up to it.
test-mpich: bootstrap
	@scripts/bootstrap --mpich
	@$(RUN) cmake --preset release -B build/mpich -DTESSERA_UP_TO=comm -DTESSERA_MPI=ON -DMPI_HOME="$(CURDIR)/.env-mpich" $(CMAKE_ARGS)
	@$(RUN) cmake --build build/mpich
	@$(RUN) ctest --test-dir build/mpich --output-on-failure --no-tests=error -L mpi $(CTEST_ARGS)

test-stubs: bootstrap
	@$(RUN) cmake --preset release -B build/stubs -DTESSERA_UP_TO=comm -DTESSERA_MPI=OFF -DTESSERA_NCCL=OFF $(CMAKE_ARGS)
	@$(RUN) cmake --build build/stubs
	@$(RUN) ctest --test-dir build/stubs --output-on-failure --no-tests=error -L comm $(CTEST_ARGS)

# No network, nothing fetched: for a machine with a GPU.
test-gpu:
	@scripts/test_gpu --jobs $(JOBS) $(if $(TORCH),--torch $(TORCH))

test-device: configure
	@$(RUN) cmake --build --preset $(PRESET) --target test_device test_device_order test_device_training test_ops_property test_nn_fully_shard_offload tessera_cli
	@$(RUN) scripts/test_device $(BUILD) $(ROUNDS)

# Slurm comes unpacked into .env-slurm; its daemons run in namespaces of their own and end with the command.
test-slurm: build
	@scripts/bootstrap --slurm
	@$(RUN) scripts/test_slurm --build $(BUILD) $(CASES)

soak: configure
	@$(RUN) cmake --build --preset $(PRESET) --target test_netns
	@$(RUN) scripts/soak $(BUILD) $(HOURS)

hostile: configure
	@$(RUN) cmake --build --preset $(PRESET) --target hostile
	@$(RUN) scripts/hostile $(BUILD) $(HOURS)

# Takes minutes, and follows torch's version more closely than `make test` can.
test-pytorch: bindings
	@$(RUN) scripts/test_pytorch $(BUILD) $(ARGS)

tsan asan:
	@$(MAKE) --no-print-directory PRESET=$@ build ctest

fuzz: bootstrap
	@$(RUN) cmake --preset fuzz
	@$(RUN) cmake --build build/fuzz --target fuzzers
	@$(RUN) scripts/fuzz --jobs $(JOBS) $(SECONDS_EACH)

clean:
	@rm -rf build/$(PRESET) build/lint build/torch-2.11 build/mpich build/stubs build/docs build/fuzz
