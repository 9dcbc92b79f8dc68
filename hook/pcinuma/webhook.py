"""``pcinuma webhook``: the mutating admission webhook over HTTPS. A Flask application behind Hypercorn.

The event loop holds the connections: a client that is slow costs memory, never one of the threads that
answer. A request comes to Flask when its body is there, whole and within its bounds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flask import Flask, Response, request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from werkzeug.exceptions import HTTPException

from pcinuma import admission, certificates, wsgi_server
from pcinuma.errors import BadInput, one_line, why_not_json
from pcinuma.listen import Listener, shown
from pcinuma.log import LOG_SECONDS, Log

MUTATE = "/mutate"
MAX_BODY = 4 * 1024 * 1024
"""Bytes. The API server takes requests of 3 MiB (apiserver, MaxRequestBodyBytes), and a review of a creation holds the
object once; the rest fits into one more."""
MOST_HELD = 14 * 1024 * 1024
"""Bytes of bodies at one time: three of the largest and some small ones."""
AT_ONCE = 2
"""Requests that are with the application: one is decided at a time, while another is read or written."""
MOST_VALUES = 100_000
"""JSON values of a review, counted before it is parsed: as objects of Python's each takes up to 250 bytes. A VMI has
some thousand."""

CONNECTIONS = 128
"""At one time; each takes 0.3 MB, for the most part asyncio's buffer for TLS. A few per API server are in use."""
END_SECONDS = 12
"""For requests in flight when the end comes; above what one may take, and with the closing of connections 14 s."""
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
        _serve(settings, listener, pair)
    log.write("info", "ended", {})
    log.flush(LOG_SECONDS)
    return 0


def _serve(settings: Settings, listener: Listener, pair: certificates.Certificates) -> None:
    log = settings.log
    metrics = Metrics(lambda: pair.current)
    app = application(settings.sidecar, lambda: pair.current, metrics, log)

    def reloaded() -> None:
        log.write("info", "certificate", {"notAfter": certificates.stamp(pair.current.not_after)})

    def refused(path: str, line: str) -> None:
        if path == MUTATE:
            metrics.count("malformed", 0.0)
            log.write("warning", "admission", {"outcome": "malformed", "error": line})

    def ready() -> None:
        log.write("info", "ready", {"listen": shown(*listener.getsockname()[:2])})

    pair.refresh()  # says so if it has expired already
    stop = certificates.watch(pair, WATCH_SECONDS, reloaded)
    try:
        wsgi_server.serve(
            app,
            listener,
            max_body=MAX_BODY,
            ready=ready,
            fault=lambda line: log.write("error", "server", {"error": line}),
            context=pair.context,
            most_held=MOST_HELD,
            at_once=AT_ONCE,
            end_seconds=END_SECONDS,
            refused=refused,
        )
    finally:
        stop()


# --- the application -------------------------------------------------------------------------------------------


def application(
    sidecar: admission.Sidecar, certificate: Callable[[], certificates.Certificate], metrics: Metrics, log: Log
) -> Flask:
    """The WSGI application: ``/mutate``, ``/healthz``, ``/readyz``, ``/metrics``."""
    app = wsgi_server.App(__name__, static_folder=None)
    turn = threading.Lock()  # one review is parsed at a time: its objects take many times the memory of its text

    @app.post(MUTATE)
    def mutate() -> Response:
        started = time.perf_counter()
        outcome, record = "failed", {}
        try:
            data = _body()
            with turn:
                decision = admission.decide(_parsed(data), sidecar)
            outcome, record = decision.outcome, decision.record
            return Response(json.dumps(decision.review), mimetype="application/json")
        except BadInput as error:
            outcome, record = "malformed", {"outcome": "malformed", "error": str(error)}
            return _line(error.status if isinstance(error, _Unfit) else 400, str(error))
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


class _Unfit(BadInput):
    """The request is none that is looked into, whatever is in it; ``status`` is HTTP's for that."""

    def __init__(self, status: int, message: str):
        super().__init__(message, where="the request")
        self.status = status


def _body() -> bytes:
    if request.mimetype != "application/json":
        raise _Unfit(415, f"the content type is {request.mimetype[:80]!r}, not application/json")
    return request.get_data(cache=False)


def _parsed(data: bytes) -> object:
    # each value but the first is after one of these; those in strings count, too, and an annotation has 256 KiB at most
    if sum(data.count(mark) for mark in (b"{", b"[", b",")) > MOST_VALUES:
        raise _Unfit(413, f"the review holds more than {MOST_VALUES} values")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"the body is not JSON: {why_not_json(error)}", where="the request") from None


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
