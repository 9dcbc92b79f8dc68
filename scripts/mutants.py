"""Mutation testing of what decides over a VM, with mutmut and the tests that need neither libvirt nor a guest.

    scripts/mutants.py [MINUTES] [--again] [MODULE...]

What a run got to is kept in build/mutants, and the next goes on from there; --again tries those once more that lived.
A folder for each module: mutmut asks at every call of a function that it may change which mutant is wanted, and with
one module to change most of the code runs as it is. Mutants that change nothing but the words of a sentence go last.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "mutants"
MODULES = (
    "plan",
    "apply",
    "verify",
    "layout",
    "audit",
    "audit_room",
    "audit_parts",
    "switches",
    "io_space",
    "tune",
    "mmio",
)
TESTS = (
    "tests/golden/test_golden.py",
    "tests/property/test_pipeline.py",
    "tests/unit/test_apply.py",
    "tests/unit/test_audit.py",
    "tests/unit/test_layout.py",
    "tests/unit/test_mapping.py",
    "tests/unit/test_mmio.py",
    "tests/unit/test_plan.py",
    "tests/unit/test_switches.py",
    "tests/unit/test_tune.py",
    "tests/unit/test_verify.py",
    "tests/integration/test_check.py",
    "tests/integration/test_convergence.py",
    "tests/integration/test_hand_edited.py",
)
CONFIG = """
[tool.pytest.ini_options]
addopts = "--import-mode=importlib -p no:cacheprovider"
pythonpath = ["."]
markers = ["libvirt: ", "guest: ", "browser: "]

[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/pcinuma/{module}.py"]
also_copy = ["schemas", "examples", "docs", "README.md"]
pytest_add_cli_args = ["-p", "mutants_plugin", "--assert=plain", "-m", "not libvirt and not guest and not browser"]
pytest_add_cli_args_test_selection = {tests}
"""
# the first half of what mutmut does when it runs, so that mutants can be chosen by what they change
MAKE = """
from os import makedirs
from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants
makedirs("mutants", exist_ok=True)
copy_src_dir()
copy_also_copy_files()
create_mutants(1)
"""
# A few random domains for each mutant, always the same; one that fails is enough, it need not be made small. That the
# same input gives the same output twice is no mutant's to break.
FEWER = {
    "tests/property/test_pipeline.py": {
        "max_examples=250": "max_examples=8, derandomize=True, database=None, phases=[Phase.generate]",
        "import HealthCheck, given": "import HealthCheck, Phase, given",
    },
    "tests/golden/test_golden.py": {"        assert case.transform(case.domain).xml == result.xml\n": ""},
}
STATES = {None: "not run", 0: "lived", 1: "killed", 33: "no tests"}  # any other: it ran out of time, or died


def main() -> None:
    parser = argparse.ArgumentParser(description="mutation testing; see the docstring")
    parser.add_argument("minutes", type=float, nargs="?", default=60)
    parser.add_argument("--again", action="store_true", help="those too that lived")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(MODULES))
    args = parser.parse_intermixed_args()
    if unknown := set(args.modules) - set(MODULES):
        parser.error(f"no module of these: {', '.join(sorted(unknown))}")
    if not 0 < args.minutes < 1e6:
        parser.error(f"minutes: {args.minutes} is not above 0")
    modules = args.modules or MODULES
    end = time.monotonic() + 60 * args.minutes
    for module in modules:
        prepare(module)
    for words in (False, True):
        for module in modules:
            wanted = {"not run", "lived", "out of time"} if args.again else {"not run"}
            run(module, wanted, words, end)
    table()


def prepare(module: str) -> None:
    """The module's folder as the project is now. Files keep their times: mutants are made anew of what has changed."""
    work = BUILD / module
    for name in ("src", "tests", "schemas", "examples", "docs", "plugin", "mutants/tests"):
        shutil.rmtree(work / name, ignore_errors=True)
    # which test reaches which function is found out anew; what a test has killed stands while its function is the same
    (work / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    shutil.copytree(ROOT / "hook" / "pcinuma", work / "src" / "pcinuma")  # mutmut knows the names below src/ only
    for name in ("tests", "schemas", "examples", "docs"):
        shutil.copytree(ROOT / name, work / name, symlinks=True)
    shutil.copy2(ROOT / "README.md", work)
    (work / "plugin").mkdir()
    shutil.copy2(ROOT / "scripts" / "mutants_plugin.py", work / "plugin")
    for file, changes in FEWER.items():
        text = (work / file).read_text()
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (work / file).write_text(text)
    (work / "pyproject.toml").write_text(CONFIG.format(module=module, tests=list(TESTS)))
    start(module, "-c", MAKE)


def run(module: str, wanted: set[str], words: bool, end: float) -> None:
    chosen = [name for name, state, in_words in results(module) if state in wanted and in_words == words]
    if chosen and end > time.monotonic():
        print(f"{module}: {len(chosen)} mutants{' of words' if words else ''}", flush=True)
        start(module, "-m", "mutmut", "run", "--max-children", "2", *chosen, end=end)


def start(module: str, *args: str, end: float | None = None) -> None:
    """A Python of its own in the module's folder; at ``end`` it is told to finish, as by Ctrl-C."""
    work = BUILD / module
    # mutmut takes its own folder off the path; plugins that are found by themselves cost a quarter of a short run
    env = os.environ | {"PYTHONPATH": str(work / "plugin"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with (work / "log.txt").open("w") as log:
        command = ["nice", "-n", "10", sys.executable, *args]
        # a shell starts what is to run behind it with SIGINT ignored, which would be inherited
        process = subprocess.Popen(command, cwd=work, env=env, stdout=log, stderr=log, preexec_fn=_with_sigint)
        try:
            status = process.wait(end and max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
            return
    if status:
        sys.exit(f"mutmut failed, see {work / 'log.txt'}")


def _with_sigint() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# --- what came of it -------------------------------------------------------------------------------------------


def results(module: str) -> Iterator[tuple[str, str, bool]]:
    """Of each mutant its name, its state and whether it changes nothing but the words of a sentence."""
    mutated = BUILD / module / "mutants" / "src" / "pcinuma" / f"{module}.py"
    if not mutated.exists():
        return
    functions = {
        node.name: node for node in ast.walk(ast.parse(mutated.read_text())) if isinstance(node, ast.FunctionDef)
    }
    meta = json.loads(mutated.with_name(f"{module}.py.meta").read_text())
    for name, code in meta["exit_code_by_key"].items():
        short = name.rpartition(".")[2]
        original = functions[short.rpartition("__mutmut_")[0] + "__mutmut_orig"]
        yield name, STATES.get(code, "out of time"), only_words(original, functions[short])


def only_words(original: ast.AST, mutant: ast.AST) -> bool:
    changed = [
        (str(old.value), str(new.value))
        for old, new in zip(ast.walk(original), ast.walk(mutant), strict=False)
        if isinstance(old, ast.Constant) and isinstance(new, ast.Constant) and old.value != new.value
    ]
    return [" " in old and old.lower() == new.replace("XX", "").lower() for old, new in changed] == [True]


def table() -> None:
    columns = ("killed", "lived", "words lived", "out of time", "no tests", "not run")
    total: Counter[str] = Counter()
    rows = []
    for module in sorted(MODULES):
        found = Counter(
            "words lived" if (state, words) == ("lived", True) else state for _, state, words in results(module)
        )
        total += found
        rows.append((module, found))
    print("| module | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for module, found in (*rows, ("all", total)):
        print(f"| {module} | " + " | ".join(f"{found[column]:,}" for column in columns) + " |")


if __name__ == "__main__":
    main()
