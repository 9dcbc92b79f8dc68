"""What a picture of a transform shows: the guest before, the host, the guest after, as trees of boxes and devices.

Data without a form: `scene` makes it, `svg` and `tree` draw it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pcinuma.model import Finding, Outcome, PciController

Fit = Literal["aligned", "approximate", "astray", "unseen", "unknown"]
"""How what the guest sees of a device fits its host node: its own cell; the nearest one, for want of its own; a cell of
other host nodes; no node at all; not to be said, for the host node is not known."""

BoxKind = Literal["host-node", "root-complex", "switch", "cell", "expander", "bus", "bridge"]

PORTS = ("pcie-root-port", "pcie-switch-downstream-port")
"""Controllers that hold one slot: drawn at their device, not as a box around it."""

_WORDS: dict[Fit, str] = {
    "aligned": "on its own cell",
    "approximate": "on the nearest cell",
    "astray": "on a foreign cell",
    "unseen": "the guest sees no node",
    "unknown": "host node unknown",
}


@dataclass(frozen=True, slots=True)
class Shown:
    """A device as the host has it. ``number`` counts from 1 in the order of the host's tree and names it everywhere;
    ``path`` leads from the root complex down to it."""

    number: int
    label: str
    alias: str | None
    host_node: int | None
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Leaf:
    """A device at its place. In a guest's tree ``port`` is the port that holds it, ``address`` its guest BDF or what is
    known of it, ``numa_node`` what the guest sees (-1: none), ``note`` why it is not where it should be; in the host's
    tree ``fit`` is None and these say nothing."""

    device: Shown
    fit: Fit | None = None
    port: PciController | None = None
    address: str = ""
    numa_node: int = -1
    note: str | None = None

    @property
    def words(self) -> str:
        """The fit in words; empty in the host's tree."""
        return _WORDS[self.fit] if self.fit is not None else ""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tree. ``nodes`` are the host nodes it is of: one for a host node, those behind a cell."""

    kind: BoxKind
    title: str
    detail: str
    nodes: tuple[int, ...]
    children: tuple[Box | Leaf, ...]

    @property
    def leaves(self) -> Iterator[Leaf]:
        for child in self.children:
            if isinstance(child, Leaf):
                yield child
            else:
                yield from child.leaves


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the three trees."""

    title: str
    boxes: tuple[Box, ...]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(leaf for box in self.boxes for leaf in box.leaves)

    @property
    def aligned(self) -> int:
        return sum(leaf.fit == "aligned" for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class Scene:
    """All that is drawn. ``nodes`` are the host nodes in it, ascending; ``headline`` says the outcome in a line;
    ``refusal`` why the domain was refused; ``findings`` are the report's."""

    outcome: Outcome
    headline: str
    host: Panel
    before: Panel
    after: Panel
    nodes: tuple[int, ...]
    findings: tuple[Finding, ...]
    refusal: Finding | None = None
