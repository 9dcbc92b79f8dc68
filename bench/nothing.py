"""The yardstick: a gRPC server on a unix socket that answers every call with nothing, written with grpcio.

``python -m bench.nothing SOCKET`` serves until it is killed. It reads no domain, no host and no VMI.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc


class _Nothing(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, _: object) -> object:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Nothing(),))
    server.add_insecure_port(f"unix:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
