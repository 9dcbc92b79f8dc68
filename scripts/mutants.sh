#!/bin/sh
# Mutation testing of what decides over a VM, with mutmut and the tests that need neither libvirt nor a guest.
#   scripts/mutants.sh [MINUTES] [PATTERN...]     patterns are mutants' names, as pcinuma.verify.*
# What a run got to is kept in build/mutants, and the next goes on from there.
set -eu
cd "$(dirname "$0")/.."
minutes="${1:-60}"
[ $# = 0 ] || shift
python="$PWD/.venv/bin/python"
work=build/mutants

# mutmut knows the names of what lies below src/ only
mkdir -p "$work"
rm -rf "$work/src" "$work/tests" "$work/schemas" "$work/examples" "$work/docs" "$work/mutants/tests"
mkdir "$work/src"
cp -RL hook/pcinuma "$work/src/pcinuma"
cp -R tests schemas examples docs README.md "$work/"
grep -q 'max_examples=250' "$work/tests/property/test_pipeline.py" # a few examples for each mutant, always the same
sed -i 's/max_examples=250/max_examples=8, derandomize=True, database=None/' "$work/tests/property/test_pipeline.py"

cat >"$work/pyproject.toml" <<'END'
[tool.pytest.ini_options]
addopts = "--import-mode=importlib -p no:cacheprovider -p no:xdist"
pythonpath = ["."]
timeout = 300
markers = ["libvirt: ", "guest: ", "browser: "]

[tool.mutmut]
source_paths = ["src"]
only_mutate = [
  "src/pcinuma/apply.py",
  "src/pcinuma/audit.py",
  "src/pcinuma/io_space.py",
  "src/pcinuma/layout.py",
  "src/pcinuma/mmio.py",
  "src/pcinuma/plan.py",
  "src/pcinuma/switches.py",
  "src/pcinuma/tune.py",
  "src/pcinuma/verify.py",
]
also_copy = ["schemas", "examples", "docs", "README.md"]
pytest_add_cli_args = ["-m", "not libvirt and not guest and not browser"]
pytest_add_cli_args_test_selection = [
  "tests/golden/test_golden.py",
  "tests/property/test_pipeline.py",
  "tests/unit/test_audit.py",
  "tests/unit/test_mapping.py",
  "tests/unit/test_mmio.py",
  "tests/unit/test_plan.py",
  "tests/unit/test_switches.py",
  "tests/unit/test_tune.py",
  "tests/unit/test_verify.py",
  "tests/integration/test_check.py",
  "tests/integration/test_convergence.py",
  "tests/integration/test_hand_edited.py",
]
END

cd "$work"
status=0
timeout --signal INT "${minutes}m" nice -n 10 "$python" -m mutmut run --max-children 2 "$@" || status=$?
[ "$status" = 0 ] || [ "$status" = 124 ] || exit "$status"
"$python" -m mutmut results --all true >results.txt
grep 'survived\|no tests\|suspicious' results.txt || true
printf '\n%-10s %8s %8s %8s %8s\n' module killed survived other 'not run'
awk '{
	split($1, name, "."); state = substr($0, index($0, ": ") + 2)
	key = state ~ /killed|timeout|segfault/ ? "killed" : state == "survived" ? "survived" : state == "not checked" ? "not run" : "other"
	count[name[2], key]++; count["all", key]++; modules[name[2]]
} END {
	modules["all"]
	for (m in modules) printf "%-10s %8d %8d %8d %8d\n", m, count[m, "killed"], count[m, "survived"], count[m, "other"], count[m, "not run"]
}' results.txt | sort
