"""The debug page where it cannot answer: too much at once, and a fault of its own."""

from __future__ import annotations

import pytest

from pcinuma import web, web_result

FORM = {"domain": "<domain/>"}


def test_a_fault_is_told_without_what_was_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("<secret>")

    monkeypatch.setattr(web_result, "of", broken)
    answer = web.application("127.0.0.1", "127.0.0.1").test_client().post("/", data=FORM)
    assert answer.status_code == 500
    assert "internal error: RuntimeError" in answer.text
    said = capsys.readouterr().err
    assert said.startswith("pcinuma: error: internal error: RuntimeError in test_web.py, line ")
    for text in (answer.text, said):
        assert "secret" not in text
        assert "Traceback" not in text
    assert said.count("\n") == 1


def test_what_is_too_deep_is_the_inputs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(web_result, "of", deep)
    answer = web.application("127.0.0.1", "127.0.0.1").test_client().post("/", data=FORM)
    assert (answer.status_code, "too large or too deep" in answer.text) == (422, True)


def test_too_much_at_once_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "AT_ONCE", 0)
    monkeypatch.setattr(web, "WAIT_SECONDS", 0.01)
    answer = web.application("127.0.0.1", "127.0.0.1").test_client().post("/", data=FORM)
    assert (answer.status_code, "busy with other requests" in answer.text) == (503, True)
