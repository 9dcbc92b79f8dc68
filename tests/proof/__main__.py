"""``make proof``: runs the corpus and the differential test in full, and writes their figures into docs/proof.md.

    python -m tests.proof [corpus] [differential]

Real machines are run where their recordings stand beside the project; without them their table stays as it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tests.proof import page
from tests.proof.corpus import HEAD, booted, row, vms
from tests.proof.differential import EXAMPLES, Tally, compare
from tests.proof.machines import Machine, shapes
from tests.proof.recordings import recordings

FIRMWARE = ("ovmf", "seabios")


def main(wanted: Sequence[str]) -> None:
    if "corpus" in wanted or not wanted:
        page.write("shapes", _corpus(shapes()))
        if machines := list(recordings()):
            page.write("recordings", _corpus(machines))
        else:
            print("no recordings of real machines here: their table stays as it is", file=sys.stderr)
    if "differential" in wanted or not wanted:
        tally = Tally()
        compare(EXAMPLES, tally)
        for verdict in tally.missed:
            print(f"libvirt alone refuses ({verdict.how}): {verdict.libvirt}", file=sys.stderr)
        page.write("differential", tally.report())


def _corpus(machines: Sequence[Machine]) -> str:
    """The table; of each machine the VM over all its nodes boots, one after the other under each firmware."""
    rows = []
    for number, machine in enumerate(machines):
        for vm in vms(machine):
            started = time.monotonic()
            made = row(vm, libvirt=True)
            if vm.name == "all nodes":
                made = booted(made, "switch", FIRMWARE[number % len(FIRMWARE)])
            name = f"{machine.source}: {machine.name}" if machine.source else machine.name
            rows.append((name, *made.cells[1:]))
            print(f"{name}, {vm.name}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    return page.table(HEAD, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
