"""One fuzz target for some seconds, from the kept corpus on. Exit status 0: nothing was found.

A target is a name in `fuzz.targets` or `fuzz.processes`, or ``module:function``. Inputs that reach something new go
into fuzz/found, what fails into fuzz/finds; --input runs one input again, --minimise makes the corpus anew.
"""

from __future__ import annotations

import argparse
import importlib
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

from fuzz.mutate import mutated

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
TARGETS = (
    "domain", "shown", "grammar", "host", "sysfs", "vmi", "kubelet", "configuration_space", "review", "connection",
)  # fmt: skip
PROCESSES = ("hook_process", "webhook_process")
SHARED = {"shown": "domain"}
"""Targets whose corpus is another's."""
TEXTS = ("domain", "shown", "host", "vmi", "kubelet", "sysfs", "review")
"""The targets whose inputs are texts, which are also changed by their tokens."""
MOST_BYTES = 16 * 1024
MOST_SECONDS = 20  # for one input
MOST_MEMORY = 512  # MB, of which the fuzzer itself takes 70


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", help=", ".join(("all", *TARGETS, *PROCESSES)))
    parser.add_argument("--seed", type=_whole, help="of the random numbers (default: another one each time)")
    parser.add_argument("--seconds", type=_whole, default=60, help="for each target (default: 60)")
    parser.add_argument("--minutes", type=_minutes, help="the same in minutes")
    parser.add_argument("--input", help="run this input alone")
    parser.add_argument("--found", help="the folder for new inputs (default: fuzz/found/TARGET)")
    parser.add_argument("--finds", default=str(HERE / "finds"), help="the folder for what fails")
    parser.add_argument("--minimise", action="store_true", help="make the corpus anew of itself and what was found")
    parser.add_argument("--libfuzzer", nargs=argparse.REMAINDER, help="the command line that libFuzzer gets")
    given = parser.parse_args()
    if ":" not in given.target and given.target not in ("all", *TARGETS, *PROCESSES):
        parser.error(f"no target {given.target!r}: {', '.join(('all', *TARGETS, *PROCESSES))}")
    plain = given.target in ("all", *PROCESSES)
    if plain and (given.input is not None or given.minimise):
        parser.error(f"{given.target} takes no --input and no --minimise: it has no corpus of its own")
    if given.target == "all" and given.seed is not None:
        parser.error("all takes no --seed: each target has its own")
    if given.input is not None and not Path(given.input).is_file():
        parser.error(f"no file {given.input!r}")
    if given.minutes is not None:
        given.seconds = given.minutes

    if given.target == "all":
        sys.exit(_all(given.seconds))
    if given.target in PROCESSES:
        from fuzz import processes

        seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
        print(f"seed {seed}", flush=True)
        count = getattr(processes, given.target)(given.seconds, seed, Path(given.finds))
        print(f"{count} inputs in {given.seconds} seconds")
        return

    module, _, name = given.target.rpartition(":")
    with atheris.instrument_imports(include=["pcinuma", *([module] if module else [])], enable_loader_override=False):
        target = getattr(importlib.import_module(module or "fuzz.targets"), name)
    kept = CORPUS / SHARED.get(name, name)
    if given.minimise:
        kept.mkdir(exist_ok=True)
    found = Path(given.found or HERE / "found" / name)
    finds = Path(given.finds)
    for folder in (found, finds):
        folder.mkdir(parents=True, exist_ok=True)

    flags = [
        sys.argv[0],
        f"-timeout={MOST_SECONDS}",
        f"-rss_limit_mb={MOST_MEMORY}",
        f"-artifact_prefix={finds}/{name}-",
    ]
    if given.libfuzzer:
        flags = given.libfuzzer
    elif given.input is not None:
        flags += [given.input]
    elif given.minimise:
        sys.exit(_minimise(given.target, kept, found))
    else:
        flags += [f"-max_total_time={given.seconds}", f"-max_len={MOST_BYTES}", "-print_final_stats=1"]
        flags += [f"-seed={given.seed}"] if given.seed is not None else []
        flags += [str(found), *([str(kept)] if kept.is_dir() else [])]
    atheris.Setup(flags, target, **({"custom_mutator": _mutator} if name in TEXTS else {}))
    atheris.Fuzz()


def _whole(text: str) -> int:
    """A number above 0: libFuzzer takes 0 for "for ever", and for "any seed"."""
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def _minutes(text: str) -> int:
    """So many minutes, in seconds."""
    try:
        seconds = 60 * float(text)
    except ValueError:
        seconds = 0
    if not 1 <= seconds < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return int(seconds)


def _all(seconds: int) -> int:
    """Every target, one after the other; 1 when one of them found something."""
    failed = []
    for name in (*TARGETS, *PROCESSES):
        print(f"{name}: {seconds} seconds", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "fuzz", name, "--seconds", str(seconds)],
            cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        print("\n".join(lines[-40:] if done.returncode else lines[-5:]), flush=True)
        if done.returncode != 0:
            failed.append(name)
    print(f"found something: {', '.join(failed)}; the inputs are in {HERE / 'finds'}" if failed else "nothing found")
    return 1 if failed else 0


def _minimise(target: str, kept: Path, found: Path) -> int:
    """The fewest inputs of both folders that reach all branches that they reach, in ``kept``; libFuzzer's exit status.
    How often a branch is taken does not count: that made three times as many."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh, itself = Path(scratch) / "fresh", Path(scratch) / "again"
        fresh.mkdir()
        # libFuzzer starts itself again when an input ends it, by its first argument
        itself.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fuzz {target} --libfuzzer "$0" "$@"\n')
        itself.chmod(0o755)
        folders = [str(fresh), str(kept), str(found)]
        done = subprocess.run([itself, "-set_cover_merge=1", "-use_counters=0", *folders], cwd=HERE.parent, check=False)
        if done.returncode == 0 and any(fresh.iterdir()):
            shutil.rmtree(kept)
            shutil.copytree(fresh, kept)
        return done.returncode


def _mutator(data: bytes, most: int, seed: int) -> bytes:
    """One in three changes is libFuzzer's own, by bytes."""
    dice = random.Random(seed)
    if dice.randrange(3) == 0:
        changed: bytes = atheris.Mutate(data, len(data))
        return changed
    return mutated(data, dice, most)


if __name__ == "__main__":
    main()
