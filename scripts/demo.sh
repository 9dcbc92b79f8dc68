#!/bin/sh
# The main job on a real example: a two-socket host with four GPUs, two NICs and a VF.
set -eu
cd "$(dirname "$0")/.."
example=examples/two-sockets
printf 'a VM with four GPUs, two NICs and a VF, as KubeVirt makes it (%s):\n\n' "$example/domain.xml"
.venv/bin/pcinuma explain "$example/domain.xml" --vmi "$example/vmi.yaml" --host "$example/host.json"
.venv/bin/pcinuma transform "$example/domain.xml" --vmi "$example/vmi.yaml" --host "$example/host.json" -o .demo.xml
trap 'rm -f .demo.xml' EXIT
printf '\nthe transformed domain, its PCI controllers:\n\n'
grep -A 3 '<controller type="pci"' .demo.xml | head -n 12
printf '   ...\n\nand its audit: '
.venv/bin/pcinuma check .demo.xml --host "$example/host.json"
