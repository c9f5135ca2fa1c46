# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
# What `make test` installs besides simkv; with `EXTRAS=dev,gpu` it also tests the real engine.
EXTRAS ?= dev
CONSTRAINTS ?= constraints.txt
comma := ,
TESTED := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
BIN := $(VENV)/bin
COMPILED := build/compiled
# Of the engines vLLM's, whose rules are compiled; with OF_COMPILED="tests/conformance tests/laws" all.
OF_COMPILED := tests/test_compiled.py tests/conformance tests/laws/test_laws.py tests/laws/test_leaping.py -k "vllm or test_compiled"
DEMO := scenarios/mistralrs-forty.yaml

# Whose lines are counted, by their own tests: Python 3.11 counts by a tracer that makes tests nearly twice
# as slow, too dear for all of them.
COUNTED := core costs measure schedulers

.PHONY: demo test lint coverage bench wheel compiled loop profiles reports site walks picture calibrate-silicon follow validation format clean

demo: $(VENV)/.installed
	$(BIN)/simkv run --exit-zero --plots $(DEMO)
	@echo "Pictures: runs/mistralrs-forty/*.png; start with lanes.png"

test: lint
	$(BIN)/pytest -n auto --dist loadfile

lint: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: $(TESTED)
	$(BIN)/coverage run -m pytest $(COUNTED:%=tests/%)
	$(BIN)/coverage report --include='$(subst $() ,$(comma),$(COUNTED:%=simkv/%/*))'

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/simulation_speed.py
	$(BIN)/python benchmarks/release_speed.py $(and $(wildcard $(COMPILED)/bin/python),--compiled $(COMPILED)/bin/python)
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/serve_throughput.py

# A wheel for this Python with the loop compiled, from an archive of the sources, so that nothing compiled
# lies among them. Needs a C compiler; `pip install .` needs none and stays pure.
wheel: $(TESTED)
	rm -rf dist
	$(BIN)/python -I -m hatchling build -t sdist
	HATCH_BUILD_HOOKS_ENABLE=1 $(BIN)/python -I -m pip wheel --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation --wheel-dir dist dist/simkv-*.tar.gz

# That wheel is to keep what the sources keep: recorded decisions, laws, leaps. All but simkv is $(VENV)'s.
compiled: $(TESTED)
	rm -rf $(COMPILED)
	$(BIN)/python -I -m venv --without-pip $(COMPILED)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $(COMPILED)/venv.pth
	mv $(COMPILED)/venv.pth $$($(COMPILED)/bin/python -c 'import site; print(site.getsitepackages()[0])')
	$(BIN)/python -I -m pip --python $(COMPILED)/bin/python install --quiet --disable-pip-version-check --no-deps \
		dist/simkv-*.whl
	SIMKV_TESTED=compiled $(COMPILED)/bin/python -P -m pytest --import-mode=append -p no:cacheprovider \
		-n auto --dist loadfile $(OF_COMPILED)

# The whole loop on this machine's CPU: a campaign, its profile, cases predicted, served and judged.
loop: $(TESTED)
	PYTHON=$(BIN)/python calibrate/loop.sh build/loop

# From the operator tables of aiconfigurator-core and data sheets; needs EXTRAS=dev,hardware.
profiles: $(TESTED)
	$(BIN)/python -m dev.hardware_profiles

# make calibrate-silicon ROWS=FILE.csv fits the constants of composed costs, then writes docs/silicon.md
calibrate-silicon: $(VENV)/.installed
	$(BIN)/python -m dev.serving_points $(ROWS) simkv/costs/operators --report docs/silicon.md

# By which of the known rules a release decides; fails if by none. SOURCE: its wheel or a folder.
ENGINE ?= vllm
VERSION ?= newest
COUNT ?= 200
REPORT ?= build/follow.md
SIMKV ?= $(BIN)/simkv
follow: $(VENV)/.installed
	@mkdir -p $(dir $(REPORT))
	$(SIMKV) follow $(ENGINE) $(VERSION) --cases $(COUNT) $(SOURCE:%=--source %) --report $(REPORT)

# The recorded runs are not part of the repository: CASES names the folder that holds them.
validation: $(VENV)/.installed
	$(BIN)/python -m dev.validation_page docs/validation.md $(CASES)

reports: $(VENV)/.installed
	$(BIN)/simkv report --gallery reports

# The documentation as a site in build/site/, with reference pages made from the code.
site: $(TESTED)
	$(BIN)/python tools/docs_reference.py docs/reference
	$(BIN)/zensical build --clean --strict

picture: $(VENV)/.installed
	$(BIN)/python -m dev.readme_picture docs/mistralrs-forty-lanes.png

# What the commands of the tutorial and the how-tos print now, written into their pages: read the difference.
walks: $(TESTED)
	$(BIN)/python -m tests.docs_walkthrough docs/tutorial.md docs/diagnose.md docs/how-to/*.md

format: $(TESTED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Modules are compiled to bytecode as they are imported: most of what is installed never is.
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

clean:
	rm -rf $(VENV) runs build dist docs/reference
