"""``pcinuma web``: the debug page. A Flask application without state: what a browser sends is answered and forgotten.

Without JavaScript all of it works; ``page.js`` adds dropping of files and copying.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from flask import Response, render_template, request
from flask.wrappers import Request
from werkzeug.exceptions import BadRequest, HTTPException, MisdirectedRequest, ServiceUnavailable, UnsupportedMediaType
from werkzeug.formparser import FormDataParser

from pcinuma import (
    __version__,
    finding_docs,
    result_file,
    svg_looks,
    web_check,
    web_form,
    web_guard,
    web_result,
    wsgi_server,
)
from pcinuma.edge import OPTION_HELP, PROGRAM
from pcinuma.errors import BadInput, PcinumaError, one_line
from pcinuma.listen import Listener, shown
from pcinuma.model import Options
from pcinuma.options import CHOICES, as_mapping
from pcinuma.web_check import Checked
from pcinuma.web_form import Form, Inputs, Kept, Problem
from pcinuma.web_result import View

MAX_BODY = 24 * 1024 * 1024
"""Bytes of a request: the three inputs at their limits, as base64, and what frames them."""
MAX_PARTS = 40
CONNECTIONS = 64
AT_ONCE = 2
"""Transforms that are worked on at one time."""
WAIT_SECONDS = 10

ASSETS = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}

_HERE = os.path.join(os.path.dirname(__file__), "web_assets")


@dataclass(frozen=True, slots=True)
class Settings:
    """How one page is served. ``listen`` is a host and a port, 0 for any that is free."""

    listen: tuple[str, int]


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Raises BadInput when it cannot begin."""
    host, port = settings.listen
    with Listener(host, port, CONNECTIONS) as listener:
        bound, real_port = listener.getsockname()[:2]
        wsgi_server.serve(
            application(host, bound),
            listener,
            max_body=MAX_BODY,
            headers=web_guard.headers([svg_looks.css()]),
            ready=lambda: _say_where(host, bound, real_port),
            fault=_fault,
        )
    return 0


def _say_where(host: str, bound: str, port: int) -> None:
    if not web_guard.is_loopback(bound):
        _say(
            f"warning: the page is served on {shown(bound, port)}, without encryption and without a login:"
            " whoever reaches that address can use it, and who is on the way reads what is sent to it;"
            " this machine's own devices are not shown there\n"
            "hint: listen on 127.0.0.1, and reach it by ssh -L or kubectl port-forward"
        )
    # by an address: the machine's own name is one that is not answered
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, host)  # noqa: S104 - compared, not listened on
    _say(f"the debug page is at http://{shown(name, port)}/ (Ctrl-C ends it)")


def _fault(line: str) -> None:
    _say(f"error: {line}")


def _say(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # nobody reads it any more, which is no reason to end
            print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


# --- the application -------------------------------------------------------------------------------------------


class _Request(Request):
    """A request whose uploads stay in memory, and whose form is read whole or not at all."""

    max_form_memory_size = MAX_BODY
    max_form_parts = MAX_PARTS

    def _get_file_stream(
        self,
        total_content_length: int | None,  # noqa: ARG002 - the base class says what is given
        content_type: str | None,  # noqa: ARG002
        filename: str | None = None,  # noqa: ARG002
        content_length: int | None = None,  # noqa: ARG002
    ) -> IO[bytes]:
        return io.BytesIO()  # the base class writes large ones to the disk

    def make_form_data_parser(self) -> FormDataParser:
        parser = super().make_form_data_parser()
        parser.silent = False
        return parser


def application(listen: str, bound: str) -> wsgi_server.App:
    """The application of a page that ``--listen`` has put on the host ``listen``, its socket on address ``bound``."""
    app = wsgi_server.App(
        __name__, static_folder=None, template_folder=os.path.join(_HERE, "templates"), root_path=_HERE
    )
    app.request_class = _Request
    app.config["MAX_FORM_MEMORY_SIZE"] = MAX_BODY
    app.config["MAX_FORM_PARTS"] = MAX_PARTS
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters["line"] = one_line
    machine = _this_machine if web_guard.is_loopback(bound) else None
    working = threading.BoundedSemaphore(AT_ONCE)
    assets = {name: _asset(name) for name in ASSETS}

    @app.before_request
    def guard() -> None:
        host = request.headers.get("Host", "")
        if not web_guard.is_known_host(host, listen, bound):
            raise MisdirectedRequest(
                f"this page is not served under the name {web_guard.host_of(host)[:80]!r}:"
                " ask for localhost, or start it with the name in --listen"
            )
        if request.method == "POST":
            headers = request.headers
            if not web_guard.is_own_request(host, headers.get("Origin"), headers.get("Sec-Fetch-Site")):
                raise BadRequest("another site sent this form: open the page itself and send it from there")
            if request.mimetype not in ("multipart/form-data", "application/x-www-form-urlencoded"):
                raise UnsupportedMediaType("what is sent is no form")

    @app.get("/")
    def empty() -> Response:
        return _page(Form(), machine is not None)

    @app.get("/example")
    def example() -> Response:
        return _page(_example(), machine is not None, example=True)

    def answered(made_of: Callable[[Inputs], View | Checked | Problem]) -> Response:
        """The page with what is made of the form that was sent, or with what is wrong with it."""
        form = web_form.read(*_sent())
        inputs, problems = web_form.inputs_of(form, machine)
        if inputs is None:
            return _page(form, machine is not None, problems=problems)
        with _Turn(working):
            made = made_of(inputs)
        if isinstance(made, Problem):
            return _page(form, machine is not None, problems=[made])
        if isinstance(made, Checked):
            return _page(form, machine is not None, checked=made)
        return _page(form, machine is not None, view=made)

    @app.post("/")
    def transform() -> Response:
        return answered(web_result.of)

    @app.post("/check")
    def check() -> Response:
        return answered(web_check.of)

    @app.post("/open")
    def open_result() -> Response:
        values, uploads = _sent()
        form = web_form.read(values, uploads)
        given = uploads.get("result")
        try:
            if given is None:
                raise BadInput("no file", hint="choose a pcinuma-result.json, or a report")
            with _Turn(working):
                view = web_result.opened(given.data, one_line(given.name, 120) or "the file")
        except PcinumaError as error:
            return _page(form, machine is not None, problems=[Problem("result", error)])
        return _page(form, machine is not None, view=view)

    @app.get("/check")
    @app.get("/open")
    def again() -> Response:  # the address of a result, reloaded or kept as a bookmark
        return Response(status=303, headers={"Location": "/"}, mimetype="text/html")

    @app.get("/docs/<name>")
    def docs(name: str) -> Response:
        if name not in finding_docs.NAMES:
            raise HTTPException(response=_failure(404, "there is no such page"))
        return _html("docs.html", 200, body=finding_docs.page(name), name=name)

    @app.get("/assets/<name>")
    def asset(name: str) -> Response:
        if name not in assets:
            raise HTTPException(response=_failure(404, "there is no such page"))
        return Response(assets[name], mimetype=ASSETS[name])

    @app.errorhandler(HTTPException)
    def refused(error: HTTPException) -> Response:
        if error.response is not None and isinstance(error.response, Response):
            return error.response
        what = {404: "there is no such page", 405: f"{request.method} is not for this page"}
        answer = _failure(error.code or 500, what.get(error.code or 500, error.description or error.name))
        answer.headers.extend((name, value) for name, value in error.get_headers(request.environ) if name == "Allow")
        return answer

    @app.errorhandler(Exception)
    def failed(error: Exception) -> Response:
        # neither the page nor the log says more than the type and the place: the words may hold what was sent
        at = traceback.extract_tb(error.__traceback__)[-1]
        _fault(f"internal error: {type(error).__name__} in {os.path.basename(at.filename)}, line {at.lineno}")
        if isinstance(error, (RecursionError, MemoryError)):
            return _failure(422, f"the input is too large or too deep ({type(error).__name__})")
        return _failure(
            500, f"internal error: {type(error).__name__}", "run the command on the same input with --debug"
        )

    return app


class _Turn:
    """One of the few transforms that are worked on at one time. Raises ServiceUnavailable when none comes free."""

    def __init__(self, working: threading.BoundedSemaphore):
        self._working = working

    def __enter__(self) -> None:
        if not self._working.acquire(timeout=WAIT_SECONDS):
            raise ServiceUnavailable("busy with other requests: send it again in a while")

    def __exit__(self, *_: object) -> None:
        self._working.release()


def _sent() -> tuple[dict[str, str], dict[str, Kept]]:
    """The fields of the form that was sent, and the files that were chosen in it."""
    try:
        values = request.form.to_dict()
    except ValueError:  # what is no multipart, or not UTF-8
        raise BadRequest("the form that was sent cannot be read") from None
    uploads = {
        name.removesuffix("-file"): Kept(upload.filename or "", upload.stream.read())
        for name, upload in request.files.items()
        if upload.filename
    }
    return values, uploads


def _this_machine(query: Any) -> Any:
    from pcinuma import discover

    return discover.live()(query)


def _example() -> Form:
    """The example that the program is shipped with."""
    texts = {}
    for name, file in (("domain", "domain.xml"), ("vmi", "vmi.yaml"), ("host", "host.json")):
        with open(os.path.join(_HERE, "example", file), encoding="utf-8") as content:
            texts[name] = content.read()
    return Form(texts)


def _asset(name: str) -> bytes:
    with open(os.path.join(_HERE, name), "rb") as file:
        return file.read()


# --- answers ---------------------------------------------------------------------------------------------------


def _page(
    form: Form,
    machine: bool,
    *,
    problems: list[Problem] | None = None,
    view: View | None = None,
    checked: Checked | None = None,
    example: bool = False,
) -> Response:
    found = {problem.field: problem.error for problem in problems or []}
    by_field = {name: found[name] for name in (*web_form.NAMES, *CHOICES, "result") if name in found}
    context: Mapping[str, Any] = {
        "form": form,
        "machine": machine,
        "problems": by_field,
        "labels": {**web_form.NAMES, **{name: name for name in CHOICES}, "result": "result file"},
        "view": view,
        "checked": checked,
        "example": example,
        "options": [(name, values, OPTION_HELP[name]) for name, values in CHOICES.items()],
        "opened_options": any(form.chosen.values()) or bool(by_field.keys() & CHOICES.keys()),
        "defaults": as_mapping(Options()),
        "limits": {**web_form.MAX_BYTES, "result": result_file.MAX_BYTES},
    }
    return _html("page.html", 422 if by_field else 200, **context)


def _failure(status: int, what: str, hint: str | None = None) -> Response:
    return _html("failure.html", status, what=one_line(what), hint=hint)


def _html(template: str, status: int, **context: Any) -> Response:
    return Response(render_template(template, version=__version__, **context), status=status, mimetype="text/html")
