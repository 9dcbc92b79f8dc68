"""``pcinuma webhook``: the mutating admission webhook over HTTPS. A Flask application behind Hypercorn.

Hypercorn's event loop holds the connections: a client that is slow costs memory, never one of the threads that
answer. A request comes to Flask when its body is there, whole and within its bounds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, request
from hypercorn.asyncio import serve as hypercorn_serve
from hypercorn.config import Config
from hypercorn.middleware.wsgi import AsyncioWSGIMiddleware
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from werkzeug.exceptions import HTTPException

from pcinuma import admission, certificates, wsgi_server
from pcinuma.body_limits import BodyLimits
from pcinuma.errors import BadInput, one_line
from pcinuma.listen import Listener, shown
from pcinuma.log import LOG_SECONDS, Log

MUTATE = "/mutate"
MAX_BODY = 7 * 1024 * 1024
"""Bytes. The API server takes requests of 3 MiB, and a review may hold an object twice; the rest fits into one more.
controller-runtime draws the line there, too."""

CONNECTIONS = 256
"""At one time; each takes 0.3 MB, for the most part asyncio's buffer for TLS. A few per API server are in use."""
HANDSHAKE_SECONDS = 5
IDLE_SECONDS = 10
"""For a connection without a request, and for the head of one."""
END_SECONDS = 15
"""For requests in flight when the end comes; above what one may take, below Kubernetes' 30 s to SIGKILL."""
WATCH_SECONDS = 1

_OUTCOMES = ("added", "present", "untouched", "refused", "malformed", "failed")
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Settings:
    """How one webhook runs. ``listen`` is a host and a port, 0 for any that is free."""

    listen: tuple[str, int]
    cert: str
    key: str
    sidecar: admission.Sidecar
    log: Log


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Raises BadInput when it cannot begin."""
    log = settings.log
    pair = certificates.Certificates(
        settings.cert, settings.key, lambda error: log.write("error", "certificate", {"error": str(error)})
    )
    with Listener(*settings.listen, CONNECTIONS) as listener:
        asyncio.run(_serve(settings, listener, pair))
    log.write("info", "ended", {})
    log.flush(LOG_SECONDS)
    return 0


async def _serve(settings: Settings, listener: socket.socket, pair: certificates.Certificates) -> None:
    loop, ended, log = asyncio.get_running_loop(), asyncio.Event(), settings.log
    metrics = Metrics(lambda: pair.current)
    app = application(settings.sidecar, lambda: pair.current, metrics, log)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.set_exception_handler(lambda _, context: _log_fault(log, context))

    def reloaded() -> None:
        log.write("info", "certificate", {"notAfter": certificates.stamp(pair.current.not_after)})

    def told(path: str, line: str) -> None:
        if path == MUTATE:
            metrics.count("malformed", 0.0)
            log.write("warning", "admission", {"outcome": "malformed", "error": line})

    stop = certificates.watch(pair, WATCH_SECONDS, reloaded)
    if (problem := pair.current.problem(time.time())) is not None:
        log.write("error", "certificate", {"error": problem})
    log.write("info", "ready", {"listen": shown(*listener.getsockname()[:2])})
    try:
        limited = BodyLimits(AsyncioWSGIMiddleware(app, MAX_BODY), MAX_BODY, told)
        await hypercorn_serve(limited, _config(listener, pair.context, log), shutdown_trigger=ended.wait, mode="asgi")
    finally:
        stop()


# --- the application -------------------------------------------------------------------------------------------


def application(
    sidecar: admission.Sidecar, certificate: Callable[[], certificates.Certificate], metrics: Metrics, log: Log
) -> Flask:
    """The WSGI application: ``/mutate``, ``/healthz``, ``/readyz``, ``/metrics``."""
    app = wsgi_server.App(__name__, static_folder=None)

    @app.post(MUTATE)
    def mutate() -> Response:
        started = time.perf_counter()
        outcome, record = "failed", {}
        try:
            decision = admission.decide(_review(), sidecar)
            outcome, record = decision.outcome, decision.record
            return Response(json.dumps(decision.review), mimetype="application/json")
        except BadInput as error:
            outcome, record = "malformed", {"outcome": "malformed", "error": str(error)}
            return _line(415 if isinstance(error, _WrongType) else 400, str(error))
        except Exception as error:  # noqa: BLE001 - one line with the status for it, whatever the fault
            what = one_line(f"internal error: {type(error).__name__}: {error}")
            record = {"outcome": "failed", "error": what}
            return _line(500, what)
        finally:
            spent = time.perf_counter() - started
            metrics.count(outcome, spent)
            log.write(_level(outcome, record), "admission", {**record, "milliseconds": round(spent * 1000, 2)})

    @app.get("/healthz")
    def healthz() -> Response:
        return _line(200, "ok")

    @app.get("/readyz")
    def readyz() -> Response:
        problem = certificate().problem(time.time())
        return _line(200, "ok") if problem is None else _line(503, problem)

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), content_type=CONTENT_TYPE_LATEST)

    @app.errorhandler(HTTPException)
    def refuse(error: HTTPException) -> Response:
        allowed = error.get_headers(request.environ)  # of a wrong method: which are right
        answer = _line(error.code or 500, f"{error.name}: {request.method} {request.path}")
        answer.headers.extend((name, value) for name, value in allowed if name == "Allow")
        return answer

    return app


class _WrongType(BadInput):
    """The request's content type is none that a review comes as."""


def _review() -> object:
    if request.mimetype != "application/json":
        raise _WrongType(f"the content type is {request.mimetype[:80]!r}, not application/json", where="the request")
    try:
        return json.loads(request.get_data(cache=False))
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise BadInput(f"the body is not JSON: {reason}", where="the request") from None


def _line(status: int, text: str) -> Response:
    return Response(one_line(text) + "\n", status=status, mimetype="text/plain")


def _level(outcome: str, record: Mapping[str, Any]) -> str:
    if outcome == "failed":
        return "error"
    return "warning" if outcome in ("refused", "malformed") or record.get("warnings") else "info"


class Metrics:
    """What Prometheus reads, in a registry of this application's own."""

    def __init__(self, certificate: Callable[[], certificates.Certificate]):
        self.registry = CollectorRegistry()
        self._admissions = Counter(
            "pcinuma_webhook_admissions", "Reviews answered, by outcome.", ["outcome"], registry=self.registry
        )
        for outcome in _OUTCOMES:
            self._admissions.labels(outcome)  # a rate needs the zero before the first one
        self._seconds = Histogram(
            "pcinuma_webhook_admission_seconds", "Time to answer a review.", buckets=_BUCKETS, registry=self.registry
        )
        Gauge(
            "pcinuma_webhook_certificate_not_after_seconds",
            "When the certificate in use expires, seconds since the epoch.",
            registry=self.registry,
        ).set_function(lambda: certificate().not_after)

    def count(self, outcome: str, seconds: float) -> None:
        self._admissions.labels(outcome).inc()
        self._seconds.observe(seconds)


# --- Hypercorn -------------------------------------------------------------------------------------------------


def _config(listener: socket.socket, context: ssl.SSLContext, log: Log) -> Config:
    config = wsgi_server.config(listener, lambda line: log.write("error", "server", {"error": line}), context)
    config.ssl_handshake_timeout = HANDSHAKE_SECONDS
    config.keep_alive_timeout = IDLE_SECONDS
    config.graceful_timeout = END_SECONDS
    config.keep_alive_max_requests = 100_000
    return config


def _log_fault(log: Log, context: Mapping[str, Any]) -> None:
    """What asyncio cannot hand to anybody. A connection that breaks off, or is broken off at the end, or a client
    without TLS, is no fault."""
    error = context.get("exception")
    if isinstance(error, (OSError, ssl.SSLError, asyncio.CancelledError)):
        return
    what = f"{context.get('message')}: {type(error).__name__}: {error}" if error else str(context.get("message"))
    log.write("error", "server", {"error": one_line(what)})
