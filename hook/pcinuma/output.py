"""A file that is written whole or not at all."""

from __future__ import annotations

import contextlib
import os

from pcinuma.errors import BadInput


class Replacement:
    """A file's new content, on disk beside it and not yet in its place. Raises BadInput when it cannot be written.

    A link is followed; owner and permissions of a file that is there stay.
    """

    def __init__(self, path: str, data: bytes):
        self._path = path
        self._target = os.path.realpath(path)
        if os.path.isdir(self._target):  # as the empty path is: it would be found out when other outputs are written
            raise BadInput("cannot be written: Is a directory", where=path)
        self._temporary: str | None = f"{self._target}.{os.urandom(6).hex()}.tmp"
        try:
            self._write(self._temporary, data)
        except OSError as error:
            self.discard()
            raise BadInput(f"cannot be written: {error.strerror or error}", where=path) from None
        except BaseException:
            self.discard()
            raise

    def _write(self, temporary: str, data: bytes) -> None:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(self._target):
            old = os.stat(self._target)
            with contextlib.suppress(OSError):  # only root may give a file away
                os.chown(temporary, old.st_uid, old.st_gid)
            os.chmod(temporary, old.st_mode & 0o7777)

    def take_place(self) -> None:
        """Become the file, in one step. Raises BadInput."""
        assert self._temporary is not None
        try:
            os.replace(self._temporary, self._target)
        except OSError as error:
            raise BadInput(f"cannot be written: {error.strerror or error}", where=self._path) from None
        self._temporary = None

    def discard(self) -> None:
        """Leave nothing behind of what has not taken its place."""
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None
