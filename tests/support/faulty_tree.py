"""A tree of files shown through FUSE, which fails on demand as a kernel's ``/sys`` does when a device goes away.

``python -m tests.support.faulty_tree SOURCE MOUNT CONTROL`` serves until it is ended. What fails is said by the JSON in
the file CONTROL, which is read at each operation.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

READY_SECONDS = 20.0
EMPTY = "empty"
"""In place of an errno's name: a read gives nothing."""


@dataclass(frozen=True)
class Fault:
    """After so many operations below ``under``, those there fail.

    ``error`` is an errno's name or EMPTY. ENOENT is for all operations; any other error lets a path be found, and is for
    those in ``at``: open (a file), list (a folder), follow (a link), read. Each takes ``seconds`` more; with no error
    they are slow and nothing else.
    """

    after: int = 0
    under: str = "/"
    error: str | None = None
    at: tuple[str, ...] = ("open", "list", "follow", "read")
    seconds: float = 0.0


class FaultyTree:
    """A mounted tree. ``path`` is where."""

    def __init__(self, path: Path, control: Path, process: subprocess.Popen[bytes]):
        self.path = path
        self._process = process
        self._control = control
        self._hits = control.with_suffix(".hits")
        self._round = 0
        self.set(None)

    def set(self, fault: Fault | None) -> None:
        """From now on; operations are counted anew."""
        self._round += 1
        self._hits.unlink(missing_ok=True)
        told = {"round": self._round, **asdict(fault if fault is not None else Fault())}
        new = self._control.with_suffix(".new")
        new.write_text(json.dumps(told))
        new.rename(self._control)

    def abort(self) -> None:
        """End what serves it: operations that hang fail, and all others from now on."""
        self._process.kill()
        self._process.wait()

    @property
    def has_failed(self) -> bool:
        """Whether an operation has, since the fault was set."""
        return self._hits.exists()


@contextlib.contextmanager
def mounted(source: Path, scratch: Path) -> Iterator[FaultyTree]:
    """``source`` through FUSE, at a folder in ``scratch``."""
    mount, control = scratch / "mount", scratch / "control"
    mount.mkdir()
    command = [sys.executable, "-m", "tests.support.faulty_tree", *map(str, (source, mount, control))]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    tree = FaultyTree(mount, control, process)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not os.path.ismount(mount):
            assert process.poll() is None, "FUSE has ended"
            assert time.monotonic() < deadline, "FUSE does not mount"
            time.sleep(0.01)
        yield tree
    finally:
        tree.abort()
        subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)


# --- the process -----------------------------------------------------------------------------------------------


def main(source: str, mount: str, control: str) -> None:
    import mfusepy

    hits = Path(control).with_suffix(".hits")

    class Operations(mfusepy.Operations):  # type: ignore[misc]
        """A read-only tree; files and folders have no handles of their own."""

        use_ns = True

        def __init__(self) -> None:
            self._round = self._count = 0

        def _at(self, path: str, kind: str) -> tuple[str, bool]:
            """The path in the source, and whether a read of it is to be empty. Raises what is to fail."""
            told = json.loads(Path(control).read_text())
            if told["round"] != self._round:
                self._round, self._count = told["round"], 0
            real = source + path.rstrip("/")
            if not f"{path}/".startswith(told["under"].rstrip("/") + "/"):
                return real, False
            self._count += 1
            fails = told["error"] is not None and (told["error"] == "ENOENT" or kind in told["at"])
            if self._count <= told["after"] or not (fails or told["seconds"]):
                return real, False
            hits.touch()
            time.sleep(told["seconds"])
            if fails and told["error"] != EMPTY:
                raise mfusepy.FuseOSError(getattr(errno, told["error"]))
            return real, fails

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            real, _ = self._at(path, "look")
            found = os.lstat(real)
            names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_atime_ns", "st_mtime_ns", "st_ctime_ns")
            told = {name.removesuffix("_ns"): getattr(found, name) for name in names}
            return {**told, "st_size": 4096 if os.path.isfile(real) else found.st_size}  # as sysfs says of any file

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(self._at(path, "list")[0])]

        def readlink(self, path: str) -> str:
            return os.readlink(self._at(path, "follow")[0])

        def open(self, path: str, flags: int) -> int:
            self._at(path, "open")
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            real, empty = self._at(path, "read")
            return b"" if empty else Path(real).read_bytes()[offset : offset + size]

    mfusepy.FUSE(
        Operations(),
        mount,
        foreground=True,
        ro=True,
        allow_other=True,
        default_permissions=True,
        direct_io=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        fsname="faulty",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
