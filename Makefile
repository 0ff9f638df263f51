# Each target installs what it needs, may be repeated, and then does only what has changed.
TORCH ?= 2.11.0
OFFLOAD_WERROR ?= OFF
export TORCH OFFLOAD_WERROR

# The virtual environment that tools/bootstrap makes for this torch.
venv := $(if $(filter 2.11.0,$(TORCH)),.venv,.venv-$(TORCH))
cxx_files = $(shell find csrc tests/cpp -name '*.h' -o -name '*.cpp')

# Keeps the source tree, which holds no built module, from hiding the installed package.
export PYTHONSAFEPATH := 1

.PHONY: help bootstrap build editors demo test py-test no-cuda opinfo zoo core-test sanitize fuzz exits gpu-packages gpu-check format lint clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 14
	@echo "TORCH=2.15.0 make ... uses another torch, in a virtual environment and a build folder of its own."

bootstrap: ## Install system packages, and torch and the tools into a virtual environment
	@tools/bootstrap

build: bootstrap ## Build the package and install it into the virtual environment
	$(venv)/bin/python setup.py --quiet build_ext
	$(venv)/bin/python -m pip install --quiet --no-build-isolation --no-deps .

demo: build ## Train two small networks on offload, and compare with the plain device
	$(venv)/bin/python examples/digits.py

test: core-test py-test ## Run all tests, C++ and Python

py-test: build ## Run the Python tests, with PYTEST_ARGS
	$(venv)/bin/pytest $(PYTEST_ARGS)

no_cuda := build/no-cuda-$(TORCH)
# By the virtual environment's cmake, and each source by itself: whether one includes all that it names, no other build would notice.
no-cuda: export PATH := $(abspath $(venv))/bin:$(PATH)
no-cuda: bootstrap ## Build the package without CUDA, and run a few tests with it
	cmake -S . -B $(no_cuda) -G Ninja --log-level=WARNING -DOFFLOAD_TORCH=ON -DOFFLOAD_CUDA=OFF -DOFFLOAD_UNITY=OFF \
	  -DOFFLOAD_WERROR=$(OFFLOAD_WERROR) -DPython_EXECUTABLE=$(abspath $(venv))/bin/python
	cmake --build $(no_cuda) --target _C --parallel $(or $(MAX_JOBS),$(shell nproc))
	cp -r torch_offload/*.py torch_offload/*/ $(no_cuda)/torch_offload
	CUDA_VISIBLE_DEVICES= TORCH_OFFLOAD_LINK=sim PYTHONPATH=$(abspath $(no_cuda)) $(venv)/bin/pytest tests/python/test_linear.py

editors: bootstrap ## Write compile_commands.json, which tells editors how each source is compiled
	PATH="$(abspath $(venv))/bin:$$PATH" cmake -S . -B build/editors -G Ninja --log-level=WARNING -DOFFLOAD_TORCH=ON -DOFFLOAD_UNITY=OFF \
	  -DOFFLOAD_TESTS=ON -DPython_EXECUTABLE=$(abspath $(venv))/bin/python
	@ln -sf build/editors/compile_commands.json .

opinfo: build ## Compare all samples of PyTorch's op database with the plain device; record what was found
	$(venv)/bin/pytest tests/opinfo --whole --record build/opinfo/torch-$(TORCH).json

zoo: build ## Train and run models of other libraries (transformers, peft, accelerate, timm, diffusers), beside the plain device
	$(venv)/bin/python -m pip install --quiet --no-deps --upgrade --target build/zoo -r tools/requirements-zoo.txt
	PYTHONPATH=build/zoo $(venv)/bin/pytest tests/zoo $(PYTEST_ARGS)

core-test: ## Build and test core alone: no torch, no Python
	@tools/bootstrap system
	tools/core_test

sanitize: ## Run core's tests under the address, undefined-behaviour and thread sanitizers
	@tools/bootstrap system
	SANITIZE=address,undefined tools/core_test
	SANITIZE=thread tools/core_test

SEEDS ?= 1000000
fuzz: ## Run core's random programs, SEEDS of each kind
	@tools/bootstrap system
	OFFLOAD_FUZZ_SEEDS=$(SEEDS) tools/core_test -R Fuzz --timeout 10000000

RUNS ?= 200
exits: build ## Let scripts end right after a backward, RUNS times
	TORCH_OFFLOAD_TEST_EXITS=$(RUNS) $(venv)/bin/pytest tests/python/test_process.py::test_exit

gpu-packages: bootstrap ## Get what tests on a GPU take beside the development tools; tools/gpu_check finds it in build/gpu
	$(venv)/bin/python -m pip install --quiet --no-deps --upgrade --target build/gpu -r tools/requirements-gpu.txt

gpu-check: ## Build and run all tests on this machine's GPU, those for compute-sanitizer under it too
	tools/gpu_check cpp py py-sanitizer

format: bootstrap ## Format all sources
	$(venv)/bin/clang-format -i $(cxx_files)
	$(venv)/bin/ruff check --fix
	$(venv)/bin/ruff format

lint: bootstrap ## Check the format, Python's rules and the layers
	$(venv)/bin/clang-format --dry-run -Werror $(cxx_files)
	$(venv)/bin/ruff check
	$(venv)/bin/ruff format --check
	$(venv)/bin/python tools/check_layers.py

clean: ## Remove everything built, but not the virtual environments
	rm -rf build dist *.egg-info compile_commands.json torch_offload/_C*.so .pytest_cache .ruff_cache .hypothesis
