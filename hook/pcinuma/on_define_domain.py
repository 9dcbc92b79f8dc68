"""``onDefineDomain``: the executable that KubeVirt's sidecar-shim looks up on PATH.

The shim starts it for every call with ``--vmi JSON --domain XML``, takes the domain from standard output and fails the
call when the exit status is not 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from pcinuma.edge import Parser, add_host, add_options, guarded, hook_defaults_of, host_of, tell, write_stdout

_ABOUT = """\
Answers one OnDefineDomain call of KubeVirt's sidecar-shim: the domain XML to use on standard output, one JSON line
on standard error. Flags are defaults: the annotations of the VM win.

example:
  onDefineDomain --vmi "$(kubectl get vmi VM -o json)" --domain "$(cat domain.xml)" --host host.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the executable; the exit status: 0 done, 1 refused, 2 bad input or usage."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return guarded(lambda: _run(given), debug="--debug" in given)


def _run(given: Sequence[str]) -> int:
    from argparse import RawDescriptionHelpFormatter

    parser = Parser(prog="onDefineDomain", description=_ABOUT, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--vmi", required=True, metavar="JSON", help="the VirtualMachineInstance itself")
    parser.add_argument("--domain", required=True, metavar="XML", help="the domain XML itself")
    parser.add_argument("--debug", action="store_true", help="show a traceback on an error")
    add_host(parser)
    add_options(parser)
    parsed = parser.parse_args(given)
    defaults, host = hook_defaults_of(parsed), host_of(parsed)

    from pcinuma.hook_calls import answer
    from pcinuma.host_wait import Bounded

    made = answer(_bytes(parsed.domain), _bytes(parsed.vmi), defaults, Bounded(host))
    tell(json.dumps({"level": made.level, "event": "OnDefineDomain", **made.record}))
    if made.xml is None:
        assert made.error is not None
        raise made.error
    write_stdout(made.xml)
    return 0


def _bytes(argument: str) -> bytes:
    """The argument as it was given to the process, whatever its bytes."""
    return argument.encode(sys.getfilesystemencoding(), "surrogateescape")
