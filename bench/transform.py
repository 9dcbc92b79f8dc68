"""What a transform costs: in process for 2, 16 and 128 devices, and as a process in units of a bare interpreter.

The limits are the project's aims; the figures are for reading, and no test depends on them.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pcinuma.model import CpuSet, HostFunction, HostNode, HostQuery, HostTopology, Options, PciAddress
from pcinuma.pipeline import transform

COUNTS = (2, 16, 128)
ROUNDS = 40
RUNS = 30
LIMIT_16_MS = 3.0
LIMIT_GROWTH = 8.0  # 128 devices over 16: eight times the devices
LIMIT_BARE = 8.0


def main() -> None:
    compile_all()
    medians = {count: in_process(count) for count in COUNTS}
    for count, seconds in medians.items():
        print(f"one transform, {count:3} devices, in process   {seconds * 1000:8.2f} ms")
    print(f"16 devices, aim under {LIMIT_16_MS} ms                {medians[16] * 1000:8.2f} ms")
    print(f"growth 16 to 128 devices, aim at most {LIMIT_GROWTH:.0f}     {medians[128] / medians[16]:8.2f} times")
    bare = cpu_of([sys.executable, "-c", "pass"])
    print(f"bare interpreter                            {bare * 1000:8.2f} ms CPU")
    for name, arguments in commands().items():
        spent = cpu_of([str(Path(sys.executable).with_name("pcinuma")), "transform", *arguments])
        print(f"pcinuma transform {name:12} aim under {LIMIT_BARE:.0f}   {spent / bare:8.2f} bare interpreters")


def compile_all() -> None:
    """Write the .pyc files, as an installed package has them: without, start-up takes several times as long."""
    hook = Path(__file__).resolve().parent.parent / "hook"
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(hook)], check=True)


def in_process(count: int) -> float:
    """Median seconds of one transform, the host given without reads."""
    xml, host = domain(count), topology(count)
    times = []

    def answer(query: HostQuery) -> HostTopology:
        return host

    gc.collect()
    for _ in range(ROUNDS):
        start = time.process_time()
        result = transform(xml, Options(), answer)
        times.append(time.process_time() - start)
        assert result.report.outcome == "changed"
    return sorted(times)[ROUNDS // 2]


def cpu_of(command: list[str]) -> float:
    """CPU seconds of one run of the command, user and system, the mean of many."""

    def children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = children()
    for _ in range(RUNS):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return (children() - before) / RUNS


def commands() -> dict[str, list[str]]:
    example = Path(__file__).resolve().parent.parent / "examples" / "two-sockets"
    directory = tempfile.mkdtemp()
    path = os.path.join(directory, "domain.xml")
    Path(path).write_bytes(domain(16))
    tree = sysfs(Path(directory) / "sys", 16)
    return {
        "--host": [str(example / "domain.xml"), "--host", str(example / "host.json")],
        "--sysfs": [path, "--sysfs", str(tree)],
        "live": [path],
    }


def address(number: int) -> PciAddress:
    return PciAddress(0, 1 + number, 0, 0)


def topology(count: int) -> HostTopology:
    nodes = {node: HostNode(node, CpuSet(frozenset(range(node * 8, node * 8 + 8))), 1024) for node in (0, 1)}
    functions = {address(n): HostFunction(address(n), 2 * n // count) for n in range(count)}
    return HostTopology(nodes, functions)


def sysfs(root: Path, count: int) -> Path:
    for node in (0, 1):
        directory = root / "devices" / "system" / "node" / f"node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{node * 8}-{node * 8 + 7}\n")
        (directory / "distance").write_text("10 21\n" if node == 0 else "21 10\n")
    links = root / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    for number in range(count):
        directory = root / "devices" / "pci0000:00" / str(address(number))
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{2 * number // count}\n")
        (directory / "class").write_text("0x030200\n")
        (links / str(address(number))).symlink_to(f"../../../devices/pci0000:00/{address(number)}")
    return root


def domain(count: int) -> bytes:
    """A domain as KubeVirt writes one, with ``count`` devices on two cells."""
    hostdevs = "".join(
        '\t\t<hostdev type="pci" managed="no">\n\t\t\t<source>\n\t\t\t\t<address type="pci" domain="0x0000" '
        f'bus="0x{1 + number:02x}" slot="0x00" function="0x0"></address>\n\t\t\t</source>\n'
        f'\t\t\t<alias name="ua-gpu-gpu{number}"></alias>\n\t\t</hostdev>\n'
        for number in range(count)
    )
    pins = "".join(f'\t\t<vcpupin vcpu="{vcpu}" cpuset="{vcpu}"></vcpupin>\n' for vcpu in range(16))
    return (
        '<domain type="kvm">\n\t<name>bench</name>\n\t<os>\n\t\t<type arch="x86_64" machine="q35">hvm</type>\n\t</os>\n'
        f"\t<devices>\n{hostdevs}\t</devices>\n\t<cpu>\n\t\t<numa>\n"
        '\t\t\t<cell id="0" cpus="0-7" memory="1024"></cell>\n\t\t\t<cell id="1" cpus="8-15" memory="1024"></cell>\n'
        f"\t\t</numa>\n\t</cpu>\n\t<cputune>\n{pins}\t</cputune>\n\t<numatune>\n"
        '\t\t<memnode cellid="0" mode="strict" nodeset="0"></memnode>\n'
        '\t\t<memnode cellid="1" mode="strict" nodeset="1"></memnode>\n\t</numatune>\n</domain>\n'
    ).encode()


if __name__ == "__main__":
    main()
