"""A node's /sys and /proc, written file by file as a kernel shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

GIB = 2**20  # in KiB


class NodeTree:
    """``root/sys`` with ``root/proc`` beside it, under construction."""

    def __init__(self, root: Path):
        self.root = root
        self.sys = root / "sys"
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        (self.sys / "devices/system/node").mkdir(parents=True)

    def write(self, path: str, content: str | bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else content.encode())

    def node(
        self,
        number: int,
        cpus: str = "",
        memory_gib: float = 0,
        pools: dict[int, tuple[int, int]] | None = None,
        distance: str = "",
    ) -> None:
        """``pools``: pages and free pages by size in KiB; without it the kernel's two sizes, empty."""
        base = f"sys/devices/system/node/node{number}"
        self.write(f"{base}/cpulist", f"{cpus}\n")
        self.write(f"{base}/distance", f"{distance}\n")
        for cpu in _members(cpus) if cpus else ():
            link = self.root / base / f"cpu{cpu}"
            if not link.is_symlink():
                link.symlink_to(f"../../cpu/cpu{cpu}")
        kib = int(memory_gib * GIB)
        self.write(f"{base}/meminfo", f"\nNode {number} MemTotal:       {kib} kB\nNode {number} MemFree:        1 kB\n")
        for size, (total, free) in (pools if pools is not None else {2048: (0, 0), GIB: (0, 0)}).items():
            self.write(f"{base}/hugepages/hugepages-{size}kB/nr_hugepages", f"{total}\n")
            self.write(f"{base}/hugepages/hugepages-{size}kB/free_hugepages", f"{free}\n")

    def cpus(self, cores: dict[int, list[str]]) -> None:
        """By package, the CPU list of each core."""
        for package, lists in cores.items():
            for core in lists:
                for cpu in _members(core):
                    base = f"sys/devices/system/cpu/cpu{cpu}/topology"
                    self.write(f"{base}/physical_package_id", f"{package}\n")
                    self.write(f"{base}/core_cpus_list", f"{core}\n")

    def function(
        self,
        path: str,
        files: Mapping[str, str] = MappingProxyType({}),
        *,
        config: bytes | None = None,
        driver: str | None = None,
        group: int | None = None,
    ) -> Path:
        """The function at ``path`` below devices/, with its link in bus/pci/devices."""
        folder = self.sys / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(f"{content}\n")
        if config is not None:
            (folder / "config").write_bytes(config)
        if driver is not None:
            (self.sys / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
        if group is not None:
            (self.sys / f"kernel/iommu_groups/{group}").mkdir(parents=True, exist_ok=True)
            (folder / "iommu_group").symlink_to(f"/sys/kernel/iommu_groups/{group}")
        link = self.sys / "bus/pci/devices" / folder.name
        if not link.is_symlink():
            link.symlink_to(f"../../../devices/{path}")
        return folder


def _members(cpus: str) -> list[int]:
    found: list[int] = []
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
