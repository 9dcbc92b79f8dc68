"""What the command line takes: every command with its flags and its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from pcinuma import __version__
from pcinuma.edge import PROGRAM, Parser, add_host, add_options

Command = Callable[[argparse.Namespace], int]

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


def parser_of(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser; ``run`` of what it parses is the command's function, ``name`` its name."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=PROGRAM, description=_TOP, formatter_class=raw)
    parser.add_argument("--debug", action="store_true", dest="_debug", help="show a traceback on an error")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    named = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, summary: str, text: str) -> argparse.ArgumentParser:
        made = named.add_parser(name, help=summary, description=text, formatter_class=raw)
        made.set_defaults(run=commands[name], name=name)
        made.add_argument("--debug", action="store_true", help="show a traceback on an error")
        return made

    transform = command("transform", "domain XML in, transformed domain XML out", _TRANSFORM)
    _add_inputs(transform)
    transform.add_argument("-q", dest="quiet", action="store_true", help="no warnings on standard error")
    transform.add_argument(
        "--format", choices=("xml", "diff"), default="xml", help="write the XML (default), or a diff"
    )
    explain = command("explain", "the tree before and after, where each device goes and why", _EXPLAIN)
    _add_inputs(explain)
    explain.add_argument("--svg", metavar="FILE", help="draw it, too: one picture, before, host and after")
    form = explain.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="write the report as JSON")
    form.add_argument("--ascii", action="store_true", help="draw the trees in ASCII")
    nccl_topo = command("nccl-topo", "NCCL topology file for the guest", _NCCL_TOPO)
    _add_inputs(nccl_topo, idle=dict.fromkeys(("distances", "gpudirect-clique"), "the file says nothing of it"))
    nccl_topo.add_argument("-q", dest="quiet", action="store_true", help="no warnings on standard error")
    check = command("check", "audit a domain XML as it stands", _CHECK)
    _add_inputs(check, idle=dict.fromkeys(("distances", "gpudirect-clique"), "check judges the domain as it stands"))
    check.add_argument("--json", action="store_true", help="write the findings as JSON")
    doctor = command("doctor", "is this node set up for aligned VMs?", _DOCTOR)
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
    certs = command("certs", "keep the webhook's serving certificate", _CERTS)
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
    snapshot = command("snapshot", "record this host's topology as one JSON file", _SNAPSHOT)
    hook = command("hook", "serve the KubeVirt hook sidecar on a unix socket", _HOOK)
    hook.add_argument("--socket", metavar="PATH", help="the socket (default: a new name in /var/run/kubevirt-hooks)")
    hook.add_argument("--plugin-socket", metavar="PATH", help="KubeVirt's plugin socket (default: none)")
    hook.add_argument("--version", dest="hook_version", metavar="v1alphaN", help="serve as this version only")
    hook.add_argument("--log-format", choices=("json", "text"), default="json", help="one line a call (default: json)")
    hook.add_argument("--log-level", choices=("info", "debug"), default="info", help="debug adds the domain XML")
    add_host(hook)
    add_options(hook)
    webhook = command("webhook", "serve the mutating admission webhook over HTTPS", _WEBHOOK)
    webhook.add_argument("--listen", default="0.0.0.0:8443", metavar="HOST:PORT", help="default: 0.0.0.0:8443")
    webhook.add_argument("--tls-cert", required=True, metavar="FILE", help="the certificate and its chain, PEM")
    webhook.add_argument("--tls-key", required=True, metavar="FILE", help="the certificate's key, PEM, not encrypted")
    webhook.add_argument("--image", metavar="REF", help="the sidecar's image; its entrypoint is pcinuma")
    webhook.add_argument("--image-pull-policy", metavar="Always|IfNotPresent|Never", help="default: IfNotPresent")
    webhook.add_argument("--config", metavar="FILE", help="YAML: image, image-pull-policy, version, options")
    web = command("web", "serve the debug page on loopback", _WEB)
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
