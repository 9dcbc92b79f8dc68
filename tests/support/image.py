"""The image's file system, made step by step as the Dockerfile says, and programs in it under what a pod imposes.

No container engine takes part: a Debian root from debootstrap stands for the build stage, namespaces and a chroot for
the container. Steps, environment, user and command are read from the Dockerfile, so that they are those of the image.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT
from tests.support import sidecar

DOCKERFILE = ROOT / "Dockerfile"
SCRIPT = "scripts/image.sh"
_CACHE = Path("/var/tmp")
_CACHE_DAYS = 7
_PLAIN = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


@dataclass(frozen=True)
class Recipe:
    """What the Dockerfile says. ``copied``: the project's files and folders that go into the build stage."""

    base: str
    copied: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]
    environment: dict[str, str]
    user: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]


def recipe(text: str | None = None) -> Recipe:
    """The Dockerfile, read. Raises AssertionError for an instruction that is not known here: nothing is passed over."""
    copied: list[str] = []
    runs: list[tuple[str, ...]] = []
    environment: dict[str, str] = {}
    said: dict[str, str] = {}
    stages: list[str] = []
    for line in (DOCKERFILE.read_text() if text is None else text).splitlines():
        if not line or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            stages.append(rest)
        elif instruction == "COPY" and rest.startswith("--from=build"):
            assert rest == "--from=build /tree/ /", rest
        elif instruction == "COPY":
            *sources, target = rest.split()
            for source in sources:
                as_it_is = len(sources) > 1 or (ROOT / source).is_file()
                where = target + source.rsplit("/", 1)[-1] if as_it_is else target
                assert where == f"/src/{source}", f"{line}: not where the tests put it"
                copied.append(source)
        elif instruction == "RUN":
            runs.append(tuple(json.loads(rest)))
        elif instruction == "ENV":
            environment.update(dict(part.split("=", 1) for part in rest.split()))
        elif instruction in ("USER", "ENTRYPOINT", "CMD"):
            said[instruction] = rest
        else:
            assert line == "ARG BASE_DIGEST", f"not known to the tests: {line}"
    assert len(stages) == 2, stages
    assert stages[1] == "scratch", stages
    return Recipe(
        base=stages[0],
        copied=tuple(copied),
        runs=tuple(runs),
        environment=environment,
        user=said["USER"],
        entrypoint=tuple(json.loads(said["ENTRYPOINT"])),
        command=tuple(json.loads(said["CMD"])),
    )


def build(place: Path) -> Path:
    """The image's tree, below ``place``; made once for all who name the same place, in about ten seconds.

    The Debian root is kept in /var/tmp for a week: it takes a minute.
    """
    place.mkdir(parents=True, exist_ok=True)
    tree = place / "tree"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            _build(place)
            (place / "done").touch()
    return tree


def _build(place: Path) -> None:
    made, root = recipe(), place / "root"
    assert made.runs == ((f"/src/{SCRIPT}", "packages"), (f"/src/{SCRIPT}", "tree", "/src", "/tree"))
    root.mkdir()
    _run("tar", "-C", root, "-xf", _debian(re.split("[-:]", made.base)[1]))
    for source in made.copied:
        target = root / "src" / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, target)
    wheels = root / "wheels"
    locks = [part for name in ("run", "build") for part in ("-r", ROOT / f"requirements/{name}.txt")]
    version = next((root / "usr/bin").glob("python3.??")).name.removeprefix("python")
    download = ("pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--python-version", version)
    _run(sys.executable, "-m", *download, "--require-hashes", *locks, "-d", wheels, environment=dict(os.environ))
    offline = {**_PLAIN, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
    _run("chroot", root, *made.runs[1], environment=offline)
    os.rename(root / "tree", place / "tree")
    shutil.rmtree(root)  # pytest keeps the folders of three runs


def _debian(release: str) -> Path:
    """A tar of a Debian root with what the build stage installs, a week old at most."""
    packages = _run(ROOT / SCRIPT, "list").split()
    key = hashlib.sha256(repr((release, packages)).encode()).hexdigest()[:12]
    cached = _CACHE / f"pcinuma-test-{release}-{key}.tar"
    with contextlib.suppress(FileNotFoundError):
        status = cached.stat()
        # the folder is everybody's: only what we made ourselves is taken
        if status.st_uid == os.geteuid() and time.time() - status.st_mtime < _CACHE_DAYS * 86400:
            return cached
    fresh = _CACHE / f"pcinuma-test-{release}-{os.getpid()}"
    try:
        include = ",".join(packages)
        _run("debootstrap", "--variant=minbase", f"--include={include}", release, fresh, environment=dict(os.environ))
        _run("tar", "-C", fresh, "--exclude=./var/cache/apt/*", "--exclude=./dev/*", "-cf", f"{fresh}.tar", ".")
        os.replace(f"{fresh}.tar", cached)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return cached


def _run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], env=environment or _PLAIN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


# --- in the container ------------------------------------------------------------------------------------------

_ENTER = """
set -e
mount --make-rprivate /
mount --bind "$TREE" "$TREE"
mount --rbind /sys "$TREE/sys"
mount -o remount,bind,ro "$TREE/sys"
mount -t proc proc "$TREE/proc"
mount -t tmpfs tmpfs "$TREE/dev"
touch "$TREE/dev/null"
mount --bind /dev/null "$TREE/dev/null"
mount -o remount,ro "$TREE/dev"
mount -t tmpfs tmpfs "$TREE/var/run"
mkdir "$TREE/var/run/kubevirt-hooks"
mount --bind "$SOCKETS" "$TREE/var/run/kubevirt-hooks"
mount -o remount,ro "$TREE/var/run"
mount -o remount,bind,ro "$TREE"
exec setpriv --no-new-privs env -i "$@"
"""


def command(tree: Path, sockets: Path, *program: str, network: bool = False) -> tuple[list[str], dict[str, str]]:
    """What runs a program of the image, as the very process that is started, and that command's own environment.

    It has what a container in virt-launcher's pod has: the image's user and environment, a read-only root, no network
    (unless ``network``), the host's /sys read-only, no new privileges, and the sockets' folder to write in.
    """
    made = recipe()
    inside = [f"{name}={value}" for name, value in made.environment.items()] + ["CONTAINER_NAME=hook-sidecar-0"]
    enter = ["/usr/sbin/chroot", f"--userspec={made.user}", "--groups=", str(tree)]
    outside = {**_PLAIN, "TREE": str(tree), "SOCKETS": str(sockets)}
    spaces = ["--mount"] if network else ["--mount", "--net"]
    return ["unshare", *spaces, "--", "sh", "-c", _ENTER, "sh", *inside, *enter, *program], outside


def run(tree: Path, *program: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """A program of the image that is to end by itself."""
    with sidecar.folder() as sockets:
        arguments, environment = command(tree, sockets, *program)
        return subprocess.run(arguments, env=environment, input=given, capture_output=True, timeout=60, check=False)


@contextlib.contextmanager
def running(tree: Path, *arguments: str, files: dict[str, bytes] | None = None) -> Iterator[sidecar.Sidecar]:
    """The image's container as KubeVirt starts it: entry point and command, then ``arguments``.

    ``files`` are put into /var/run/kubevirt-hooks before.
    """
    made = recipe()
    user, _, group = made.user.partition(":")
    with sidecar.folder() as sockets:
        os.chown(sockets, int(user), int(group))
        for name, content in (files or {}).items():
            (sockets / name).write_bytes(content)
        line, environment = command(tree, sockets, *made.entrypoint, *made.command, *arguments)
        log = sockets / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr
            )
        try:
            deadline = time.monotonic() + sidecar.READY_SECONDS
            while not (found := sorted(sockets.glob("*.sock"))):
                assert process.poll() is None, f"ended with {process.returncode}: {log.read_text()}"
                assert time.monotonic() < deadline, f"no socket: {log.read_text()}"
                time.sleep(0.01)
            yield sidecar.Sidecar(process, found[0], None, log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
