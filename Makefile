# `make demo` shows an example, `make test` runs all tests, `make help` lists the other targets.
PYTHON ?= python3
VENV := .venv
# Extras that `make test` installs. With EXTRAS=dev,gpu, it also tests the GPU engine.
EXTRAS ?= dev
CONSTRAINTS ?= constraints.txt
comma := ,
TESTED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
BIN := $(VENV)/bin
COMPILED := build/compiled
# Tests that `make compiled` runs: of the engines only vLLM, because only its rules are compiled. For all engines, use
# OF_COMPILED="tests/conformance tests/laws".
OF_COMPILED := tests/test_compiled.py tests/conformance tests/laws/test_laws.py tests/laws/test_leaping.py -k "vllm or test_compiled"
DEMO := scenarios/mistralrs-forty.yaml

# Bytecode is written even if the environment forbids it: tests start hundreds of Python processes, which would compile
# all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Packages whose coverage is measured, with their own tests only: tracing makes tests nearly twice as slow.
COUNTED := core costs metrics schedulers

.PHONY: help demo test lint nightly agreement nightly-scenarios oldest mutants coverage bench wheel compiled loop profiles reports site walks rules picture gallery accuracy links calibrate-silicon judge-silicon follow validation format clean

## demo: run an example and draw its plots (default)
demo: $(VENV)/.installed
	$(BIN)/simkv run --exit-zero --plots $(DEMO)
	@echo "Plots: runs/mistralrs-forty/*.png; start with lanes.png"

## help: list the targets
help:
	@sed -n 's/^## /make /p' $(MAKEFILE_LIST)

## test: run ruff, mypy and pytest
test: lint
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

## lint: run ruff and mypy
lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## nightly: compare ports with the engines' own schedulers on 300 random scenarios each
# Needs unpacked wheels in SIMKV_WHEELS. Results are in build/agreement.jsonl, one line per seed; a further call continues
# after the last seed and prints the table over all of them.
nightly: nightly-scenarios agreement

## agreement AGREEMENT_CASES=300: only the comparison of ports with the engines' own schedulers
agreement: $(TESTED)
	$(BIN)/python -m tests.native.agreement --cases $(AGREEMENT_CASES)

HOURS ?= 4
AGREEMENT_CASES ?= 300
## nightly-scenarios HOURS=4: check the laws on valid random scenarios over the whole schema
# Results are in build/nightly.jsonl, one line per seed; a further call continues after the last seed.
nightly-scenarios: $(TESTED)
	$(BIN)/python -m tests.nightly.run_scenarios --hours $(HOURS)

## mutants: change single expressions of the modules that decide, and list changes that no test detects
# Results are in build/mutants.jsonl; a further call continues. `python -m dev.mutants --again` repeats survivors.
mutants: $(TESTED)
	nice $(BIN)/python -m dev.mutants

## coverage: print the test coverage of some packages
coverage: $(TESTED)
	$(BIN)/coverage run -m pytest $(COUNTED:%=tests/%)
	$(BIN)/coverage report --include='$(subst $() ,$(comma),$(COUNTED:%=simkv/%/*))'

## bench: measure speed and memory
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/simulation_speed.py
	$(BIN)/python benchmarks/release_speed.py $(and $(wildcard $(COMPILED)/bin/python),--compiled $(COMPILED)/bin/python)
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/serve_throughput.py

## wheel: build a wheel for this Python with a compiled engine loop
# Needs a C compiler; `pip install .` needs none. It is built from an archive so that no compiled file is written into the
# source tree.
wheel: $(TESTED)
	rm -rf dist
	$(BIN)/python -I -m hatchling build -t sdist
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -I -m pip wheel --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --wheel-dir dist dist/simkv-*.tar.gz

## compiled: run the recorded decisions, laws and leap tests with that wheel
# Its environment contains only simkv; all other packages come from $(VENV).
compiled: $(TESTED)
	rm -rf $(COMPILED)
	$(BIN)/python -I -m venv --without-pip $(COMPILED)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $(COMPILED)/venv.pth
	mv $(COMPILED)/venv.pth $$($(COMPILED)/bin/python -c 'import site; print(site.getsitepackages()[0])')
	$(BIN)/python -I -m pip --python $(COMPILED)/bin/python install --quiet --disable-pip-version-check --no-deps \
		dist/simkv-*.whl
	SIMKV_TESTED=compiled $(COMPILED)/bin/python -P -m pytest --import-mode=append -p no:cacheprovider \
		-n auto --dist loadfile $(OF_COMPILED)

## loop: calibrate on this CPU, then predict, serve and evaluate cases
loop: $(TESTED)
	PYTHON=$(BIN)/python calibrate/loop.sh build/loop

## profiles: write the packaged profiles from operator tables and data sheets (EXTRAS=dev,hardware)
profiles: $(TESTED)
	$(BIN)/python -m dev.hardware_profiles

## calibrate-silicon ROWS=FILE.csv: fit the constants of composed costs and write docs/silicon.md
calibrate-silicon: $(VENV)/.installed
	$(BIN)/python -m dev.serving_points $(ROWS) simkv/costs/operators --report docs/silicon.md

## judge-silicon ROWS=FILE.csv: score predictions with each model, and each source, left out
judge-silicon: $(VENV)/.installed
	$(BIN)/python -m dev.serving_points.transfer_judge $(ROWS)

# SOURCE is a wheel or a directory; without it, pip downloads the release.
ENGINE ?= vllm
VERSION ?= newest
COUNT ?= 200
REPORT ?= build/follow.md
SIMKV ?= $(BIN)/simkv
## follow ENGINE=vllm VERSION=newest: find the known rules that a release uses; fail if there are none
follow: $(VENV)/.installed
	@mkdir -p $(dir $(REPORT))
	$(SIMKV) follow $(ENGINE) $(VERSION) --cases $(COUNT) $(SOURCE:%=--source %) --report $(REPORT)

## validation CASES=DIR: write docs/validation.md from recorded runs, which are not in the repository
validation: $(VENV)/.installed
	$(BIN)/python -m dev.validation_page docs/validation.md $(CASES)

## reports: write the reports of all packaged incidents to build/reports, and the examples in reports
reports: $(VENV)/.installed
	$(BIN)/python -m dev.example_reports reports
	$(BIN)/simkv report --gallery build/reports

## site: build the documentation in build/site/, with reference pages generated from the code
site: $(TESTED)
	$(BIN)/python tools/docs_reference.py docs/reference
	$(BIN)/zensical build --clean --strict

## picture: draw the picture of the README
# The pages of rules by release, from the rules that the engines declare.
rules: $(VENV)/.installed
	$(BIN)/python -m dev.rules_page docs

picture: $(VENV)/.installed
	$(BIN)/python -m dev.readme_picture docs/mistralrs-forty-lanes.png

## gallery: draw a picture of each packaged incident and write docs/gallery.md
gallery: $(VENV)/.installed
	$(BIN)/python -m dev.gallery_page docs

## oldest: compare the results of all packaged scenarios with the oldest allowed dependencies and with these
oldest: $(TESTED)
	rm -rf build/oldest && mkdir -p build/oldest
	$(BIN)/python -m dev.oldest_dependencies build/oldest

## accuracy: write docs/accuracy.md from the results of the judges
accuracy: $(VENV)/.installed
	$(BIN)/python -m dev.accuracy_page docs

# linkchecker is installed into an environment of its own. It needs the network.
## links: check the links of the built site, those to other hosts too
links: site
	$(PYTHON) -m venv build/links
	build/links/bin/pip install --quiet linkchecker
	build/links/bin/linkchecker --check-extern --no-warnings build/site/index.html

## walks: update the output shown in the tutorial and the how-to pages; review the difference
walks: $(TESTED)
	$(BIN)/python -m tests.docs_walkthrough docs/tutorial.md docs/diagnose.md docs/explain.md docs/hardware.md docs/how-to/*.md

## format: apply the automatic fixes of ruff
format: $(TESTED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# --no-compile: Python compiles modules to bytecode when they are imported, and most installed modules never are.
INSTALL := $(BIN)/python -I -m pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "simkv needs Python 3.11 or newer")'
	$(PYTHON) -I -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints.txt
	$(INSTALL) -c constraints.txt -e .
	@touch $@

$(TESTED): $(VENV)/.made pyproject.toml $(CONSTRAINTS)
	$(INSTALL) $(CONSTRAINTS:%=-c %) -e '.[$(EXTRAS)]'
	@touch $@

## clean: remove the environment, results and builds
clean:
	rm -rf $(VENV) runs build dist docs/reference
