"""The command line: a thin edge. It reads files, calls the pipeline, writes files, and turns errors into a status."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pcinuma.arguments import Command, parser_of
from pcinuma.command_files import (
    domain_of,
    file_or_stdin,
    refuse_one_file,
    report_output,
    spare_inputs,
    write,
    write_all,
)
from pcinuma.edge import (
    PROGRAM,
    defaults_of,
    flags_of,
    guarded,
    hook_defaults_of,
    host_of,
    json_text,
    read_file,
    tell,
    write_stdout,
)
from pcinuma.errors import BadInput, BadOption, PcinumaError, one_line

if TYPE_CHECKING:
    from pcinuma.kubelet_config import Loaded
    from pcinuma.model import Options
    from pcinuma.node_facts import NodeFacts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0 done, 1 refused, 2 bad input or usage, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else list(arguments)

    def run() -> int:
        parsed = parser_of(COMMANDS).parse_args(given)
        command: Command = parsed.run
        return command(parsed)

    return guarded(run, debug="--debug" in given)


def _transform(parsed: argparse.Namespace) -> int:
    from pcinuma import pipeline

    spare_inputs(parsed, in_place=parsed.format != "diff")
    data, where = domain_of(parsed)
    result = pipeline.transform(data, _options(parsed), host_of(parsed), where=where)
    outputs: list[tuple[str | None, bytes]] = []
    if parsed.report is not None:
        from pcinuma.report import as_dict

        outputs += report_output(parsed, as_dict(result.report))
    if result.refusal is not None:
        write_all(*outputs)
        raise result.refusal
    _warn(parsed, result.report.findings)
    if parsed.format == "diff":
        from pcinuma.domain_xml import load
        from pcinuma.report import diff

        before, after = load(data, where).text, load(result.xml, where).text
        outputs.append((parsed.output, diff(before, after).encode("utf-8")))
    else:
        outputs.append((parsed.output, result.xml))
    write_all(*outputs)
    return 0


def _explain(parsed: argparse.Namespace) -> int:
    from pcinuma import explain, report

    spare_inputs(parsed)
    refuse_one_file(parsed)
    data, where = domain_of(parsed)
    explained = explain.explain(data, _options(parsed), host_of(parsed), where=where)
    content = report.as_dict(explained.result.report)
    outputs = report_output(parsed, content)
    if parsed.svg is not None:
        from pcinuma import svg

        outputs.append((parsed.svg, svg.draw(explained.scene).encode("utf-8")))
    if parsed.json:
        text = json_text(content)
    else:
        from pcinuma import tree

        terminal = parsed.output is None and sys.stdout is not None and sys.stdout.isatty()
        signs = tree.ASCII if parsed.ascii else tree.UNICODE
        text = tree.draw(explained.scene, width=_columns(terminal), colour=terminal and _takes_colour(), signs=signs)
    write_all(*outputs, (parsed.output, text.encode("utf-8")))
    return 0


NOT_FOR_NCCL = ("switch-link-speed", "gpudirect-clique")


def _nccl_topo(parsed: argparse.Namespace) -> int:
    from dataclasses import replace

    from pcinuma import nccl_topo, pipeline
    from pcinuma.report import as_dict

    spare_inputs(parsed)
    data, where = domain_of(parsed)
    read_host = host_of(parsed)
    result = pipeline.transform(data, _options(parsed), read_host, where=where)
    if result.refusal is not None:
        write_all(*report_output(parsed, as_dict(result.report)))
        raise result.refusal
    made = nccl_topo.topology_file(result.xml, read_host, where=where)
    report = replace(result.report, findings=(*result.report.findings, *made.findings))
    outputs = report_output(parsed, as_dict(report))
    # whoever takes the file has what the advice of the one is; the other is about a domain that is not written
    _warn(parsed, [finding for finding in report.findings if finding.code not in NOT_FOR_NCCL])
    write_all(*outputs, (parsed.output, made.text.encode("ascii")))
    return 0


def _columns(terminal: bool) -> int:
    """The columns to draw in: COLUMNS, else the terminal's, never fewer than the narrowest drawn for."""
    from pcinuma.tree import WIDTH

    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdigit() and int(given[:6]):
        return max(int(given[:6]), WIDTH)
    with contextlib.suppress(OSError):
        if terminal:
            return max(os.get_terminal_size(sys.stdout.fileno()).columns, WIDTH)
    return WIDTH


def _takes_colour() -> bool:
    """Whether the terminal shows colours and its user wants them (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _check(parsed: argparse.Namespace) -> int:
    from pcinuma import check, report

    spare_inputs(parsed)
    data, where = domain_of(parsed)
    findings = check.check(data, _options(parsed), host_of(parsed), where=where)
    content = {"version": report.VERSION, "findings": [report.finding_dict(finding) for finding in findings]}
    outputs = report_output(parsed, content)
    if parsed.json:
        text = json_text(content)
    else:
        lines = [report.finding_line(finding) for finding in report.grouped(findings)] or ["nothing found"]
        text = "\n".join(lines) + "\n"
    write_all(*outputs, (parsed.output, text.encode("utf-8")))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _certs(parsed: argparse.Namespace) -> int:
    import datetime

    from pcinuma import certs, kube_api

    namespace = parsed.namespace
    if namespace is None:
        path = os.path.join(parsed.service_account, "namespace")
        namespace = read_file(path, 253).decode("utf-8", "replace").strip()
    settings = certs.Settings(
        namespace=namespace,
        secret=parsed.secret,
        service=parsed.service,
        webhook=parsed.webhook,
        days=parsed.days,
        renew_before=parsed.renew_before,
    )
    api = kube_api.Api(parsed.api, parsed.service_account)
    done = certs.ensure(api, settings, datetime.datetime.now(datetime.UTC))
    write_stdout(f"{done}\n".encode())
    return 0


def _snapshot(parsed: argparse.Namespace) -> int:
    from pcinuma import discover, host_file, sys_trees

    tree = sys_trees.RecordedTree(parsed.sysfs) if parsed.sysfs else sys_trees.LiveTree()
    write(parsed.output, json_text(host_file.dump(discover.read_all(tree))).encode("utf-8"))
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from pcinuma import doctor, doctor_report
    from pcinuma.schema import problems

    spare_inputs(parsed)
    kubelet = _kubelet(parsed)
    config, findings = (kubelet.config, kubelet.findings) if kubelet is not None else (None, ())
    diagnosis = doctor.diagnose(_node_facts(parsed), config, findings)
    if parsed.json:
        content = doctor_report.as_dict(diagnosis)
        if wrong := problems(content, "doctor"):
            raise PcinumaError(f"internal error: the result is not valid: {wrong[0]}", hint="please report it")
        text = json_text(content)
    else:
        text = doctor_report.as_text(diagnosis, quiet=parsed.quiet)
    write(parsed.output, text.encode("utf-8"))
    return 1 if diagnosis.has_errors else 0


def _kubelet(parsed: argparse.Namespace) -> Loaded | None:
    """The kubelet's configuration: its file, the drop-in files over it, both, or none."""
    from pcinuma import kubelet_config, yaml_text

    loaded = None
    if parsed.kubelet_config is not None:
        example = f"kubectl get --raw /api/v1/nodes/NODE/proxy/configz | {PROGRAM} doctor --kubelet-config -"
        given = file_or_stdin(parsed.kubelet_config, yaml_text.MAX_BYTES, "KubeletConfiguration", example)
        loaded = kubelet_config.read(*given)
    if parsed.kubelet_config_dir is None:
        return loaded
    from pcinuma import kubelet_drop_ins

    if loaded is not None and loaded.is_running:
        what = "a dump of configz has the drop-in files in it already"
        raise BadOption(what, where="--kubelet-config-dir", hint="give the dump alone, or the kubelet's own file")
    drop_ins = kubelet_drop_ins.find(parsed.kubelet_config_dir)
    contents = [read_file(path, yaml_text.MAX_BYTES) for path in drop_ins.files]
    return kubelet_drop_ins.merged(loaded, drop_ins, contents)


def _node_facts(parsed: argparse.Namespace) -> NodeFacts:
    if parsed.host is not None and parsed.sysfs is not None:
        raise BadOption("--host and --sysfs exclude each other", hint="give one of them, or none for this machine")
    from pcinuma import node_reads

    if parsed.host is not None:
        from pcinuma import host_file

        return node_reads.from_record(
            host_file.load(read_file(parsed.host, host_file.MAX_BYTES), parsed.host), parsed.host
        )
    return node_reads.recorded(parsed.sysfs) if parsed.sysfs is not None else node_reads.live()


def _hook(parsed: argparse.Namespace) -> int:
    from pcinuma import hook_server
    from pcinuma.log import Log

    if parsed.hook_version is not None and parsed.hook_version not in hook_server.VERSIONS:
        what = f"version cannot be {parsed.hook_version!r}"
        raise BadOption(what, where="--version", hint=f"one of: {', '.join(hook_server.VERSIONS)}")
    if parsed.host is None and parsed.sysfs is not None and not os.path.isdir(parsed.sysfs):
        raise BadInput("no such directory", where=parsed.sysfs, hint="--sysfs takes a tree laid out like /sys")
    reader = host_of(parsed) if parsed.host is not None else None  # a bad record is told now, not at the first call
    return hook_server.serve(
        hook_server.Settings(
            socket=parsed.socket or hook_server.new_socket_name(os.environ.get("CONTAINER_NAME")),
            plugin_socket=parsed.plugin_socket,
            versions=hook_server.VERSIONS if parsed.hook_version is None else (parsed.hook_version,),
            defaults=hook_defaults_of(parsed),
            host=lambda: reader or host_of(parsed),
            log=Log(parsed.log_format, parsed.log_level),
        )
    )


def _webhook(parsed: argparse.Namespace) -> int:
    from pcinuma import webhook_config  # the server's libraries cost 200 ms: what the flags say comes first
    from pcinuma.listen import address
    from pcinuma.log import Log
    from pcinuma.yaml_text import MAX_BYTES

    where = parsed.config or "--config"
    config = webhook_config.load(read_file(parsed.config, MAX_BYTES), where) if parsed.config is not None else {}
    sidecar = webhook_config.sidecar_of(config, parsed.image, parsed.image_pull_policy, where)
    listen = address(parsed.listen)
    from pcinuma import webhook

    return webhook.serve(webhook.Settings(listen, parsed.tls_cert, parsed.tls_key, sidecar, Log("json", "info")))


def _web(parsed: argparse.Namespace) -> int:
    from pcinuma.listen import address

    try:
        listen = address(parsed.listen)
    except BadOption as error:
        raise BadOption(error.message, where=error.where, hint="write it as 127.0.0.1:8080 or [::1]:8080") from None
    if parsed.listen.startswith(":"):  # who names no host has not asked for a page that others reach
        listen = ("127.0.0.1", listen[1])
    from pcinuma import web  # the server's libraries cost 200 ms: what the flag says comes first

    return web.serve(web.Settings(listen))


def _options(parsed: argparse.Namespace) -> Options:
    from pcinuma import options

    annotations = None
    if parsed.vmi is not None:
        from pcinuma import yaml_text

        vmi = options.load_object(read_file(parsed.vmi, yaml_text.MAX_BYTES), parsed.vmi)
        annotations = options.from_vmi(vmi, parsed.vmi)
    return options.resolve(flags_of(parsed), annotations, defaults_of(parsed))


def _warn(parsed: argparse.Namespace, findings: Sequence[Any]) -> None:
    """Each warning on a line of its own, as scripts count them; a hint that several have in a row once, after them."""
    shown = [finding for finding in findings if finding.severity != "info" and not parsed.quiet]
    for finding, following in itertools.zip_longest(shown, shown[1:]):
        tell(f"{PROGRAM}: {finding.severity}: {one_line(finding.message)}")
        is_said_again = following is not None and (following.code, following.hint) == (finding.code, finding.hint)
        if finding.hint and not is_said_again:
            tell(f"hint: {one_line(finding.hint)}")


COMMANDS: Mapping[str, Command] = {
    "transform": _transform,
    "explain": _explain,
    "nccl-topo": _nccl_topo,
    "check": _check,
    "certs": _certs,
    "snapshot": _snapshot,
    "doctor": _doctor,
    "hook": _hook,
    "webhook": _webhook,
    "web": _web,
}
