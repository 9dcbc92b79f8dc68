"""What the commands share at the edge: reading files, option flags, the host, and errors turned into a status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from pcinuma.errors import BadInput, BadOption, PcinumaError

if TYPE_CHECKING:
    from pcinuma.discover import ReadHost

PROGRAM = "pcinuma"
INTERRUPTED = 130

OPTION_HELP = {
    "policy": "what happens to devices that do not fit their own cell (default: best-effort)",
    "group-by": "numa (default): an expander per cell; root-complex: one per host root complex of a cell;"
    " switch: the host's PCIe switches rebuilt below the cell's expander",
    "unmapped": "what to do with a device whose host node is of no cell (default: leave)",
    "addressed": "whether a device that has a guest address keeps it (default: keep)",
    "mmio": "BARs that the guest cannot address: say so (report, default), or set maxphysaddr as well (apply)",
    "distances": "host: write the host's NUMA distances where the domain has none (default: keep)",
    "gpudirect-clique": "by-switch: one GPUDirect clique for NVIDIA GPUs below one host switch (default: none)",
}
"""What each option does, in a line: for `--help` and the debug page."""


def guarded(run: Callable[[], int], *, debug: bool) -> int:
    """Run a command; its exit status: 0 done, 1 refused, 2 bad input or usage, 130 interrupted.

    Every error becomes one line on standard error; a traceback is shown with ``debug`` alone.
    """
    _hold_standard_descriptors()
    try:
        return run()
    except BrokenPipeError:
        _forget(1)  # the reader of our output has gone, as `| head` does
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if debug:
            import traceback  # only here: a sidecar starts without it

            traceback.print_exc()
        known = _as_ours(error)
        complain(known)
        return known.exit_status


def _hold_standard_descriptors() -> None:
    """Open ``/dev/null`` where 0, 1 or 2 is closed: else the next file or socket would get the number, and what is
    meant for standard error would go into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _as_ours(error: Exception) -> PcinumaError:
    if isinstance(error, PcinumaError):
        return error
    if isinstance(error, OSError):
        return BadInput(error.strerror or str(error), where=error.filename)
    if isinstance(error, (RecursionError, MemoryError)):
        return BadInput(f"the input is too large or too deep ({type(error).__name__})")
    what = f"internal error: {type(error).__name__}: {error}"
    return PcinumaError(what, hint="run again with --debug and report it")


def write_stdout(data: bytes) -> None:
    """The bytes to standard output, all of them now. Raises BadInput when they cannot be written."""
    if sys.stdout is None:
        raise BadInput("cannot be written: it is closed", where="standard output")
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _forget(1)
        raise BadInput(f"cannot be written: {error.strerror or error}", where="standard output") from None


def _forget(descriptor: int) -> None:
    """Keep Python from writing what is left there, and from complaining that it cannot, when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def tell(line: str) -> None:
    """A line on standard error. That it cannot be written, the disk being full or the reader gone, costs no result."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _forget(2)


def json_text(content: Mapping[str, Any]) -> str:
    """The text of a JSON file that people may read, too."""
    import json  # here, as all that costs start-up time is imported where it is used

    return json.dumps(content, indent=2, ensure_ascii=True) + "\n"


def complain(error: PcinumaError) -> None:
    """The error, and its hint if it has one, on standard error."""
    tell(f"{PROGRAM}: error: {error}")
    if error.hint:
        tell(f"hint: {error.hint}")


class Parser(argparse.ArgumentParser):
    """A parser whose usage errors are errors of ours, and that takes no abbreviated flags."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **{"allow_abbrev": False, **named})

    def error(self, message: str) -> NoReturn:
        raise BadOption(message, hint=f"see {self.prog} --help")


def read_file(path: str, limit: int) -> bytes:
    """The file's bytes, one more than ``limit`` at most. Raises BadInput."""
    try:
        with open(path, "rb") as file:
            return file.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"cannot be read: {reason}", where=path) from None


def add_host(parser: argparse.ArgumentParser) -> None:
    """The flags that say where the host is read from."""
    parser.add_argument("--host", metavar="FILE", help="a host recorded by 'pcinuma snapshot'")
    parser.add_argument("--sysfs", metavar="DIR", help="read the host from a tree laid out like /sys")


def add_options(parser: argparse.ArgumentParser, *, idle: Mapping[str, str] = {}) -> None:
    """The option flags and the file of defaults; of ``idle`` ones, which would change nothing there, the reason: they
    are refused, and not in the help."""
    from pcinuma.options import CHOICES

    parser.add_argument("--config", metavar="FILE", help="YAML file of defaults, under the names of the options")
    for name, choices in CHOICES.items():
        if name in idle:
            parser.add_argument(f"--{name}", action=_Refuse, const=idle[name], help=argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{name}", metavar="|".join(choices), help=OPTION_HELP[name])


class _Refuse(argparse.Action):
    """A flag that has no effect on a command: whoever gives it expects one."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise BadOption(f"{self.option_strings[0]} has no effect here: {self.const}", hint=f"see {parser.prog} --help")


def flags_of(parsed: argparse.Namespace) -> dict[str, str | None]:
    """The option flags as given, None for one that is not."""
    from pcinuma.options import CHOICES

    return {name: getattr(parsed, name.replace("-", "_")) for name in CHOICES}


def defaults_of(parsed: argparse.Namespace) -> dict[str, str]:
    """The file of defaults, checked; empty when there is none."""
    if parsed.config is None:
        return {}
    from pcinuma import options, yaml_text

    return options.load_defaults(read_file(parsed.config, yaml_text.MAX_BYTES), parsed.config)


def hook_defaults_of(parsed: argparse.Namespace) -> dict[str, str]:
    """For a hook: the file of defaults, the flags over it. Both are only defaults there: the VM's annotations win."""
    from pcinuma import options

    given = {name: value for name, value in flags_of(parsed).items() if value is not None}
    return defaults_of(parsed) | {name: options.checked(name, value, f"--{name}") for name, value in given.items()}


def host_of(parsed: argparse.Namespace) -> ReadHost:
    """The reader of the host that the flags name; a recorded host is loaded and checked here."""
    if parsed.host is not None and parsed.sysfs is not None:
        raise BadOption("--host and --sysfs exclude each other", hint="give one of them, or none for this machine")
    if parsed.host is not None:
        from pcinuma import host_file

        return host_file.load(read_file(parsed.host, host_file.MAX_BYTES), parsed.host)
    from pcinuma import discover

    return discover.recorded(parsed.sysfs) if parsed.sysfs is not None else discover.live()
