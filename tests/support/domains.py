"""Small domains as KubeVirt writes them, built from what a test is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lxml import etree


def hostdev(bdf: str, alias: str, address: str = "") -> str:
    """A passthrough function; ``address`` is a whole ``<address>`` element or nothing."""
    domain, bus, rest = bdf.split(":")
    slot, function = rest.split(".")
    return (
        '<hostdev type="pci" managed="no">\n\t\t\t<source>\n\t\t\t\t'
        f'<address type="pci" domain="0x{domain}" bus="0x{bus}" slot="0x{slot}" function="0x{function}"></address>\n'
        f'\t\t\t</source>\n\t\t\t{address}<alias name="{alias}"></alias>\n\t\t</hostdev>'
    )


def domain(
    cells: Mapping[int, int | None],
    devices: Sequence[str],
    *,
    machine: str = "q35",
    arch: str = "x86_64",
    extra: str = "",
) -> str:
    """A domain with these cells (the host node of each, None for no memnode), two vCPUs a cell, and these devices."""
    numbered = list(enumerate(cells.items()))
    cell_lines = "".join(
        f'\t\t\t<cell id="{cell}" cpus="{2 * n},{2 * n + 1}" memory="1073741824" unit="b"></cell>\n'
        for n, (cell, _) in numbered
    )
    memnodes = "".join(
        f'\t\t<memnode cellid="{cell}" mode="strict" nodeset="{node}"></memnode>\n'
        for _, (cell, node) in numbered
        if node is not None
    )
    if memnodes:
        nodeset = ",".join(str(node) for node in cells.values() if node is not None)
        memnodes = f'\t\t<memory mode="strict" nodeset="{nodeset}"></memory>\n{memnodes}'
    listed = "".join(f"\t\t{device}\n" for device in devices)
    return (
        '<domain type="kvm">\n\t<name>ns_vm</name>\n'
        f'\t<memory unit="b">{1073741824 * len(cells)}</memory>\n'
        f'\t<os>\n\t\t<type arch="{arch}" machine="{machine}">hvm</type>\n\t</os>\n\t<devices>\n{listed}'
        '\t\t<controller type="usb" index="0" model="none"></controller>\n'
        '\t\t<controller type="scsi" index="0" model="virtio-non-transitional"></controller>\n'
        '\t\t<memballoon model="virtio-non-transitional"></memballoon>\n'
        f'\t\t<rng model="virtio-non-transitional"><backend model="random">/dev/urandom</backend></rng>\n{extra}'
        "\t</devices>\n\t<features>\n\t\t<acpi></acpi>\n\t</features>\n"
        f"\t<cpu>\n\t\t<numa>\n{cell_lines}\t\t</numa>\n\t</cpu>\n"
        f'\t<vcpu placement="static">{2 * len(cells)}</vcpu>\n'
        f"\t<numatune>\n{memnodes}\t</numatune>\n</domain>\n"
    )


def layout(xml: str | bytes) -> tuple[dict[str, tuple[object, ...]], dict[str, tuple[int, ...] | None]]:
    """Our controllers by alias, an expander as (index, busNr, cell), a port as (index, hotplug, bus, slot, function), a
    switch's upstream port as (index, bus, slot, function); the passthrough devices' guest addresses by alias as (bus,
    slot, function), None without one."""
    root = etree.fromstring(xml.encode() if isinstance(xml, str) else xml)
    controllers: dict[str, tuple[object, ...]] = {}
    devices: dict[str, tuple[int, ...] | None] = {}
    for element in root.iterfind("devices/*"):
        alias, address = element.find("alias"), element.find("address")
        name = alias.get("name", "") if alias is not None else ""
        parts = ("bus", "slot", "function")
        at = tuple(int(address.get(part, "0"), 0) for part in parts) if address is not None else None
        if element.tag == "hostdev":
            devices[name] = at
        elif element.tag == "controller" and name.startswith("ua-pcinuma-"):
            index, target = int(element.get("index", "-1")), element.find("target")
            if element.get("model") == "pcie-switch-upstream-port":
                controllers[name] = (index, *(at or ()))
                continue
            assert target is not None, name
            if element.get("model") == "pcie-expander-bus":
                controllers[name] = (index, int(target.get("busNr", "-1")), int(target.findtext("node", "-1")))
            else:
                controllers[name] = (index, target.get("hotplug"), *(at or ()))
    return controllers, devices
