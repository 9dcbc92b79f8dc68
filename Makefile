# make demo and make test need nothing set up before them; the rest is for working on pcinuma.
PYTHON ?= python3
VENV := .venv

.PHONY: demo test test-trixie lint bench proof mutants lock golden screenshots proto clean

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

bench: $(VENV)/.dev
	$(VENV)/bin/python -m bench.transform
	$(VENV)/bin/python -m bench.hook
	$(VENV)/bin/python -m bench.webhook

# What docs/proof.md says of the corpus and of libvirt's rules, run again in full: as root, ten to twenty minutes.
proof: $(VENV)/.dev
	$(VENV)/bin/python -m tests.proof

# Mutation testing, for as long as MINUTES says; the next run goes on where this one ended.
MINUTES ?= 60
mutants: $(VENV)/.mutants
	scripts/mutants.sh $(MINUTES)

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
