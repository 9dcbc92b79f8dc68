# make demo and make test need nothing set up before them; the rest is for working on pcinuma.
PYTHON ?= python3
VENV := .venv

.PHONY: demo test test-trixie lint bench fuzz proof mutants audit licences sbom lock golden screenshots proto clean

demo: $(VENV)/.run
	@scripts/demo.sh

test: $(VENV)/.dev
	@scripts/test.sh

# As root: the libvirt and guest tests against Debian trixie's libvirt and QEMU, in a root made once; TESTS chooses some.
test-trixie:
	@scripts/test-trixie.sh $(TESTS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

# BENCH="--calls 100000 --starts 1000" looks for growth for as long as that takes.
bench: $(VENV)/.dev
	@$(VENV)/bin/python -m bench $(BENCH)

# Known vulnerabilities of what is locked; needs PyPI, and says so when it cannot be reached.
audit: $(VENV)/.dev
	@$(VENV)/bin/python scripts/audit.py

licences: $(VENV)/.dev
	@scripts/licences.sh

# The software bill of materials, dist/pcinuma.cdx.json
sbom: $(VENV)/.dev
	@$(VENV)/bin/python scripts/sbom.py

# Every fuzz target for MINUTES; what is found is in fuzz/finds. `python -m fuzz --help` has the rest.
MINUTES ?= 1
fuzz: $(VENV)/.dev
	@$(VENV)/bin/python -m fuzz all --minutes "$(MINUTES)"

# What docs/proof.md says of the corpus and of libvirt's rules, run again in full: as root, ten to twenty minutes.
proof: $(VENV)/.dev
	$(VENV)/bin/python -m tests.proof

# Mutation testing, for as long as MINUTES says; the next run goes on where this one ended. MUTANTS="--again verify" tries
# those of a module once more that lived.
mutants: $(VENV)/.mutants
	@$(VENV)/bin/python scripts/mutants.py $(MINUTES) $(MUTANTS)

# Writes what the golden cases say now; look at every line of the diff before committing it.
golden: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -q tests/golden --regenerate-golden

# The pictures in docs/, those of the debug page too, after a change of how they look; needs Chromium.
screenshots: $(VENV)/.dev
	$(VENV)/bin/python -m tests.support.screenshots

lock: $(VENV)/.dev
	scripts/lock.sh

$(VENV)/.run: pyproject.toml requirements/build.txt requirements/run.txt scripts/venv.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/venv.sh build run
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements/dev.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/venv.sh build run dev
	@touch $@

$(VENV)/.mutants: $(VENV)/.dev requirements/mutants.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" scripts/venv.sh build run dev mutants
	@touch $@

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

# After a change of hook/pcinuma/protocol/*.proto
proto: $(VENV)/.dev
	cd hook && ../$(VENV)/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. pcinuma/protocol/*.proto
