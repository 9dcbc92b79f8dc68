"""The command line: a thin edge. It reads files, calls the pipeline, writes files, and turns errors into a status."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pcinuma import __version__
from pcinuma.edge import (
    PROGRAM,
    Parser,
    add_host,
    add_options,
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
    from pcinuma.output import Replacement


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0 done, 1 refused, 2 bad input or usage, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else list(arguments)

    def run() -> int:
        parsed = _parser().parse_args(given)
        command: Callable[[argparse.Namespace], int] = parsed.run
        return command(parsed)

    return guarded(run, debug="--debug" in given)


# --- commands --------------------------------------------------------------------------------------------------


def _transform(parsed: argparse.Namespace) -> int:
    from pcinuma import pipeline

    _spare_inputs(parsed, in_place=parsed.format != "diff")
    data, where = _domain(parsed)
    result = pipeline.transform(data, _options(parsed), host_of(parsed), where=where)
    outputs: list[tuple[str | None, bytes]] = []
    if parsed.report is not None:
        from pcinuma.report import as_dict

        outputs += _report(parsed, as_dict(result.report))
    if result.refusal is not None:
        _write_all(*outputs)
        raise result.refusal
    _warn(parsed, result.report.findings)
    if parsed.format == "diff":
        from pcinuma.domain_xml import load
        from pcinuma.report import diff

        before, after = load(data, where).text, load(result.xml, where).text
        outputs.append((parsed.output, diff(before, after).encode("utf-8")))
    else:
        outputs.append((parsed.output, result.xml))
    _write_all(*outputs)
    return 0


def _explain(parsed: argparse.Namespace) -> int:
    from pcinuma import explain, report

    _spare_inputs(parsed)
    _refuse_one_file(parsed)
    data, where = _domain(parsed)
    explained = explain.explain(data, _options(parsed), host_of(parsed), where=where)
    content = report.as_dict(explained.result.report)
    outputs = _report(parsed, content)
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
    _write_all(*outputs, (parsed.output, text.encode("utf-8")))
    return 0


NOT_FOR_NCCL = ("switch-link-speed", "gpudirect-clique")


def _nccl_topo(parsed: argparse.Namespace) -> int:
    from dataclasses import replace

    from pcinuma import nccl_topo, pipeline
    from pcinuma.report import as_dict

    _spare_inputs(parsed)
    data, where = _domain(parsed)
    read_host = host_of(parsed)
    result = pipeline.transform(data, _options(parsed), read_host, where=where)
    if result.refusal is not None:
        _write_all(*_report(parsed, as_dict(result.report)))
        raise result.refusal
    made = nccl_topo.topology_file(result.xml, read_host, where=where)
    report = replace(result.report, findings=(*result.report.findings, *made.findings))
    outputs = _report(parsed, as_dict(report))
    # whoever takes the file has what the advice of the one is; the other is about a domain that is not written
    _warn(parsed, [finding for finding in report.findings if finding.code not in NOT_FOR_NCCL])
    _write_all(*outputs, (parsed.output, made.text.encode("ascii")))
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

    _spare_inputs(parsed)
    data, where = _domain(parsed)
    findings = check.check(data, _options(parsed), host_of(parsed), where=where)
    content = {"version": report.VERSION, "findings": [report.finding_dict(finding) for finding in findings]}
    outputs = _report(parsed, content)
    if parsed.json:
        text = json_text(content)
    else:
        lines = [report.finding_line(finding) for finding in report.grouped(findings)] or ["nothing found"]
        text = "\n".join(lines) + "\n"
    _write_all(*outputs, (parsed.output, text.encode("utf-8")))
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
    from pcinuma import discover, host_file

    tree = discover.RecordedTree(parsed.sysfs) if parsed.sysfs else discover.LiveTree()
    _write(parsed.output, json_text(host_file.dump(discover.read_all(tree))).encode("utf-8"))
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from pcinuma import doctor, doctor_report
    from pcinuma.schema import problems

    _spare_inputs(parsed)
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
    _write(parsed.output, text.encode("utf-8"))
    return 1 if diagnosis.has_errors else 0


def _kubelet(parsed: argparse.Namespace) -> Loaded | None:
    """The kubelet's configuration: its file, the drop-in files over it, both, or none."""
    from pcinuma import kubelet_config, options

    loaded = None
    if parsed.kubelet_config is not None:
        example = f"kubectl get --raw /api/v1/nodes/NODE/proxy/configz | {PROGRAM} doctor --kubelet-config -"
        given = _file_or_stdin(parsed.kubelet_config, options.MAX_BYTES, "KubeletConfiguration", example)
        loaded = kubelet_config.read(*given)
    if parsed.kubelet_config_dir is None:
        return loaded
    from pcinuma import kubelet_drop_ins

    if loaded is not None and loaded.is_running:
        what = "a dump of configz has the drop-in files in it already"
        raise BadOption(what, where="--kubelet-config-dir", hint="give the dump alone, or the kubelet's own file")
    drop_ins = kubelet_drop_ins.find(parsed.kubelet_config_dir)
    contents = [read_file(path, options.MAX_BYTES) for path in drop_ins.files]
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
    from pcinuma.options import MAX_BYTES

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


# --- inputs and outputs ----------------------------------------------------------------------------------------


def _domain(parsed: argparse.Namespace) -> tuple[bytes, str]:
    from pcinuma.domain_xml import MAX_BYTES

    return _file_or_stdin(parsed.domain, MAX_BYTES, "domain XML", f"virsh dumpxml VM | {PROGRAM} {parsed.name}")


def _file_or_stdin(path: str, limit: int, what: str, example: str) -> tuple[bytes, str]:
    """The bytes of the file, or of standard input for ``-``, up to ``limit`` + 1, and where they are from."""
    if path != "-":
        return read_file(path, limit), path
    if sys.stdin is None or sys.stdin.isatty():
        raise BadInput(f"no {what}", hint=f"give a file, or pipe one in: {example}")
    return sys.stdin.buffer.read(limit + 1), "standard input"


def _options(parsed: argparse.Namespace) -> Options:
    from pcinuma import options

    annotations = None
    if parsed.vmi is not None:
        vmi = options.load_object(read_file(parsed.vmi, options.MAX_BYTES), parsed.vmi)
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


def _spare_inputs(parsed: argparse.Namespace, *, in_place: bool = False) -> None:
    """No output replaces an input; with ``in_place`` the new domain may replace the domain. Raises BadOption."""
    given = vars(parsed)
    inputs = {name: given.get(name.replace("-", "_")) for name in ("domain", "vmi", "host", "config", "kubelet-config")}
    for flag, name in (("-o", "output"), ("--report", "report"), ("--svg", "svg")):
        path = given.get(name)
        if path == "":
            raise BadOption(f"{flag} names no file", where=flag)
        if path is None or path == "-" or not os.path.isfile(path):  # a terminal is read and written
            continue
        for kind, other in inputs.items():
            if other in (None, "-") or (in_place and flag == "-o" and kind == "domain"):
                continue
            if os.path.realpath(other) == os.path.realpath(path):
                what = "the domain" if kind == "domain" else f"the file of --{kind}"
                raise BadOption(f"{flag} would overwrite {what}", where=path)


def _refuse_one_file(parsed: argparse.Namespace) -> None:
    """--svg writes a file of its own, and no other output goes there."""
    if parsed.svg is None:
        return
    if parsed.svg == "-":
        raise BadOption("--svg takes a file: standard output carries the tree", hint="pcinuma explain --svg FILE.svg")
    for flag, other in (("-o", parsed.output), ("--report", parsed.report)):
        if other is not None and os.path.realpath(other) == os.path.realpath(parsed.svg):
            raise BadOption(f"{flag} and --svg name one file", where=parsed.svg)


def _report(parsed: argparse.Namespace, content: dict[str, Any]) -> list[tuple[str | None, bytes]]:
    """The output of ``--report``, if it is wanted."""
    if parsed.report is None:
        return []
    if parsed.report == "-":
        raise BadOption(
            "--report takes a file: standard output carries the result alone", hint="pcinuma explain --json"
        )
    same = parsed.output is not None and os.path.realpath(parsed.report) == os.path.realpath(parsed.output)
    if same:
        raise BadOption("-o and --report name one file", where=parsed.report)
    return [(parsed.report, json_text(content).encode("utf-8"))]


def _write(path: str | None, data: bytes) -> None:
    """To the file, whole or not at all; to standard output for None and ``-``."""
    _write_all((path, data))


def _write_all(*outputs: tuple[str | None, bytes]) -> None:
    """Every output, or no file: each is written beside its place first, and none takes it before all are whole.

    Pipes, devices and at last standard output are written to in between: what they got cannot be taken back.
    """
    streams = [(path, data) for path, data in outputs if path is None or path == "-"]
    named = [(path, data) for path, data in outputs if path is not None and path != "-"]
    special = [(path, data) for path, data in named if os.path.lexists(path) and not os.path.isfile(path)]
    prepared: list[Replacement] = []
    try:
        for output in named:
            if output not in special:
                from pcinuma.output import Replacement  # most commands write to standard output alone

                prepared.append(Replacement(*output))
        for path, data in special:
            _write_special(path, data)
        reader_has_gone: BrokenPipeError | None = None
        for _, data in streams:
            try:
                write_stdout(data)
            except BrokenPipeError as error:  # as with `| head`: the files are wanted all the same
                reader_has_gone = error
        for replacement in prepared:
            replacement.take_place()
        if reader_has_gone is not None:
            raise reader_has_gone
    finally:
        for replacement in prepared:
            replacement.discard()


def _write_special(path: str, data: bytes) -> None:
    """To a pipe or a device, which is written to, not replaced."""
    try:
        with open(path, "wb") as special:
            special.write(data)
    except OSError as error:
        raise BadInput(f"cannot be written: {error.strerror or error}", where=path) from None


# --- the parser ------------------------------------------------------------------------------------------------


_TOP = """\
Places the passthrough PCI devices of a KubeVirt VM on the guest NUMA cells they belong to.

  virsh dumpxml VM | pcinuma transform --addressed move > aligned.xml
  pcinuma explain domain.xml --host host.json
"""

_TRANSFORM = """\
Reads a libvirt domain XML and writes it with an expander per cell, a root port per device, and each
passthrough device behind the port of the cell that its host node backs. Everything else is the input,
byte for byte. Nothing to place: the input comes back as it is.

example, on the VM's node:
  kubectl exec -n NS POD -c compute -- virsh dumpxml NS_VM | pcinuma transform --addressed move > aligned.xml

example, anywhere:
  pcinuma transform domain.xml --host host.json --vmi vmi.yaml --report report.json -o aligned.xml
"""

_EXPLAIN = """\
Shows the guest's PCI tree before and after beside the host's, where each device goes and why, and what was found
on the way. A refusal is shown, too, with what best-effort would do; the exit status is then 0 all the same.

example:
  pcinuma explain domain.xml --host host.json --policy restricted --svg picture.svg
"""

_NCCL_TOPO = """\
Writes the file that NCCL reads through NCCL_TOPO_FILE, for the guest of the transformed domain: its cells, its
GPUs and NICs at the BDFs the guest shows, the host's switches they share, and the host's link speed and width.
With --policy none: for the guest of the domain as it stands.

example, and in the guest NCCL_TOPO_FILE=/etc/nccl-topo.xml:
  pcinuma nccl-topo domain.xml --host host.json -o nccl-topo.xml
"""

_CERTS = """\
Keeps the webhook's serving certificate, for clusters without cert-manager: makes one with an authority of its own
when there is none or the old one nears its end, puts it into the Secret, and the authority into the
MutatingWebhookConfiguration. Both objects must be there. Runs in a pod, with its service account; safe at any time.

example, as the Job of manifests/overlays/self-signed runs it:
  pcinuma certs
"""

_CHECK = """\
Holds a domain XML of any origin against the rules of libvirt, QEMU and firmware, and says which devices the
guest will see without a node or on a foreign one. Changes nothing. Exit status 1 when a finding is an error.

example:
  virsh dumpxml VM | pcinuma check
"""

_HOOK = """\
Serves the KubeVirt hook sidecar on a unix socket, and with --plugin-socket KubeVirt's plugin service on another.
Flags and --config are defaults here: the annotations of the VM win. One JSON line a call goes to standard error.
Ends cleanly on Shutdown, SIGTERM and SIGINT.

example, in the annotations of a VirtualMachineInstance:
  hooks.kubevirt.io/hookSidecars: '[{"image": "IMAGE", "command": ["pcinuma", "hook"]}]'

example, to try it:
  pcinuma hook --socket /tmp/pcinuma.sock --host host.json --log-format text
"""

_WEBHOOK = """\
Serves the mutating admission webhook over HTTPS: a VirtualMachineInstance that is created with the annotation
pcinuma.vm.kubevirt.io/enabled: "true" gets the hook sidecar. POST /mutate, and /healthz, /readyz, /metrics.
The certificate is read again when its file changes. Ends cleanly on SIGTERM and SIGINT.

example:
  pcinuma webhook --tls-cert /tls/tls.crt --tls-key /tls/tls.key --image REGISTRY/pcinuma:VERSION

example of the file of --config; flags win over it:
  image: REGISTRY/pcinuma:VERSION
  image-pull-policy: IfNotPresent
  options: {policy: restricted}
"""

_WEB = """\
Serves the debug page: paste or drop a domain XML, a VMI and a host record, and see the picture, the devices, the
findings, the diff, and the files to download. What is sent is worked on in memory, neither stored nor logged.
On loopback, where alone it can read this machine as the host. Ends cleanly on SIGTERM and SIGINT.

example, and then http://127.0.0.1:8080/ in a browser:
  pcinuma web

example, on a node that you reach by ssh -L 8080:127.0.0.1:8080 NODE:
  pcinuma web --listen 127.0.0.1:8080
"""

_SNAPSHOT = """\
Records this host's nodes, PCI functions and mediated devices as one JSON file, for --host on another machine.
No serial number is read: neither configuration space, nor VPD, nor any serial_number file.

example:
  pcinuma snapshot -o host.json
"""


_DOCTOR = """\
Tells whether this node is set up for VMs that are aligned with its NUMA nodes: nodes, IOMMU and VFIO, huge pages,
links, ACS and ATS, and the kubelet's managers. Proposes the KubeletConfiguration that fits. Changes nothing.
Run it as root: Linux shows others no ACS and ATS. Exit status 1 when a finding is an error.

example, on the node:
  pcinuma doctor --kubelet-config /var/lib/kubelet/config.yaml

example, where the kubelet has a --config-dir, too:
  pcinuma doctor --kubelet-config /var/lib/kubelet/config.yaml --kubelet-config-dir /etc/kubernetes/kubelet.conf.d

example, with what the kubelet runs with:
  kubectl get --raw /api/v1/nodes/NODE/proxy/configz | pcinuma doctor --kubelet-config -

example, on another machine, with a record of the node and what kubeadm keeps for every node:
  kubectl get configmap -n kube-system kubelet-config -o yaml > kubelet.yaml
  pcinuma doctor --host host.json --kubelet-config kubelet.yaml
"""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=PROGRAM, description=_TOP, formatter_class=raw)
    parser.add_argument("--debug", action="store_true", dest="_debug", help="show a traceback on an error")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, description=text, formatter_class=raw)
        made.set_defaults(run=run, name=name)
        made.add_argument("--debug", action="store_true", help="show a traceback on an error")
        return made

    transform = command("transform", _transform, "domain XML in, transformed domain XML out", _TRANSFORM)
    _add_inputs(transform)
    transform.add_argument("-q", dest="quiet", action="store_true", help="no warnings on standard error")
    transform.add_argument(
        "--format", choices=("xml", "diff"), default="xml", help="write the XML (default), or a diff"
    )
    explain = command("explain", _explain, "the tree before and after, where each device goes and why", _EXPLAIN)
    _add_inputs(explain)
    explain.add_argument("--svg", metavar="FILE", help="draw it, too: one picture, before, host and after")
    form = explain.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="write the report as JSON")
    form.add_argument("--ascii", action="store_true", help="draw the trees in ASCII")
    nccl_topo = command("nccl-topo", _nccl_topo, "NCCL topology file for the guest", _NCCL_TOPO)
    _add_inputs(nccl_topo, idle=dict.fromkeys(("distances", "gpudirect-clique"), "the file says nothing of it"))
    nccl_topo.add_argument("-q", dest="quiet", action="store_true", help="no warnings on standard error")
    check = command("check", _check, "audit a domain XML as it stands", _CHECK)
    _add_inputs(check, idle=dict.fromkeys(("distances", "gpudirect-clique"), "check judges the domain as it stands"))
    check.add_argument("--json", action="store_true", help="write the findings as JSON")
    doctor = command("doctor", _doctor, "is this node set up for aligned VMs?", _DOCTOR)
    add_host(doctor)
    doctor.add_argument(
        "--kubelet-config",
        metavar="FILE",
        help="the node's KubeletConfiguration, YAML or JSON, a dump of its configz, or kubeadm's ConfigMap;"
        " - is standard input",
    )
    doctor.add_argument(
        "--kubelet-config-dir",
        metavar="DIR",
        help="the kubelet's --config-dir: its files *.conf are laid over the configuration, as the kubelet does",
    )
    form = doctor.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="write node, findings and proposal as JSON")
    form.add_argument("-q", dest="quiet", action="store_true", help="write errors and warnings only")
    doctor.add_argument("-o", dest="output", metavar="FILE", help="where the result goes (default: standard output)")
    certs = command("certs", _certs, "keep the webhook's serving certificate", _CERTS)
    certs.add_argument("--namespace", metavar="NAME", help="of Secret and Service (default: the pod's own)")
    certs.add_argument("--secret", metavar="NAME", default="pcinuma-webhook-tls", help="(default: pcinuma-webhook-tls)")
    certs.add_argument("--service", metavar="NAME", default="pcinuma-webhook", help="(default: pcinuma-webhook)")
    certs.add_argument(
        "--webhook", metavar="NAME", default="pcinuma", help="the MutatingWebhookConfiguration (default: pcinuma)"
    )
    certs.add_argument("--days", metavar="N", type=int, default=90, help="how long a certificate lasts (default: 90)")
    certs.add_argument(
        "--renew-before", metavar="N", type=int, default=30, help="days before its end to renew it (default: 30)"
    )
    certs.add_argument("--api", metavar="URL", help="the API server (default: the pod's cluster)")
    certs.add_argument(
        "--service-account",
        metavar="DIR",
        default="/var/run/secrets/kubernetes.io/serviceaccount",
        help="folder with token, ca.crt and namespace (default: the pod's)",
    )
    snapshot = command("snapshot", _snapshot, "record this host's topology as one JSON file", _SNAPSHOT)
    hook = command("hook", _hook, "serve the KubeVirt hook sidecar on a unix socket", _HOOK)
    hook.add_argument("--socket", metavar="PATH", help="the socket (default: a new name in /var/run/kubevirt-hooks)")
    hook.add_argument("--plugin-socket", metavar="PATH", help="KubeVirt's plugin socket (default: none)")
    hook.add_argument("--version", dest="hook_version", metavar="v1alphaN", help="serve as this version only")
    hook.add_argument("--log-format", choices=("json", "text"), default="json", help="one line a call (default: json)")
    hook.add_argument("--log-level", choices=("info", "debug"), default="info", help="debug adds the domain XML")
    add_host(hook)
    add_options(hook)
    webhook = command("webhook", _webhook, "serve the mutating admission webhook over HTTPS", _WEBHOOK)
    webhook.add_argument("--listen", default="0.0.0.0:8443", metavar="HOST:PORT", help="default: 0.0.0.0:8443")
    webhook.add_argument("--tls-cert", required=True, metavar="FILE", help="the certificate and its chain, PEM")
    webhook.add_argument("--tls-key", required=True, metavar="FILE", help="the certificate's key, PEM, not encrypted")
    webhook.add_argument("--image", metavar="REF", help="the sidecar's image; its entrypoint is pcinuma")
    webhook.add_argument("--image-pull-policy", metavar="Always|IfNotPresent|Never", help="default: IfNotPresent")
    webhook.add_argument("--config", metavar="FILE", help="YAML: image, image-pull-policy, version, options")
    web = command("web", _web, "serve the debug page on loopback", _WEB)
    web.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="default: 127.0.0.1:8080")
    snapshot.add_argument("--sysfs", metavar="DIR", help="read a tree laid out like /sys instead of this machine")
    snapshot.add_argument("-o", dest="output", metavar="FILE", help="where the JSON goes (default: standard output)")
    return parser


def _add_inputs(parser: argparse.ArgumentParser, *, idle: Mapping[str, str] = {}) -> None:
    parser.add_argument(
        "domain", nargs="?", default="-", metavar="DOMAIN", help="domain XML; - (default): standard input"
    )
    parser.add_argument("--vmi", metavar="FILE", help="the VM or VMI, YAML or JSON; its annotations set the options")
    add_host(parser)
    add_options(parser, idle=idle)
    parser.add_argument("-o", dest="output", metavar="FILE", help="where the result goes (default: standard output)")
    parser.add_argument("--report", metavar="FILE", help="where the JSON report goes (default: nowhere)")
