"""A pytest plugin for scripts/mutants.py: what a mutant costs. Which tests are run against it stays mutmut's choice.

mutmut starts a process for each mutant, which stops at the first test that fails. The tests that found mutants of the
same function before (the file KILLERS has them, a line each: function, test) go first, those of random domains, the
dearest, last. Of a mutant that lives every test of its function has been run.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator

import pytest
from mutmut.mutation import trampoline

KILLERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "killers.txt")
WANTED = pytest.StashKey[dict[str, int]]()


def _mutant() -> str:
    return os.environ.get("MUTANT_UNDER_TEST", "")


def _killers(function: str) -> Iterator[str]:
    if os.path.exists(KILLERS):
        with open(KILLERS, encoding="utf-8") as file:
            for line in file:
                of, _, test = line.rstrip("\n").partition(" ")
                if of == function:
                    yield test


def pytest_configure(config: pytest.Config) -> None:
    """Collect whole files, which is far cheaper than as many tests by name; and look up once which mutant is asked for,
    which the code under test does at every call."""
    wanted = {test: place for place, test in enumerate(config.args) if "::" in test}
    config.stash[WANTED] = wanted
    if wanted:
        config.args[:] = dict.fromkeys(test.partition("::")[0] for test in config.args)
    if "__mutmut_" in (mutant := _mutant()):
        gc.disable()  # the process is short
        trampoline.get_mutant_under_test = lambda: mutant


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.stash[WANTED]
    if not wanted:
        return
    function, _, number = _mutant().rpartition("__mutmut_")
    found = Counter(_killers(function)) if number else Counter()

    def place(item: pytest.Item) -> tuple[int, bool, int]:
        return -found[item.nodeid], item.nodeid.startswith("tests/property"), wanted[item.nodeid]

    items[:] = sorted((item for item in items if item.nodeid in wanted), key=place)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    function, _, number = _mutant().rpartition("__mutmut_")
    if report.failed and number:
        with open(KILLERS, "a", encoding="utf-8") as file:  # a line is one write: workers do not mix theirs
            file.write(f"{function} {report.nodeid}\n")
