"""``explain``: a transform together with the picture of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from pcinuma import pipeline
from pcinuma.domain_xml import load
from pcinuma.errors import PolicyNotMet
from pcinuma.model import HostQuery, HostTopology, Options
from pcinuma.parse import parse
from pcinuma.picture import Scene
from pcinuma.pipeline import Result
from pcinuma.scene import scene


@dataclass(frozen=True, slots=True)
class Explained:
    """``result`` is what the pipeline says, ``scene`` what `svg` and `tree` draw of it."""

    result: Result
    scene: Scene


def explain(
    xml: bytes, options: Options, read_host: Callable[[HostQuery], HostTopology], *, where: str = "domain XML"
) -> Explained:
    """The transform explained. Raises what :func:`pipeline.transform` raises. The host is read once.

    Where the policy keeps the domain as it is (none, or a refusal), the picture shows what best-effort would make of
    it: whoever asks wants to see which device is the odd one.
    """
    answers: list[HostTopology] = []

    def read_once(query: HostQuery) -> HostTopology:
        if not answers:
            answers.append(read_host(query))
        return answers[0]

    result = pipeline.transform(xml, options, read_once, where=where)
    drawn = result
    would_be = False
    if options.policy == "none" or isinstance(result.refusal, PolicyNotMet):
        drawn = pipeline.transform(xml, replace(options, policy="best-effort"), read_once, where=where)
        would_be = drawn.report.outcome == "changed"
    after = result.before if drawn.xml is xml else parse(load(drawn.xml, where))
    host = answers[0] if answers else None
    return Explained(result, scene(result.before, after, result.report, host, would_be=would_be))
