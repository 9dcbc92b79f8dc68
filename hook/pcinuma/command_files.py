"""The files of a command: what it reads, and what it writes, whole or not at all."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from pcinuma.edge import PROGRAM, json_text, read_file, write_stdout
from pcinuma.errors import BadInput, BadOption

if TYPE_CHECKING:
    from pcinuma.output import Replacement


def domain_of(parsed: argparse.Namespace) -> tuple[bytes, str]:
    from pcinuma.domain_xml import MAX_BYTES

    return file_or_stdin(parsed.domain, MAX_BYTES, "domain XML", f"virsh dumpxml VM | {PROGRAM} {parsed.name}")


def file_or_stdin(path: str, limit: int, what: str, example: str) -> tuple[bytes, str]:
    """The bytes of the file, or of standard input for ``-``, up to ``limit`` + 1, and where they are from."""
    if path != "-":
        return read_file(path, limit), path
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput(f"no {what}", hint=f"give a file, or pipe one in: {example}")
    return sys.stdin.buffer.read(limit + 1), "standard input"


def spare_inputs(parsed: argparse.Namespace, *, in_place: bool = False) -> None:
    """No output replaces an input; with ``in_place`` the new domain may replace the domain. Raises BadOption."""
    given = vars(parsed)
    inputs = {name: given.get(name.replace("-", "_")) for name in ("domain", "vmi", "host", "config", "kubelet-config")}
    for flag, name in (("-o", "output"), ("--report", "report"), ("--svg", "svg")):
        path = given.get(name)
        if path == "":
            raise BadOption(f"{flag} names no file", where=flag)
        if path is None or path == "-" or not os.path.isfile(path):  # a terminal is read and written
            continue
        for kind, other in inputs.items():
            if other in (None, "-") or (in_place and flag == "-o" and kind == "domain"):
                continue
            if os.path.realpath(other) == os.path.realpath(path):
                what = "the domain" if kind == "domain" else f"the file of --{kind}"
                raise BadOption(f"{flag} would overwrite {what}", where=path)
        drop_ins = given.get("kubelet_config_dir")
        if drop_ins is not None and os.path.realpath(path).startswith(os.path.join(os.path.realpath(drop_ins), "")):
            raise BadOption(f"{flag} would overwrite a file of --kubelet-config-dir", where=path)


def refuse_one_file(parsed: argparse.Namespace) -> None:
    """--svg writes a file of its own, and no other output goes there."""
    if parsed.svg is None:
        return
    if parsed.svg == "-":
        raise BadOption("--svg takes a file: standard output carries the tree", hint="pcinuma explain --svg FILE.svg")
    for flag, other in (("-o", parsed.output), ("--report", parsed.report)):
        if other is not None and os.path.realpath(other) == os.path.realpath(parsed.svg):
            raise BadOption(f"{flag} and --svg name one file", where=parsed.svg)


def report_output(parsed: argparse.Namespace, content: dict[str, Any]) -> list[tuple[str | None, bytes]]:
    """The output of ``--report``, if it is wanted."""
    if parsed.report is None:
        return []
    if parsed.report == "-":
        raise BadOption(
            "--report takes a file: standard output carries the result alone", hint="pcinuma explain --json"
        )
    same = parsed.output is not None and os.path.realpath(parsed.report) == os.path.realpath(parsed.output)
    if same:
        raise BadOption("-o and --report name one file", where=parsed.report)
    return [(parsed.report, json_text(content).encode("utf-8"))]


def write(path: str | None, data: bytes) -> None:
    """To the file, whole or not at all; to standard output for None and ``-``."""
    write_all((path, data))


def write_all(*outputs: tuple[str | None, bytes]) -> None:
    """Every output, or no file: each is written beside its place first, and none takes it before all are whole.

    Pipes, devices and at last standard output are written to in between: what they got cannot be taken back.
    """
    streams = [(path, data) for path, data in outputs if path is None or path == "-"]
    named = [(path, data) for path, data in outputs if path is not None and path != "-"]
    special = [(path, data) for path, data in named if os.path.lexists(path) and not os.path.isfile(path)]
    prepared: list[Replacement] = []
    try:
        for output in named:
            if output not in special:
                from pcinuma.output import Replacement  # most commands write to standard output alone

                prepared.append(Replacement(*output))
        for path, data in special:
            _write_special(path, data)
        reader_has_gone: BrokenPipeError | None = None
        for _, data in streams:
            try:
                write_stdout(data)
            except BrokenPipeError as error:  # as with `| head`: the files are wanted all the same
                reader_has_gone = error
        for replacement in prepared:
            replacement.take_place()
        if reader_has_gone is not None:
            raise reader_has_gone
    finally:
        for replacement in prepared:
            replacement.discard()


def _write_special(path: str, data: bytes) -> None:
    """To a pipe or a device, which is written to, not replaced."""
    try:
        with open(path, "wb") as special:
            special.write(data)
    except OSError as error:
        raise BadInput(f"cannot be written: {error.strerror or error}", where=path) from None
