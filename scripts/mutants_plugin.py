"""A pytest plugin for scripts/mutants.py: what a mutant costs. Which tests are run against it stays mutmut's choice.

mutmut forks a process for each mutant and starts pytest in it, which collects all tests before it runs the first; most
mutants fail that one. With this, tests are collected once, before the first fork. The tests that found mutants of the
same function before (the file KILLERS has them, a line each: function, test) go first, those of random domains, the
dearest, last; the first that fails is the end. Of a mutant that lives every test of its function has been run.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from _pytest.config import _prepareconfig
from mutmut.configuration import config as mutmut_config
from mutmut.mutation import trampoline
from mutmut.runners.harness import PytestRunner
from mutmut.utils.file_utils import change_cwd
from mutmut.workers.isolation import ForkRunner

KILLERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "killers.txt")

_collected: dict[str, pytest.Item] = {}
_start, _run_tests = ForkRunner.startup, PytestRunner.run_tests


def collect(runner: ForkRunner) -> None:
    """What ``pytest --collect-only`` does, and what is collected stays; then mutmut's own preparation for forks."""
    given = mutmut_config()
    quiet = ["--rootdir=.", "-p", "no:terminal", "-s"]
    with change_cwd("mutants"):
        config = _prepareconfig([*quiet, *given.pytest_add_cli_args_test_selection, *given.pytest_add_cli_args], [])
        config.option.tbstyle = "value"  # a traceback would have the whole module parsed, with all mutants of it
        config._do_configure()
        session = pytest.Session.from_config(config)
        config.hook.pytest_sessionstart(session=session)
        config.hook.pytest_collection(session=session)
        _collected.update((item.nodeid, item) for item in session.items)
    _start(runner)


def run_tests(runner: PytestRunner, *, mutant_name: str | None, tests: Iterable[str]) -> int:
    """Exit status 1 when a test fails, else 0. Without a mutant, or where nothing is collected: pytest's."""
    if mutant_name is None or not _collected:
        return _run_tests(runner, mutant_name=mutant_name, tests=tests)
    gc.disable()  # the process is short
    trampoline.get_mutant_under_test = lambda: mutant_name  # the code under test asks at every call
    function = mutant_name.rpartition("__mutmut_")[0]
    found = Counter(_killers(function))
    order = sorted(tests, key=lambda test: (-found[test], test.startswith("tests/property")))
    items = [_collected[test] for test in order]
    watch = _Watch()
    items[0].config.pluginmanager.register(watch)
    with change_cwd("mutants"):
        for test, item, following in zip(order, items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if watch.failed:
                with open(KILLERS, "a", encoding="utf-8") as file:  # a line is one write: workers do not mix theirs
                    file.write(f"{function} {test}\n")
                return 1
    return 0


class _Watch:
    failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed


def _killers(function: str) -> Iterator[str]:
    if os.path.exists(KILLERS):
        with open(KILLERS, encoding="utf-8") as file:
            for line in file:
                of, _, test = line.rstrip("\n").partition(" ")
                if of == function:
                    yield test


ForkRunner.startup = collect  # type: ignore[assignment, method-assign]
PytestRunner.run_tests = run_tests  # type: ignore[assignment, method-assign]
