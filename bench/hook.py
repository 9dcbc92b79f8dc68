"""What the hook sidecar costs in the container KubeVirt gives it: 200m CPU and 64,000,000 bytes. Needs root (cgroups).

The limits are the project's; the figures are for reading, and no test depends on them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from bench.transform import compile_all, cpu_of, domain, sysfs
from pcinuma.protocol import info_pb2, v1alpha3_pb2

MEMORY = 64_000_000
QUOTA_US, PERIOD_US = 20_000, 100_000  # 200m
RUNS = 20
TICK = os.sysconf("SC_CLK_TCK")
PCINUMA = str(Path(sys.executable).with_name("pcinuma"))
VMI = json.dumps(
    {"kind": "VirtualMachineInstance", "metadata": {"name": "bench", "namespace": "bench"}, "spec": {}}
).encode()


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("bench/hook.py needs root: it makes cgroups")
    compile_all()
    bare = cpu_of([sys.executable, "-c", "pass"])
    print(f"bare interpreter                                            {bare * 1000:8.1f} ms CPU")
    folder = Path(tempfile.mkdtemp())
    tree = sysfs(folder / "sys", 128)
    to_info = sum(_cpu_to_info(folder, tree) for _ in range(RUNS)) / RUNS  # the clock ticks at 10 ms: a mean
    print(f"CPU to an answered Info, limit 14                           {to_info / bare:8.1f} bare interpreters")
    _shim(folder, tree, bare)
    _cold(folder, tree)
    _calls(folder, tree)


def _shim(folder: Path, tree: Path, bare: float) -> None:
    command = [str(Path(sys.executable).with_name("onDefineDomain")), "--sysfs", str(tree)]
    spent = cpu_of([*command, "--vmi", VMI.decode(), "--domain", domain(16).decode()])
    print(f"onDefineDomain of 16 devices, limit 10                      {spent / bare:8.1f} bare interpreters")


def _cpu_to_info(folder: Path, tree: Path) -> float:
    with _hook(folder, tree) as (process, path):
        _info(path)
        return _ticks(process.pid)


def _cold(folder: Path, tree: Path) -> None:
    ready, first = [], []
    for _ in range(5):
        subprocess.run(["sync"], check=True)
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        with _hook(folder, tree, limited=True) as (_, path):
            begun = time.monotonic()
            _info(path)
            ready.append(time.monotonic() - begun)
            begun = time.monotonic()
            _define(path)(_request(16))
            first.append(time.monotonic() - begun)
    print(f"ready at 200m and 64 MB, cold page cache, limit 1.2, worst of 5 {max(ready):4.2f} s")
    print(f"first call there, limit 1, worst of 5                       {max(first):8.2f} s")


def _calls(folder: Path, tree: Path) -> None:
    with _hook(folder, tree) as (process, path):
        _info(path)
        define = _define(path)
        after_50 = 0
        for number in range(300):
            define(_request(16))
            if number == 49:
                after_50 = _memory(process.pid, "VmRSS")
        peak, now = _memory(process.pid, "VmHWM"), _memory(process.pid, "VmRSS")
        print(f"peak resident after 300 calls of 16 devices, limit 32       {peak / 1e6:8.1f} MB")
        print(f"growth from call 50 to call 300, limit 0                    {(now - after_50) / 1e6:8.2f} MB")
        info = _cost(process.pid, lambda: _info(path), 300)
        of_16 = _cost(process.pid, lambda: define(_request(16)), 300)
        of_128 = _cost(process.pid, lambda: define(_request(128)), 60)
        print(f"one Info call                                               {info * 1000:8.2f} ms CPU")
        print(f"one call of 16 devices, limit 6                             {of_16 / info:8.1f} Info calls")
        print(f"one call of 128 devices, limit 9                            {of_128 / of_16:8.1f} calls of 16")


# --- the sidecar -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hook(folder: Path, tree: Path, *, limited: bool = False) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    path = folder / "hook.sock"
    groups = _groups() if limited else []

    def join() -> None:
        for group in groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [PCINUMA, "hook", "--socket", str(path), "--sysfs", str(tree)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=join)
    try:
        yield process, path
    finally:
        process.terminate()
        process.wait()
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def _groups() -> list[Path]:
    """New cgroups with the container's limits, of version 2 or 1, whichever this machine has."""
    root, name = Path("/sys/fs/cgroup"), f"pcinuma-bench-{os.getpid()}"
    if (root / "cgroup.controllers").exists():
        (root / "cgroup.subtree_control").write_text("+cpu +memory")
        group = root / name
        group.mkdir(exist_ok=True)
        (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")
        (group / "memory.max").write_text(str(MEMORY))
        return [group]
    cpu, memory = root / "cpu" / name, root / "memory" / name
    for group in (cpu, memory):
        group.mkdir(exist_ok=True)
    (cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (cpu / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    (memory / "memory.limit_in_bytes").write_text(str(MEMORY))
    return [cpu, memory]


def _info(path: Path) -> None:
    while True:
        with grpc.insecure_channel(f"unix:{path}") as channel:
            call = channel.unary_unary(
                "/kubevirt.hooks.info.Info/Info", info_pb2.InfoParams.SerializeToString, info_pb2.InfoResult.FromString
            )
            try:
                call(info_pb2.InfoParams(), timeout=5)
                return
            except grpc.RpcError:
                time.sleep(0.01)


def _define(path: Path) -> Callable[[v1alpha3_pb2.OnDefineDomainParams], None]:
    def call(request: v1alpha3_pb2.OnDefineDomainParams) -> None:
        with grpc.insecure_channel(f"unix:{path}") as channel:  # virt-launcher dials anew for every call
            channel.unary_unary(
                "/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain",
                v1alpha3_pb2.OnDefineDomainParams.SerializeToString,
                v1alpha3_pb2.OnDefineDomainResult.FromString,
            )(request, timeout=60)

    return call


def _request(count: int) -> v1alpha3_pb2.OnDefineDomainParams:
    return v1alpha3_pb2.OnDefineDomainParams(domainXML=domain(count), vmi=VMI)


# --- measuring -------------------------------------------------------------------------------------------------


def _cost(pid: int, call: Callable[[], None], times: int) -> float:
    before = _ticks(pid)
    for _ in range(times):
        call()
    return (_ticks(pid) - before) / times


def _ticks(pid: int) -> float:
    """Seconds of CPU of the process with its threads that have ended, by the kernel's clock ticks."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(ticks[11]) + int(ticks[12])) / TICK


def _memory(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


if __name__ == "__main__":
    main()
