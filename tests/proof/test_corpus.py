"""What docs/proof.md says of the corpus is what comes out now, and one of its VMs boots."""

from __future__ import annotations

import pytest

from tests.proof import page
from tests.proof.corpus import GROUPINGS, assert_boots, row, vms
from tests.proof.machines import Machine, shape, shapes
from tests.proof.recordings import FOLDER, recordings

MACHINES = shapes()
PLAIN = len(("machine", "VM", "cells", "devices")) + len(GROUPINGS) + len(("order", "verified"))
"""The columns that need neither libvirt nor a guest."""


def said(part: str, name: str) -> list[tuple[str, ...]]:
    return [cells[:PLAIN] for cells in page.rows_of(part) if cells[0] == name]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_page_says_what_comes_out(machine: Machine) -> None:
    assert said("shapes", machine.name) == [row(vm, libvirt=False).cells[:PLAIN] for vm in vms(machine)]


@pytest.mark.libvirt
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_libvirt_defines_the_vm_over_all_nodes(machine: Machine) -> None:
    assert row(next(vms(machine)), libvirt=True).libvirt == len(GROUPINGS)


def test_every_shape_is_on_the_page_and_all_of_it_was_proven() -> None:
    rows = page.rows_of("shapes")
    assert {cells[0] for cells in rows} == {machine.name for machine in MACHINES}
    for cells in rows + page.rows_of("recordings"):
        # the expected placement itself is held by row()
        assert cells[-3:-1] == ("3/3", "3/3"), cells
        assert bool(cells[-1]) == (cells[1] == "all nodes"), cells


def test_real_machines_where_their_recordings_are() -> None:
    machines = list(recordings())
    if not machines:
        pytest.skip(f"no recordings of real machines in ../{FOLDER.parent.name}/{FOLDER.name} beside the repo")
    for machine in machines:
        name = f"{machine.source}: {machine.name}"
        fresh = [(name, *row(vm, libvirt=False).cells[1:PLAIN]) for vm in vms(machine)]
        assert said("recordings", name) == fresh


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_a_vm_over_half_of_an_eight_node_machine_boots() -> None:
    """Four cells, a switch with two GPUs and two NICs below each of two of them, the functions of one NIC together."""
    vm = next(vm for vm in vms(shape("dgx-a100-nps4")) if vm.name == "half of them")
    assert_boots(vm, "switch", "seabios")
