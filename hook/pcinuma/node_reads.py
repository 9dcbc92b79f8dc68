"""Reads what ``doctor`` judges: thin reads of ``/sys`` and ``/proc``, live or from a recorded tree, into NodeFacts.

PCI functions, nodes and mediated devices are read by :mod:`pcinuma.discover`; here is what it does not need: huge
pages, the places of CPUs, the IOMMU, drivers, configuration spaces and the kernel's command line.
"""

from __future__ import annotations

import os
import re

from pcinuma.discover import read_all
from pcinuma.errors import BadInput
from pcinuma.host_file import HostFile
from pcinuma.model import CpuSet, HostTopology, PciAddress
from pcinuma.node_facts import CpuPlace, NodeFacts, PagePool
from pcinuma.sys_trees import LiveTree, RecordedTree, SysTree

_MAX_TEXT = 65536
_CONFIG_BYTES = 4096


def live() -> NodeFacts:
    """This machine."""
    return _read(LiveTree(), _Folder("/sys"), _Folder("/proc"), "this machine")


def recorded(directory: str) -> NodeFacts:
    """A tree laid out like ``/sys``; a ``proc`` beside it is read as its ``/proc``. Raises HostUnreadable."""
    tree = RecordedTree(directory)
    root = os.path.realpath(directory)
    beside = os.path.join(os.path.dirname(root), "proc")
    return _read(tree, _Folder(root, confined=True), _Folder(beside, confined=True), directory)


def from_record(record: HostFile, where: str) -> NodeFacts:
    """A host recorded by ``pcinuma snapshot``: its nodes and functions, and nothing else that is asked here."""
    return NodeFacts(host=record.everything(), source=where)


class _Folder:
    """Reads below one folder; what is not there or cannot be read is None.

    A link in a recorded tree (``confined``) may lead out of it, to this machine, which is not what was recorded.
    """

    def __init__(self, root: str, *, confined: bool = False):
        self._root = root
        self.is_recorded = confined

    def names(self, *parts: str) -> list[str] | None:
        try:
            return sorted(os.listdir(self._inside(os.path.join(self._root, *parts))))
        except OSError:
            return None

    def text(self, *parts: str) -> str | None:
        data = self.data(os.path.join(self._root, *parts), _MAX_TEXT)
        return None if data is None else data.decode("utf-8", "replace").strip()

    def data(self, path: str, limit: int) -> bytes | None:
        try:
            file = os.open(self._inside(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return os.read(file, limit)
        except OSError:
            return None
        finally:
            os.close(file)

    def _inside(self, path: str) -> str:
        if not self.is_recorded:
            return path
        real = os.path.realpath(path)
        if real != self._root and not real.startswith(self._root + os.sep):
            raise FileNotFoundError(path)
        return real


def _read(tree: SysTree, sys: _Folder, proc: _Folder, source: str) -> NodeFacts:
    host = read_all(tree)
    units, groups = sys.names("class", "iommu"), sys.names("kernel", "iommu_groups")
    if not sys.is_recorded:  # a kernel without the folder has no IOMMU; a recorded tree may just lack it
        units, groups = units or [], groups or []
    drivers = sys.names("bus", "pci", "drivers")
    return NodeFacts(
        host=host,
        source=source,
        pools=_pools(sys, host),
        cpus=_cpus(sys, host),
        present=_cpu_list(sys.text("devices", "system", "cpu", "present")),
        online=_cpu_list(sys.text("devices", "system", "cpu", "online")),
        iommu_units=None if units is None else len(units),
        iommu_groups=None if groups is None else len(groups),
        vfio_drivers=None if drivers is None else tuple(name for name in drivers if "vfio" in name),
        configs=_configs(tree, sys, host),
        command_line=proc.text("cmdline"),
        memory_bytes=_mem_total(proc.text("meminfo")),
    )


def _pools(sys: _Folder, host: HostTopology) -> dict[int, tuple[PagePool, ...]]:
    found: dict[int, tuple[PagePool, ...]] = {}
    for node in host.nodes:
        folder = ("devices", "system", "node", f"node{node}", "hugepages")
        pools = []
        for name in sys.names(*folder) or ():
            size = re.fullmatch(r"hugepages-([0-9]{1,12})kB", name)
            total = _number(sys.text(*folder, name, "nr_hugepages"))
            if size and total is not None:
                pools.append(PagePool(int(size[1]), total, _number(sys.text(*folder, name, "free_hugepages"))))
        if pools:
            found[node] = tuple(sorted(pools, key=lambda pool: pool.size_kib))
    return found


def _cpus(sys: _Folder, host: HostTopology) -> dict[int, CpuPlace]:
    found: dict[int, CpuPlace] = {}
    for cpu in sorted({cpu for node in host.nodes.values() for cpu in node.cpus}):
        folder = ("devices", "system", "cpu", f"cpu{cpu}", "topology")
        core = _cpu_list(sys.text(*folder, "core_cpus_list") or sys.text(*folder, "thread_siblings_list"))
        if core is not None and cpu in core:
            found[cpu] = CpuPlace(_number(sys.text(*folder, "physical_package_id")), core)
    return found


def _configs(tree: SysTree, sys: _Folder, host: HostTopology) -> dict[PciAddress, bytes]:
    found: dict[PciAddress, bytes] = {}
    for address, function in host.functions.items():
        path = tree.function_path(address) if function.physfn is None else None  # a PF speaks for its VFs
        data = sys.data(os.path.join(path, "config"), _CONFIG_BYTES) if path is not None else None
        if data:
            found[address] = data
    return found


def _cpu_list(text: str | None) -> CpuSet | None:
    try:
        return CpuSet.parse(text) if text is not None else None
    except BadInput:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def _mem_total(text: str | None) -> int | None:
    match = re.search(r"^MemTotal:\s*([0-9]{1,18}) kB", text or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None
