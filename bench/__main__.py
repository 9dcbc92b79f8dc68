"""``make bench``: one table of what things cost, beside a gRPC server that does nothing, measured in the same run.

The limits are the project's aims; the figures are for reading, and no test depends on them. `--calls` and `--starts`
say how long growth is looked for. Needs root for the sidecar in its cgroups, and says so where it leaves them out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from bench import hook, transform, webhook

INFO = "/kubevirt.hooks.info.Info/Info"
DEFINE = "/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain"
ROUNDS = 10
CALLS = 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="calls between which memory is compared")
    parser.add_argument("--starts", type=int, default=50, help="starts in a row of the sidecar")
    given = parser.parse_args()
    transform.compile_all()
    load = os.getloadavg()[0]
    print(f"load {load:.1f} on {os.cpu_count()} cores{': too busy for figures to keep' if load > 1 else ''}\n")
    print(f"{'':44}{'pcinuma hook':>14}{'do-nothing gRPC':>17}")
    folder = Path(tempfile.mkdtemp())
    tree = transform.sysfs(folder / "sys", 128)
    ours = [hook.PCINUMA, "hook", "--socket", str(folder / "hook.sock"), "--sysfs", str(tree)]
    nothing = [sys.executable, "-m", "bench.nothing", str(folder / "nothing.sock")]
    sockets = (folder / "hook.sock", folder / "nothing.sock")
    columns = [_column(command, path, given.calls) for command, path in zip((ours, nothing), sockets, strict=True)]
    for row in columns[0]:
        print(f"{row:44}{columns[0][row]:>14}{columns[1][row]:>17}")
    begun = time.monotonic()
    for _ in range(given.starts):
        with _serving(ours, folder / "hook.sock"):
            pass
    print(f"{f'{given.starts} starts in a row':44}{(time.monotonic() - begun) / given.starts:>12.2f} s")
    print()
    for part in (transform.main, hook.main, webhook.main):
        if part is hook.main and os.geteuid() != 0:
            print("not measured without root: the sidecar at 200m CPU and 64 MB")
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            part()
        print(said.getvalue(), end="", flush=True)


def _column(command: list[str], path: Path, calls: int) -> dict[str, str]:
    """What one server costs."""
    starts, cpu = [], []
    for _ in range(ROUNDS):
        begun = time.monotonic()
        with _serving(command, path) as process:
            starts.append(time.monotonic() - begun)
            cpu.append(hook._ticks(process.pid))
    request = hook._request(16).SerializeToString()
    with _serving(command, path) as process, grpc.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_unary(DEFINE)

        def define() -> None:
            call(request, timeout=60)

        for _ in range(CALLS):
            define()
        after_first = hook._memory(process.pid, "VmRSS")
        took = _median(define)
        cost = hook._cost(process.pid, define, CALLS)
        for _ in range(calls):
            define()
        now = hook._memory(process.pid, "VmRSS")
        return {
            "from the command to an answered Info": f"{sorted(starts)[ROUNDS // 2]:.2f} s",
            "CPU of that": f"{sum(cpu) / ROUNDS * 1000:.0f} ms",
            "peak resident memory": f"{hook._memory(process.pid, 'VmHWM') / 1e6:.1f} MB",
            "a call with a domain of 16 devices": f"{took * 1000:.1f} ms",
            "CPU of that ": f"{cost * 1000:.1f} ms",
            f"growth over {calls} calls": f"{(now - after_first) / 1e6:+.2f} MB",
        }


def _median(call: Callable[[], None]) -> float:
    times = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return sorted(times)[CALLS // 2]


@contextlib.contextmanager
def _serving(command: list[str], path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server, once it has answered an Info."""
    path.unlink(missing_ok=True)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, command
            if path.exists():
                with grpc.insecure_channel(f"unix:{path}") as channel:
                    try:
                        channel.unary_unary(INFO)(b"", timeout=5)
                        break
                    except grpc.RpcError:
                        pass
            time.sleep(0.005)
        yield process
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
