# Everything a developer or a new user runs. `make` alone lists it. The first target that needs packages sets up .venv
# from requirements.lock: the same versions everywhere, each checked against its hash.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BENCH ?=
ARGS ?=
ARCH ?= amd64
DIST ?= bookworm
FLAVOUR ?= onnxruntime
BASE ?=
WHEELS ?=
LEVEL ?= 6
RTX ?= 1.7.1.116
BINDINGS ?= tensorrt-bindings==8.6.1 $(patsubst %,tensorrt-cu12-bindings==%,10.3.0 10.13.3.9 10.16.1.11) tensorrt-cu13-bindings==11.4.0.106

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
BIG_MODEL := demo/models/mobilenetv2/1/model.onnx
PIP := $(RUN) -m pip --disable-pip-version-check --no-input

.PHONY: help demo demo-update demo-device test test-device test-tensorrt test-converters nspawn bench lint format lock lock-tensorrt lock-convert deb wheel image image-lock clean mosquitto file-systems emulator mmdebstrap promtool

help: ## this list
	@echo "edge-runtime: make <target>"
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=python3.12 chooses the interpreter (3.10 to 3.13) that .venv is made from."

demo: $(READY) $(BIG_MODEL) ## start the daemon on two models, send it real images, show answers and latencies
	@$(RUN) -m demo.run_demo $(ARGS)

demo-update: $(READY) ## publish four signed versions of a model; the device keeps the good one and rolls two bad ones back
	@$(RUN) -m demo.update_demo $(ARGS)

demo-device: $(READY) nspawn ## boot a Debian device in a container: install, serve, update, roll back, kill, cut its power (root)
	@$(RUN) -m demo.device_demo $(ARGS)

test: $(READY) mosquitto file-systems emulator mmdebstrap promtool ## all tests (ARGS="-k words -x" is passed to pytest)
	@timeout --signal=INT --kill-after=30s 45m $(RUN) -m pytest $(ARGS)

# One for each environment, since its packages are for that one's Python.
TENSORRT := build/tensorrt/$(notdir $(VENV))
TENSORRT_READY := $(TENSORRT)/.ready

test-tensorrt: $(READY) $(TENSORRT_READY) ## engines built by the real TensorRT for RTX, without a GPU; its API in every version
	@site=$$($(TENSORRT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	PYTHONPATH=$$site timeout --signal=INT --kill-after=30s 10m $(RUN) -m pytest tests/tensorrt -rs $(ARGS)

# The same Python as .venv's: its packages are put on the path of the tests. The library's own package comes as source, so
# that setuptools, locked too, is installed before.
$(TENSORRT_READY): requirements-tensorrt.lock | $(READY)
	@echo "set-up: TensorRT for RTX and CUDA's bindings, 110 MB, into $(TENSORRT)"
	rm -rf $(TENSORRT) && $(RUN) -m venv $(TENSORRT)
	pip="$(TENSORRT)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --require-hashes --no-deps"
	$$pip -r <(sed '/^tensorrt/,$$d' requirements-tensorrt.lock)
	$$pip --no-build-isolation -r requirements-tensorrt.lock
	touch $@

# The converters' libraries are 2 GB and none of a device's, so they have an environment of their own, on Python 3.11.
CONVERT := build/convert/venv
CONVERT_READY := build/convert/.ready
CONVERT_PYTHON ?= python3.11
# A build of PyTorch for the CPU; PyPI's brings gigabytes of CUDA. TORCH_INDEX=https://download.pytorch.org/whl/cpu has it.
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?=

test-converters: $(CONVERT_READY) ## every conversion with its real library, 2 GB on Python 3.11 (TORCH_INDEX= for PyTorch)
	@timeout --signal=INT --kill-after=30s 12m $(CONVERT)/bin/python -m pytest tests/converters -rs $(ARGS)

$(CONVERT_READY): requirements-convert.lock
	@if ! $(CONVERT_PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))'; then
	  echo "set-up: '$(CONVERT_PYTHON)' is no Python 3.11, which requirements-convert.lock is for. Do: make CONVERT_PYTHON=... $(MAKECMDGOALS)" >&2
	  exit 1
	fi
	echo "set-up: the converters' libraries, 2 GB, into $(CONVERT)"
	rm -rf $(CONVERT) && $(CONVERT_PYTHON) -m venv $(CONVERT)
	pip="$(CONVERT)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps"
	$$pip --require-hashes -r requirements-convert.lock
	$$pip --no-build-isolation --editable .
	$$pip $(TORCH_INDEX:%=--index-url %) '$(TORCH)' || { echo "set-up: no $(TORCH) here, so tests with PyTorch are left out." \
	  "Do: make TORCH_INDEX=https://download.pytorch.org/whl/cpu test-converters" >&2; }
	touch $@

lock-convert: # resolve requirements-convert.lock again (maintainers, after make lock)
	@build/lock-tools/bin/uv pip compile $(UPGRADE) --quiet --python-version 3.11 --no-python-downloads \
	  --python-platform x86_64-unknown-linux-gnu --extra convert --no-emit-package edge-runtime --no-emit-package torch \
	  --no-emit-package nvidia-nccl-cu12 --generate-hashes --default-index https://pypi.org/simple \
	  --custom-compile-command "make lock-convert" --output-file requirements-convert.lock pyproject.toml requirements-convert.in
	@echo "requirements-convert.lock: $$(grep -c == requirements-convert.lock) packages"

lock-tensorrt: # resolve requirements-tensorrt.lock and the bindings that are looked at again (maintainers, after make lock)
	@uv="build/lock-tools/bin/uv pip compile --quiet --universal --python-version 3.10 --no-python-downloads"
	uv="$$uv --generate-hashes --default-index https://pypi.org/simple"
	printf '%s\n' cuda-bindings 'setuptools>=70.1' tensorrt-rtx==$(RTX) | $$uv --custom-compile-command "make lock-tensorrt" \
	  --output-file requirements-tensorrt.lock -
	{ sed -n '/^#/p' tests/tensorrt/bindings.lock
	  for each in $(BINDINGS); do echo $$each | $$uv --no-header --no-annotate --no-deps -; done; } > build/bindings.lock
	mv build/bindings.lock tests/tensorrt/bindings.lock

bench: $(READY) ## measure against the raw backend, interleaved; BENCH=--quick takes a minute or two
	@$(RUN) -m tests.bench $(BENCH)

lint: $(READY) ## ruff and mypy --strict
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy --strict

format: $(READY) ## let ruff lay the code out and sort imports
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

lock: ## resolve requirements.lock again (maintainers; UPGRADE=--upgrade takes newer versions)
	@$(PYTHON) -m venv build/lock-tools
	@build/lock-tools/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.5"
	@build/lock-tools/bin/uv pip compile $(UPGRADE) --quiet --universal --python-version 3.10 --no-python-downloads \
	  --extra dev --no-emit-package edge-runtime --generate-hashes --default-index https://pypi.org/simple \
	  --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
	@echo "requirements.lock: $$(grep -c == requirements.lock) packages"

deb: $(READY) ## dist/*.deb: ARCH=amd64|arm64 DIST=bookworm|trixie|jammy|noble (LEVEL=0 is quick, 6 small)
	@command -v dpkg-deb >/dev/null || { echo "deb: no dpkg-deb. Do: sudo apt-get install dpkg" >&2; exit 1; }
	@$(RUN) -m deploy.debian.build_deb --architecture $(ARCH) --distribution $(DIST) --level $(LEVEL)

wheel: $(READY) ## dist/*.whl and the source archive
	@$(RUN) -m hatchling build --directory dist

image: $(READY) ## an OCI image for containers in build/images (ARCH=amd64|arm64 FLAVOUR=onnxruntime|openvino|jetson)
	@$(RUN) -m cross.build_image --arch $(ARCH) --flavour $(FLAVOUR) $(BASE:%=--base %) $(WHEELS:%=--wheel %)

image-lock: $(READY) # choose the newest Debian packages for images (maintainers)
	@$(RUN) -m cross.lock_debian

mosquitto: # the broker that the tests of MQTT run; without it they are left out, and the demo leaves out MQTT
	@if { command -v mosquitto || [ -x /usr/sbin/mosquitto ]; } >/dev/null && command -v mosquitto_rr >/dev/null; then exit 0; fi
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	  echo "set-up: installing mosquitto, for the tests of MQTT"
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mosquitto mosquitto-clients >/dev/null && exit 0
	fi
	echo "set-up: no mosquitto, so the tests of MQTT are left out. Do: sudo apt-get install mosquitto mosquitto-clients" >&2

test-device: $(READY) nspawn ## the package and the service on devices that boot a real systemd, in containers (root)
	@timeout --signal=INT --kill-after=30s 10m $(RUN) -m pytest tests/device -rs $(ARGS)

nspawn: # what boots devices in containers; root only, as what needs it is
	@if [ "$$(id -u)" != 0 ] || { command -v mmdebstrap && command -v systemd-nspawn; } >/dev/null; then exit 0; fi
	if command -v apt-get >/dev/null; then
	  echo "set-up: installing mmdebstrap and systemd-container, for devices that boot"
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mmdebstrap systemd-container >/dev/null && exit 0
	fi
	echo "set-up: no mmdebstrap or systemd-nspawn, so no device boots. Do: apt-get install mmdebstrap systemd-container" >&2

file-systems: # what makes the file systems whose power the tests cut; root only, as those tests are
	@if [ "$$(id -u)" != 0 ] || { command -v mkfs.ext4 && command -v mkfs.xfs; } >/dev/null; then exit 0; fi
	if command -v apt-get >/dev/null; then
	  echo "set-up: installing e2fsprogs and xfsprogs, for the tests of power loss"
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq e2fsprogs xfsprogs >/dev/null && exit 0
	fi
	echo "set-up: no mkfs.ext4 or mkfs.xfs, so tests of power loss are left out. Do: apt-get install e2fsprogs xfsprogs" >&2

emulator: # what runs the image for arm64 on x86; without it that test is left out
	@if [ "$$(uname -m)" = aarch64 ] || command -v qemu-aarch64-static >/dev/null; then exit 0; fi
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	  echo "set-up: installing qemu-user-static, for the tests of images for arm64"
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    qemu-user-static >/dev/null && exit 0
	fi
	echo "set-up: no qemu-aarch64-static, so images for arm64 are not run. Do: apt-get install qemu-user-static" >&2

mmdebstrap: # what makes the Debian systems that the tests of packages install on; root only, as those tests are
	@if [ "$$(id -u)" != 0 ] || command -v mmdebstrap >/dev/null; then exit 0; fi
	if command -v apt-get >/dev/null; then
	  echo "set-up: installing mmdebstrap, for the tests of Debian packages"
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    mmdebstrap >/dev/null && exit 0
	fi
	echo "set-up: no mmdebstrap, so packages are not installed. Do: apt-get install mmdebstrap" >&2

promtool: # Prometheus' own check of alert rules, out of Debian's package: installed, it would run a server
	@if command -v promtool >/dev/null || [ -x build/promtool/usr/bin/promtool ]; then exit 0; fi
	if command -v apt-get >/dev/null; then
	  echo "set-up: fetching promtool, for the tests of alert rules"
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq; fi
	  rm -rf build/promtool && mkdir -p build/promtool && (cd build/promtool && apt-get download -qq prometheus 2>/dev/null) &&
	    dpkg-deb --fsys-tarfile build/promtool/*.deb | tar -x -C build/promtool ./usr/bin/promtool &&
	    rm build/promtool/*.deb && exit 0
	fi
	echo "set-up: no promtool, so Prometheus does not check the alert rules. Do: sudo apt-get install prometheus" >&2

clean: ## remove .venv, caches, and what was built
	rm -rf $(VENV) build dist demo/models/mobilenetv2 .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIG_MODEL): demo/make_vision_model.py | $(READY)
	@$(RUN) -m demo.make_vision_model $@

# ---- set-up: done once, and again when the lock or the package's own description changes ---------------------------

CHECK_VERSION = import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

$(READY): requirements.lock pyproject.toml
	@if ! command -v $(PYTHON) >/dev/null; then
	  echo "set-up: '$(PYTHON)' is not there; wanted Python 3.10 to 3.13. Do: sudo apt-get install python3 python3-venv" >&2
	  exit 1
	fi
	if ! $(PYTHON) -c '$(CHECK_VERSION)'; then
	  echo "set-up: got $$($(PYTHON) --version 2>&1), wanted Python 3.10 to 3.13." \
	    "Do: sudo apt-get install python3.12 python3.12-venv, then: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2
	  exit 1
	fi
	if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then
	  package=python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	    echo "set-up: $(PYTHON) cannot make virtual environments. Do: sudo apt-get install $$package" >&2
	    exit 1
	  fi
	  echo "set-up: installing $$package"
	  apt-get update -qq
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$package >/dev/null
	fi
	$(RUN) -m pip --version >/dev/null 2>&1 || { echo "set-up 1/3: $(VENV), with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	echo "set-up 2/3: packages of requirements.lock"
	$(PIP) install --progress-bar off --require-hashes -r requirements.lock \
	  | awk '/^Collecting /{printf "  %2d %s\n", ++n, $$2; fflush()} /^Installing/{print "  installing"; fflush()}'
	echo "set-up 3/3: edge-runtime itself"
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.ONESHELL:
