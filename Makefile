# Everything a developer or a new user runs. `make` alone lists it. The first target that needs packages sets up .venv
# from requirements/dev.lock: the same versions everywhere, each checked against its hash.

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
PACKAGE ?= edge-runtime
FLAVOUR ?= onnxruntime
BASE ?=
WHEELS ?=
LEVEL ?= 6
DISTS ?= bookworm trixie
ARCHS ?= amd64 arm64
KEY ?=
URL ?=
PHASE ?= 100
DAYS ?= 30
APT ?= build/apt
BINDINGS ?= tensorrt-bindings==8.6.1 $(patsubst %,tensorrt-cu12-bindings==%,10.3.0 10.13.3.9 10.16.1.11) tensorrt-cu13-bindings==11.4.0.106

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
BIG_MODEL := demo/models/mobilenetv2/1/model.onnx
PIP := $(RUN) -m pip --disable-pip-version-check --no-input

# Who sets up several environments may name a uv (https://docs.astral.sh/uv), as .ci/run does: pip reads 180 000 links of an index
# for one of them, which takes most of a minute of a core, uv none. It does not know pip's own configuration.
UV ?=
# $(call INSTALL,VENV): a command that installs into an environment.
INSTALL = $(if $(UV),$(UV) pip install --quiet --no-config --no-python-downloads --python $(1)/bin/python,\
  $(1)/bin/python -m pip --disable-pip-version-check --no-input install --quiet)

.PHONY: help demo demo-update demo-device test test-device test-tensorrt test-converters test-ray demo-ray bench-ray test-kserve bench lint format lock deb apt-repository wheel image image-lock clean machine unpacked docs

help: ## this list
	@echo "edge-runtime: make <target>"
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=python3.12 chooses the interpreter (3.10 to 3.13) that .venv is made from."

demo: $(READY) $(BIG_MODEL) ## start the daemon on two models, send it real images, show answers and latencies
	@$(RUN) -m demo.run_demo $(ARGS)

demo-update: $(READY) ## publish four signed versions of a model; the device keeps the good one and rolls two bad ones back
	@$(RUN) -m demo.update_demo $(ARGS)

demo-device: $(READY) machine ## boot a Debian device in a container: install, serve, update, roll back, kill, cut its power (root)
	@$(RUN) -m demo.device_demo $(ARGS)

# Many tests wait more than they compute. Those of one file stay together, since they share what is dear to make; JOBS=0 runs
# all in one process, for a debugger. numpy's own threads wait for cores by spinning, which takes five times the time here.
# The limit is a hang's: it takes 20 minutes on two free cores, and hours where others have them.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
TEST_LIMIT ?= 4h

test: $(READY) machine unpacked ## all tests, side by side (ARGS="-k words -x" is passed to pytest, JOBS=1 is one by one)
	@OPENBLAS_NUM_THREADS=1 timeout --signal=INT --kill-after=60s $(TEST_LIMIT) $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=12 $(ARGS)

# One for each environment, since its packages are for that one's Python.
TENSORRT := build/tensorrt/$(notdir $(VENV))
TENSORRT_READY := $(TENSORRT)/.ready

test-tensorrt: $(READY) $(TENSORRT_READY) ## engines built by the real TensorRT for RTX, without a GPU; its API in every version
	@site=$$($(TENSORRT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	PYTHONPATH=$$site timeout --signal=INT --kill-after=30s 10m $(RUN) -m pytest tests/tensorrt -rs $(ARGS)

# The same Python as .venv's: its packages are put on the path of the tests. The library's own package comes as source, so
# that setuptools, locked too, is installed before.
$(TENSORRT_READY): requirements/tensorrt.lock | $(READY)
	@echo "set-up: TensorRT for RTX and CUDA's bindings, 110 MB, into $(TENSORRT)"
	rm -rf $(TENSORRT) && $(RUN) -m venv $(TENSORRT)
	pip="$(TENSORRT)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --require-hashes --no-deps"
	$$pip -r <(sed '/^tensorrt/,$$d' requirements/tensorrt.lock)
	$$pip --no-build-isolation -r requirements/tensorrt.lock
	touch $@

# The converters' libraries are 2 GB and none of a device's, so they have an environment of their own, on Python 3.11.
CONVERT := build/convert/venv
CONVERT_READY := build/convert/.ready
CONVERT_PYTHON ?= python3.11
# A build of PyTorch for the CPU; PyPI's brings gigabytes of CUDA. TORCH_INDEX=https://download.pytorch.org/whl/cpu has it.
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?=

test-converters: $(CONVERT_READY) ## every conversion with its real library, 2 GB on Python 3.11 (TORCH_INDEX= for PyTorch)
	@OPENBLAS_NUM_THREADS=1 OMP_WAIT_POLICY=passive timeout --signal=INT --kill-after=30s 45m $(CONVERT)/bin/python -m pytest tests/converters -rs $(ARGS)

$(CONVERT_READY): requirements/convert.lock
	@if ! $(CONVERT_PYTHON) -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))'; then
	  echo "set-up: '$(CONVERT_PYTHON)' is not Python 3.11, which requirements/convert.lock is for. Do: make CONVERT_PYTHON=... $(MAKECMDGOALS)" >&2
	  exit 1
	fi
	echo "set-up: the converters' libraries, 2 GB, into $(CONVERT)"
	rm -rf $(CONVERT) && $(CONVERT_PYTHON) -m venv $(CONVERT)
	# Most of the 2 GB is never imported: Python compiles what is.
	pip="$(CONVERT)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --no-compile"
	$(call INSTALL,$(CONVERT)) --no-deps --no-compile --require-hashes -r requirements/convert.lock
	$$pip --no-build-isolation --editable .
	$$pip $(TORCH_INDEX:%=--index-url %) '$(TORCH)' || { echo "set-up: no $(TORCH) here, so tests with PyTorch are left out." \
	  "Do: make TORCH_INDEX=https://download.pytorch.org/whl/cpu test-converters" >&2; }
	touch $@

# Ray is 600 MB and none of a device's, so it has an environment of its own.
RAY := build/ray/venv
RAY_READY := build/ray/.ready
# Usage statistics off; its own home for the token that Ray writes; patience, for a busy machine is slow to start it.
RAY_ENVIRONMENT := env HOME=$(CURDIR)/build/ray/home RAY_USAGE_STATS_ENABLED=0 RAY_raylet_start_wait_time_s=150 \
  RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=90 RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S=90 PYTHONPATH=$(CURDIR)

test-ray: $(RAY_READY) ## the runtime inside a real Ray Serve, 600 MB: replicas killed and redeployed, Triton's client
	@$(RAY_ENVIRONMENT) timeout --signal=INT --kill-after=30s 12m $(RAY)/bin/python -m pytest tests/ray -rs $(ARGS)

demo-ray: $(RAY_READY) ## two replicas in Ray Serve: one is killed, both are redeployed under load, no request is lost
	@$(RAY_ENVIRONMENT) $(RAY)/bin/python -m demo.ray_demo

bench-ray: $(RAY_READY) # measure the runtime inside Ray Serve beside Serve alone (ARGS="cpu", overload, events or node)
	@$(RAY_ENVIRONMENT) $(RAY)/bin/python -m bench.ray_serve $(ARGS)

$(RAY_READY): requirements/ray.lock
	@echo "set-up: Ray Serve, 600 MB, into $(RAY)"
	rm -rf $(RAY) && $(PYTHON) -m venv $(RAY) && mkdir -p build/ray/home
	install="$(call INSTALL,$(RAY)) --no-deps --no-compile"
	$$install --require-hashes -r requirements/ray.lock
	$$install --no-build-isolation --editable .
	touch $@

# KServe's own package wants a psutil below 6, and FastAPI, Kubernetes and pandas with it: 320 MB in an environment of its own.
KSERVE := build/kserve
KSERVE_READY := $(KSERVE)/.ready

test-kserve: $(READY) $(KSERVE_READY) ## KServe's containers, asked by KServe's own client (320 MB); images that `make image` made
	@timeout --signal=INT --kill-after=30s 15m $(RUN) -m pytest tests/system/test_kserve.py -rs $(ARGS)

$(KSERVE_READY): requirements/kserve.lock
	@echo "set-up: KServe's client, 320 MB, into $(KSERVE)/venv"
	rm -rf $(KSERVE)/venv && $(PYTHON) -m venv $(KSERVE)/venv
	$(call INSTALL,$(KSERVE)/venv) --no-compile --require-hashes -r requirements/kserve.lock
	touch $@

# Its packages are nobody's but the site's.
DOCS := build/docs
DOCS_READY := $(DOCS)/.ready

docs: $(DOCS_READY) ## the documents as a site in build/docs/site; a broken link is an error
	@$(DOCS)/venv/bin/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -b html -c docs . $(DOCS)/site
	echo "$(DOCS)/site/index.html"

$(DOCS_READY): requirements/docs.lock
	@echo "set-up: Sphinx, into $(DOCS)/venv"
	rm -rf $(DOCS) && $(PYTHON) -m venv $(DOCS)/venv
	$(call INSTALL,$(DOCS)/venv) --require-hashes -r requirements/docs.lock
	touch $@

bench: $(READY) ## measure against the raw backend, interleaved; BENCH=--quick takes a minute or two
	@$(RUN) -m bench $(BENCH)

lint: $(READY) ## ruff and mypy --strict
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy --strict

format: $(READY) ## let ruff lay the code out and sort imports
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

# What goes into each lock. dev: every Python and both architectures. convert: one Python, x86-64. tensorrt, bindings: their
# packages need one another's versions and nothing of the rest.
UNIVERSAL := --universal --python-version 3.10
LOCK_dev := $(UNIVERSAL) --extra all --extra publish --group dev --no-emit-package edge-runtime pyproject.toml
LOCK_docs := $(UNIVERSAL) --group pyproject.toml:docs
# What CatBoost draws with, which converting never imports.
CATBOOST_DRAWS_BY := contourpy cycler fonttools graphviz kiwisolver matplotlib plotly
LOCK_convert := --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
  $(patsubst %,--extra %,convert grpc grpc-client http prometheus) \
  $(patsubst %,--no-emit-package %,edge-runtime torch nvidia-nccl-cu12 $(CATBOOST_DRAWS_BY)) pyproject.toml requirements/convert.in
# What the image `sources` has beside dev's: the converters as convert has them, for that image's Python.
LOCK_sources := --universal --python-version 3.13 --constraint requirements/dev.lock \
  --constraint <(sed -n 's/^\(lightgbm\|scikit-learn\|skl2onnx\|skops\|xgboost\)==\([^ ]*\).*/\1==\2/p' requirements/convert.lock) \
  $(patsubst %,--extra convert-%,lightgbm sklearn xgboost) \
  $(patsubst %,--no-emit-package %,edge-runtime nvidia-nccl-cu12) pyproject.toml
LOCK_kserve := $(UNIVERSAL) requirements/kserve.in
LOCK_tensorrt := $(UNIVERSAL) requirements/tensorrt.in
LOCK_ray := $(UNIVERSAL) --extra ray --extra onnxruntime --no-emit-package edge-runtime pyproject.toml requirements/ray.in
LOCKS := dev docs convert sources kserve ray tensorrt

lock: ## resolve requirements/*.lock again (maintainers; UPGRADE=--upgrade takes newer versions, LOCKS="dev" only some)
	@$(PYTHON) -m venv build/lock-tools
	build/lock-tools/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.7"
	uv="build/lock-tools/bin/uv pip compile $(UPGRADE) --quiet --no-python-downloads --generate-hashes"
	uv="$$uv --default-index https://pypi.org/simple --custom-compile-command 'make lock'"
	$(foreach each,$(LOCKS),eval "$$uv --output-file requirements/$(each).lock $(LOCK_$(each))"
	echo "requirements/$(each).lock: $$(grep -c == requirements/$(each).lock) packages"
	)
	{ sed -n '/^#/p' requirements/tensorrt-bindings.lock
	  for each in $(BINDINGS); do echo $$each | eval "$$uv $(UNIVERSAL) --no-header --no-annotate --no-deps -"; done; } > build/bindings.lock
	mv build/bindings.lock requirements/tensorrt-bindings.lock

deb: $(READY) ## dist/*.deb: ARCH=amd64|arm64 DIST=bookworm|trixie|jammy|noble PACKAGE=edge-runtime-openvino|…|all (LEVEL=0 is quick, 6 small)
	@command -v dpkg-deb >/dev/null || { echo "deb: no dpkg-deb. Do: sudo apt-get install dpkg" >&2; exit 1; }
	@$(RUN) -m deploy.debian.build_deb --architecture $(ARCH) --distribution $(DIST) --package $(PACKAGE) --level $(LEVEL)

apt-repository: $(READY) ## a signed apt repository in build/apt: DISTS="bookworm trixie" KEY=FINGERPRINT URL=https://… (PHASE=10 percent; RENEW=1 signs again)
	@$(RUN) -m deploy.apt.repository --distributions $(DISTS) --architectures $(ARCHS) --keys $(KEY) --url '$(URL)' \
	  --phase $(PHASE) --days $(DAYS) $(if $(RENEW),--renew) --level $(LEVEL) --folder $(APT)

wheel: $(READY) ## dist/*.whl and the source archive
	@$(RUN) -m hatchling build --directory dist

image: $(READY) ## an OCI image for containers in build/images (ARCH=amd64|arm64 FLAVOUR=onnxruntime|litert|openvino|sources|jetson)
	@$(RUN) -m cross.build_image --arch $(ARCH) --flavour $(FLAVOUR) $(BASE:%=--base %) $(WHEELS:%=--wheel %)

image-lock: $(READY) # choose the newest Debian packages for images (maintainers)
	@$(RUN) -m cross.lock_debian

# What tests need of Debian beside Python, as COMMAND:PACKAGE. Installed when root, else named.
NEEDS_TEST := mosquitto:mosquitto mosquitto_rr:mosquitto-clients h2load:nghttp2-client chromium:chromium apt-ftparchive:apt-utils gpg:gnupg \
  lintian:lintian
NEEDS_ROOT := mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs mmdebstrap:mmdebstrap systemd-nspawn:systemd-container
NEEDS_EMULATOR := $(if $(filter aarch64,$(shell uname -m)),,qemu-aarch64-static:qemu-user-static)

machine: # Debian's packages that tests and devices need; tests that miss one are left out and say so
	@is_root=$$([ "$$(id -u)" = 0 ] && echo yes || true)
	missing=
	for need in $(NEEDS_TEST) $(NEEDS_EMULATOR) $${is_root:+$(NEEDS_ROOT)}; do
	  PATH=$$PATH:/usr/sbin:/sbin command -v $${need%%:*} >/dev/null || missing="$$missing $${need#*:}"
	done
	if command -v javac >/dev/null && [ ! -e /usr/share/java/jeromq.jar ]; then missing="$$missing libjeromq-java"; fi
	[ -n "$$missing" ] || exit 0
	if [ -n "$$is_root" ] && command -v apt-get >/dev/null; then
	  echo "set-up: installing$$missing, for the tests"
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null && exit 0
	fi
	echo "set-up: the tests that need them are left out. Do: sudo apt-get install$$missing" >&2

test-device: $(READY) machine ## the package and the service on devices that boot a real systemd, in containers (root)
	@timeout --signal=INT --kill-after=30s 30m $(RUN) -m pytest tests/device -rs $(ARGS)

# Programs that tests run, as COMMAND:PACKAGE, out of Debian's packages: installed, most of them would run a server.
UNPACKED := promtool:prometheus docker-registry:docker-registry mender:mender-client mender-artifact:mender-artifact

unpacked: # into build/unpacked; tests that miss one are left out and say so
	@missing=
	for need in $(UNPACKED); do
	  command -v $${need%%:*} >/dev/null || [ -x build/unpacked/usr/bin/$${need%%:*} ] || missing="$$missing $$need"
	done
	[ -n "$$missing" ] || exit 0
	echo "set-up: fetching$$missing, for the tests"
	mkdir -p build/unpacked
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then apt-get update -qq || true; fi
	for need in $$missing; do
	  package=$${need#*:}
	  (cd build/unpacked && apt-get download -qq $$package 2>/dev/null) &&
	    dpkg-deb --fsys-tarfile build/unpacked/$${package}_*.deb | tar -x -C build/unpacked ./usr/bin/$${need%%:*} ||
	    echo "set-up: no $$need here: the tests that need it are left out" >&2
	  rm -f build/unpacked/$${package}_*.deb
	done

clean: ## remove .venv, caches, and what was built
	rm -rf $(VENV) build dist demo/models/mobilenetv2 .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIG_MODEL): demo/make_vision_model.py | $(READY)
	@$(RUN) -m demo.make_vision_model $@

# ---- set-up: done once, and again when the lock or the package's own description changes ---------------------------

CHECK_VERSION = import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))

$(READY): requirements/dev.lock pyproject.toml hatch_build.py $(wildcard edge_runtime/wire/*.proto)
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
	echo "set-up 2/3: packages of requirements/dev.lock"
	$(if $(UV),$(call INSTALL,$(VENV)),$(PIP) install --progress-bar off) --require-hashes -r requirements/dev.lock \
	  | awk '/^Collecting /{printf "  %2d %s\n", ++n, $$2; fflush()} /^Installing/{print "  installing"; fflush()}'
	echo "set-up 3/3: edge-runtime itself"
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.ONESHELL:
