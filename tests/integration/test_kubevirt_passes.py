"""The stand-in for virt-launcher held against domains that the real one made, and against the drop table."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from lxml import etree

from tests.support import kubevirt, libvirt

SAMPLES = Path(__file__).resolve().parents[2] / "../shared/samples"

QEMU = ' xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0"'


@dataclass(frozen=True)
class Sample:
    """One VM of the samples: the path of its files without `.passN.xml`."""

    stem: str

    @property
    def version(self) -> str:
        return self.stem[1:4]

    @property
    def passes(self) -> list[str]:
        """What the hook was given, call after call."""
        files = [SAMPLES / f"{self.stem}.pass{number}.xml" for number in (1, 2, 3)]
        return [file.read_text() for file in files if file.exists()]


WITHOUT_SAMPLES = "no folder ../shared/samples beside the repo"


def samples(number: int = 1) -> list[object]:
    """The samples that have a pass of that number; one skipped parameter where there are none."""
    suffix = f".pass{number}.xml"
    files = sorted(SAMPLES.glob(f"v*/*{suffix}"))
    stems = [str(file.relative_to(SAMPLES)).removesuffix(suffix) for file in files]
    skipped = pytest.param(None, marks=pytest.mark.skip(reason=WITHOUT_SAMPLES))
    return [pytest.param(Sample(stem), id=stem) for stem in stems] or [skipped]


@pytest.fixture
def define() -> Callable[[str], str]:
    """A real libvirt's inactive dump of a domain; skips where there is none, or no emulator for the domain."""
    try:
        libvirt.ensure_libvirtd()
    except libvirt.LibvirtUnavailable as unavailable:
        pytest.skip(str(unavailable))

    def where_there_is_an_emulator(xml: str) -> str:
        arch = re.search(r'arch="(\w+)"', xml)
        if arch and shutil.which(f"qemu-system-{arch[1]}") is None:
            pytest.skip(f"no qemu-system-{arch[1]}, without which libvirt defines no such domain")
        return libvirt.define_and_dump(xml)

    return where_there_is_an_emulator


def identity(xml: str) -> str:
    return xml


# --- against the samples


@pytest.mark.parametrize("sample", samples())
def test_a_sample_comes_back_from_the_structs_as_it_is(sample: Sample) -> None:
    for given in sample.passes:
        assert kubevirt.through_structs(given, sample.version) == given.replace(QEMU, "")


@pytest.mark.libvirt
@pytest.mark.parametrize("sample", samples(2))
def test_pass_2_of_a_hook_that_changes_nothing(sample: Sample, define: Callable[[str], str]) -> None:
    pass1, expected = sample.passes[:2]
    assert kubevirt.pass2(pass1, pass1, define(pass1), sample.version) == expected


@pytest.mark.parametrize("sample", samples(3))
def test_pass_3_of_a_hook_that_changes_nothing(sample: Sample) -> None:
    _, pass2, expected = sample.passes
    ports = expected.count("<controller ") - pass2.count("<controller ")
    # Where KubeVirt found no index left for a port it wanted to append, it appended none.
    assert kubevirt.pass3(pass2, sample.version, ports or 4) == expected


@pytest.mark.libvirt
@pytest.mark.parametrize("sample", samples(2))
def test_a_whole_start_with_a_hook_that_changes_nothing(sample: Sample, define: Callable[[str], str]) -> None:
    count = None
    if len(sample.passes) == 3:
        count = sample.passes[2].count("<controller ") - sample.passes[1].count("<controller ") or 4
    elif sample.version == "1.9":
        count = 0  # a small VM, for which the placeholders are ports enough
    played = kubevirt.play(sample.passes[0], sample.version, identity, define, count=count)
    assert [one.given for one in played] == sample.passes
    assert [one.answer for one in played] == sample.passes


@pytest.mark.parametrize("sample", samples())
def test_placeholders_are_those_of_the_samples(sample: Sample) -> None:
    pass1 = sample.passes[0]
    interfaces = re.findall(r"\t\t<interface .*?\t\t</interface>\n", pass1, re.DOTALL)
    placeholders = [one for one in interfaces if 'dev="placeholder-' in one]
    bare = pass1
    for placeholder in placeholders:
        bare = bare.replace(placeholder, "")
    assert kubevirt.with_placeholders(bare, len(placeholders), sample.version) == pass1


# --- what drops


DOMAIN = """
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <!-- no comment survives -->
  <name>gpu_gpu4</name>
  <metadata>
    <kubevirt xmlns='http://kubevirt.io'><uid>5d30</uid></kubevirt>
    <own:note xmlns:own='https://pcinuma.example/1'>x</own:note>
  </metadata>
  <memory unit='KiB'>2097152</memory>
  <memtune><hard_limit unit='KiB'>4194304</hard_limit></memtune>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <cpu mode='host-passthrough'>
    <maxphysaddr mode='emulate' bits='46'/>
    <numa>
      <cell id='0' cpus='0-1' memory='2097152' unit='KiB'>
        <distances><sibling id='0' value='10'/></distances>
      </cell>
    </numa>
  </cpu>
  <devices>
    <controller type='pci' index='1' model='pcie-expander-bus'>
      <model name='pxb-pcie'/>
      <target busNr='247'><node>0</node></target>
      <alias name='ua-pcinuma-cell0'/>
      <address type='pci' domain='0x0000' bus='0x00' slot='0x03' function='0x0' multifunction='on'/>
    </controller>
    <controller type='pci' index='2' model='pcie-root-port'>
      <model name='pcie-root-port'/>
      <target chassis='2' port='0x0' hotplug='off'/>
      <alias name='ua-pcinuma-port0'/>
      <address type='pci' domain='0x0000' bus='0x01' slot='0x00' function='0x0'/>
    </controller>
    <controller type='pci' index='0' model='pcie-root'><pcihole64 unit='KiB'>0</pcihole64></controller>
    <hostdev mode='subsystem' type='pci' managed='no'>
      <driver name='vfio' iommufd='yes'/>
      <source><address domain='0x0000' bus='0x41' slot='0x00' function='0x0'/></source>
      <alias name='ua-gpu-gpu0'/>
      <rom bar='off'/>
      <teaming type='transient' persistent='ua-net0'/>
      <acpi nodeset='1-8'/>
      <address type='pci' domain='0x0000' bus='0x02' slot='0x00' function='0x0' multifunction='on'/>
    </hostdev>
    <hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci'>
      <source><address uuid='b155147a-663a-4009-ae7f-e9a96805b3ce'/></source>
      <alias name='ua-gpu-vgpu0'/>
    </hostdev>
    <iommu model='smmuv3'><driver pciBus='1' accel='on'/></iommu>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
  </devices>
  <qemu:commandline><qemu:arg value='-foo'/></qemu:commandline>
  <qemu:override><qemu:device alias='ua-gpu-gpu0'/></qemu:override>
</domain>
"""

EVERY_VERSION = pytest.mark.parametrize("version", kubevirt.VERSIONS)


def block(xml: str, start: str, nth: int = 1) -> str:
    """The nth element of that start tag's beginning as it is written, without its indentation."""
    lines = xml.splitlines()
    first = [number for number, line in enumerate(lines) if line.strip().startswith(f"<{start}")][nth - 1]
    if f"</{start}>" in lines[first]:
        return lines[first].strip()
    indent = lines[first].removesuffix(lines[first].lstrip())
    last = lines.index(f"{indent}</{start}>", first)
    return "\n".join(line.removeprefix(indent) for line in lines[first : last + 1])


# An expander: type, index, model, alias and address in every version; the target from 1.8 on.
BARE_EXPANDER = """\
<controller type="pci" index="1" model="pcie-expander-bus">
	<alias name="ua-pcinuma-cell0"></alias>
	<address type="pci" domain="0x0000" bus="0x00" slot="0x03" function="0x0"></address>
</controller>"""

WHOLE_EXPANDER = """\
<controller type="pci" index="1" model="pcie-expander-bus">
	<alias name="ua-pcinuma-cell0"></alias>
	<address type="pci" domain="0x0000" bus="0x00" slot="0x03" function="0x0"></address>
	<target busNr="247">
		<node>0</node>
	</target>
</controller>"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.4", BARE_EXPANDER),
        ("1.6", BARE_EXPANDER),
        ("1.7", BARE_EXPANDER),
        ("1.8", WHOLE_EXPANDER),
        ("1.9", WHOLE_EXPANDER),
    ],
)
def test_an_expander(version: str, expected: str) -> None:
    assert block(kubevirt.through_structs(DOMAIN, version), "controller") == expected


# A root port keeps neither chassis, port nor hotplug; from 1.8 on the empty target remains of them.
BARE_PORT = """\
<controller type="pci" index="2" model="pcie-root-port">
	<alias name="ua-pcinuma-port0"></alias>
	<address type="pci" domain="0x0000" bus="0x01" slot="0x00" function="0x0"></address>
</controller>"""

PORT_WITH_EMPTY_TARGET = """\
<controller type="pci" index="2" model="pcie-root-port">
	<alias name="ua-pcinuma-port0"></alias>
	<address type="pci" domain="0x0000" bus="0x01" slot="0x00" function="0x0"></address>
	<target></target>
</controller>"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.4", BARE_PORT),
        ("1.6", BARE_PORT),
        ("1.7", BARE_PORT),
        ("1.8", PORT_WITH_EMPTY_TARGET),
        ("1.9", PORT_WITH_EMPTY_TARGET),
    ],
)
def test_a_root_port(version: str, expected: str) -> None:
    assert block(kubevirt.through_structs(DOMAIN, version), "controller", 2) == expected


BARE_ROOT = '<controller type="pci" index="0" model="pcie-root"></controller>'

ROOT_WITH_HOLE = """\
<controller type="pci" index="0" model="pcie-root">
	<pcihole64 unit="KiB">0</pcihole64>
</controller>"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.4", BARE_ROOT),
        ("1.6", ROOT_WITH_HOLE),
        ("1.7", ROOT_WITH_HOLE),
        ("1.8", ROOT_WITH_HOLE),
        ("1.9", ROOT_WITH_HOLE),
    ],
)
def test_the_64_bit_hole(version: str, expected: str) -> None:
    assert block(kubevirt.through_structs(DOMAIN, version), "controller", 3) == expected


HOSTDEV_WITH_EMPTY_TYPE = """\
<hostdev type="pci" managed="no" mode="subsystem">
	<source>
		<address type="" domain="0x0000" bus="0x41" slot="0x00" function="0x0"></address>
	</source>
	<address type="pci" domain="0x0000" bus="0x02" slot="0x00" function="0x0"></address>
	<alias name="ua-gpu-gpu0"></alias>
</hostdev>"""

HOSTDEV_WITHOUT_TYPE = HOSTDEV_WITH_EMPTY_TYPE.replace(' type=""', "")

HOSTDEV_WITH_DRIVER_AND_ACPI = """\
<hostdev type="pci" managed="no" mode="subsystem">
	<source>
		<address domain="0x0000" bus="0x41" slot="0x00" function="0x0"></address>
	</source>
	<address type="pci" domain="0x0000" bus="0x02" slot="0x00" function="0x0"></address>
	<alias name="ua-gpu-gpu0"></alias>
	<driver iommufd="yes"></driver>
	<acpi nodeset="1-8"></acpi>
</hostdev>"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.4", HOSTDEV_WITH_EMPTY_TYPE),
        ("1.6", HOSTDEV_WITH_EMPTY_TYPE),
        ("1.7", HOSTDEV_WITH_EMPTY_TYPE),
        ("1.8", HOSTDEV_WITHOUT_TYPE),
        ("1.9", HOSTDEV_WITH_DRIVER_AND_ACPI),
    ],
)
def test_a_hostdev(version: str, expected: str) -> None:
    assert block(kubevirt.through_structs(DOMAIN, version), "hostdev") == expected


@pytest.mark.parametrize(
    ("version", "written"),
    [
        ("1.4", '<address type="" bus="" uuid="b155147a-663a-4009-ae7f-e9a96805b3ce"></address>'),
        ("1.6", '<address type="" bus="" uuid="b155147a-663a-4009-ae7f-e9a96805b3ce"></address>'),
        ("1.7", '<address type="" bus="" uuid="b155147a-663a-4009-ae7f-e9a96805b3ce"></address>'),
        ("1.8", '<address uuid="b155147a-663a-4009-ae7f-e9a96805b3ce"></address>'),
        ("1.9", '<address uuid="b155147a-663a-4009-ae7f-e9a96805b3ce"></address>'),
    ],
)
def test_the_source_of_a_mediated_device(version: str, written: str) -> None:
    assert written in block(kubevirt.through_structs(DOMAIN, version), "hostdev", 2)


@EVERY_VERSION
@pytest.mark.parametrize(
    "dropped",
    [
        *("multifunction", "<model name", "<rom", "<teaming", "name=", "bar=", "memtune", "hard_limit"),
        *("pcinuma.example", "qemu:", "-foo", "override", "maxphysaddr", "chassis", "port=", "hotplug"),
        *("<!--", "'", "/>"),
    ],
)
def test_dropped_by_every_version(version: str, dropped: str) -> None:
    assert dropped in DOMAIN
    # Names remain in two places only, those of aliases.
    assert dropped not in kubevirt.through_structs(DOMAIN, version).replace("<alias name=", "")


@pytest.mark.parametrize("dropped", ["iommu", "<distances", "nodeset", "<driver"])
def test_dropped_by_all_before_1_9(dropped: str) -> None:
    for version in ("1.4", "1.6", "1.7", "1.8"):
        assert dropped not in kubevirt.through_structs(DOMAIN, version)
    assert dropped in kubevirt.through_structs(DOMAIN, "1.9")


@EVERY_VERSION
def test_kubevirts_own_metadata_survives_all_else_there_drops(version: str) -> None:
    assert block(kubevirt.through_structs(DOMAIN, version), "metadata") == (
        '<metadata>\n\t<kubevirt xmlns="http://kubevirt.io">\n\t\t<uid>5d30</uid>\n\t</kubevirt>\n</metadata>'
    )


@EVERY_VERSION
def test_devices_are_grouped_by_kind_in_the_order_of_the_structs(version: str) -> None:
    devices = etree.fromstring(kubevirt.through_structs(DOMAIN, version)).find("devices")
    assert devices is not None
    kinds = ["emulator", "hostdev", "hostdev", "controller", "controller", "controller"]
    assert [device.tag for device in devices] == ([*kinds, "iommu"] if version == "1.9" else kinds)


@EVERY_VERSION
def test_a_second_time_changes_nothing(version: str) -> None:
    once = kubevirt.through_structs(DOMAIN, version)
    assert kubevirt.through_structs(once, version) == once


@EVERY_VERSION
def test_of_a_domain_with_nothing_in_it_remains_what_go_always_writes(version: str) -> None:
    assert kubevirt.through_structs("<domain/>", version) == (
        '<domain type="">\n\t<name></name>\n\t<memory unit="">0</memory>\n\t<os>\n\t\t<type></type>\n\t</os>\n'
        '\t<devices></devices>\n\t<metadata>\n\t\t<kubevirt xmlns="http://kubevirt.io">\n\t\t\t<uid></uid>\n'
        "\t\t</kubevirt>\n\t</metadata>\n\t<cpu></cpu>\n</domain>"
    )


def test_another_metadata_called_kubevirt_is_not_kubevirts() -> None:
    domain = "<domain><metadata><kubevirt xmlns='urn:other'><uid>7</uid></kubevirt></metadata></domain>"
    assert "<uid></uid>" in kubevirt.through_structs(domain, "1.9")


def test_of_two_elements_in_one_field_the_last_attribute_wins() -> None:
    domain = "<domain><vcpu placement='auto'>1</vcpu><vcpu placement='static'>2</vcpu></domain>"
    assert '\t<vcpu placement="static">2</vcpu>\n' in kubevirt.through_structs(domain, "1.9")


def test_quotes_and_newlines_are_written_as_go_does() -> None:
    domain = '<domain type="a\'&quot;&amp;&lt;&#10;"><name>x &gt; y\nz</name></domain>'
    written = kubevirt.through_structs(domain, "1.9")
    assert '<domain type="a&#39;&#34;&amp;&lt;&#xA;">\n\t<name>x &gt; y&#xA;z</name>' in written


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "not XML"),
        ("<domain><name>x</domain>", "not XML"),
        ("<vm></vm>", "expected element type <domain>"),
        ('<?xml version="1.0" encoding="latin-1"?><domain></domain>', "encoding 'latin-1'"),
    ],
)
@EVERY_VERSION
def test_go_cannot_parse(answer: str, message: str, version: str) -> None:
    with pytest.raises(kubevirt.GoParseError, match=message):
        kubevirt.through_structs(answer, version)


def test_utf_8_may_be_declared() -> None:
    assert kubevirt.through_structs('<?xml version="1.0" encoding="UTF-8"?><domain></domain>', "1.7")


def test_bus_numbers_are_decimal_where_the_structs_have_them() -> None:
    hexadecimal = DOMAIN.replace("busNr='247'", "busNr='0xf7'")
    kubevirt.through_structs(hexadecimal, "1.7")
    for version in ("1.8", "1.9"):
        with pytest.raises(kubevirt.GoParseError, match=r"busNr: .*0xf7"):
            kubevirt.through_structs(hexadecimal, version)


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no such version: 1\.5"):
        kubevirt.through_structs(DOMAIN, "1.5")


# --- the passes, libvirt played by hand


PASS1 = f"""\
<domain type="kvm"{QEMU}>
	<name>gpu_gpu4</name>
	<memory unit="b">1073741824</memory>
	<os>
		<type arch="x86_64" machine="q35">hvm</type>
	</os>
	<devices>
		<interface type="ethernet">
			<source></source>
			<target dev="tap0" managed="no"></target>
			<model type="virtio-transitional"></model>
		</interface>
		<memballoon model="none"></memballoon>
	</devices>
	<qemu:commandline>
		<qemu:arg value="-foo"></qemu:arg>
	</qemu:commandline>
	<metadata>
		<kubevirt xmlns="http://kubevirt.io">
			<uid></uid>
		</kubevirt>
	</metadata>
	<cpu></cpu>
	<vcpu placement="static">2</vcpu>
</domain>"""


def dump_with_ports(*indexes: int) -> Callable[[str], str]:
    """A libvirt that adds an address to every interface and the root ports of these indexes."""
    ports = "".join(f"<controller type='pci' index='{index}' model='pcie-root-port'/>" for index in indexes)

    def define(xml: str) -> str:
        addressed = xml.replace("</source>", "</source><address type='pci' bus='0x01'/>")
        return addressed.replace("</devices>", f"{ports}</devices>")

    return define


@pytest.mark.parametrize(("version", "calls"), [("1.4", 2), ("1.6", 2), ("1.7", 2), ("1.8", 3), ("1.9", 3)])
def test_calls_per_start(version: str, calls: int) -> None:
    pass1 = kubevirt.with_placeholders(PASS1, 3, version)
    assert len(kubevirt.play(pass1, version, identity, dump_with_ports(1))) == calls


@pytest.mark.parametrize(("version", "calls"), [("1.4", 1), ("1.6", 1), ("1.7", 1), ("1.8", 2), ("1.9", 2)])
def test_calls_without_placeholders(version: str, calls: int) -> None:
    assert len(kubevirt.play(PASS1, version, identity, dump_with_ports(1))) == calls


def test_calls_of_a_patch_release_of_1_7() -> None:
    pass1 = kubevirt.with_placeholders(PASS1, 3, "1.7")
    assert len(kubevirt.play(pass1, "1.7", identity, dump_with_ports(1), count=4)) == 3


@EVERY_VERSION
def test_one_call_on_the_root_complex(version: str) -> None:
    balloon = '<memballoon model="none"><address type="pci" bus="0x00"></address></memballoon>'
    placed = PASS1.replace('<memballoon model="none"></memballoon>', balloon)
    assert len(kubevirt.play(placed, version, identity, dump_with_ports(1))) == 1


@EVERY_VERSION
def test_one_call_for_i440fx_without_placeholders(version: str) -> None:
    assert len(kubevirt.play(PASS1.replace("q35", "pc"), version, identity, dump_with_ports())) == 1


PLACEHOLDER = """\
<interface type="ethernet">
	<source></source>
	<target dev="placeholder-0" managed="no"></target>
	<model type="virtio-transitional"></model>
</interface>"""

PLACEHOLDER_WITH_ALIAS = PLACEHOLDER.replace("</model>\n", '</model>\n\t<alias name="placeholder-0"></alias>\n')


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.4", PLACEHOLDER),
        ("1.6", PLACEHOLDER),
        ("1.7", PLACEHOLDER),
        ("1.8", PLACEHOLDER_WITH_ALIAS),
        ("1.9", PLACEHOLDER_WITH_ALIAS),
    ],
)
def test_a_placeholder(version: str, expected: str) -> None:
    with_two = kubevirt.with_placeholders(PASS1, 2, version)
    assert block(with_two, "interface") == block(PASS1, "interface")
    assert block(with_two, "interface", 2) == expected
    assert block(with_two, "interface", 3) == expected.replace("-0", "-1")


@EVERY_VERSION
def test_placeholders_and_what_libvirt_added_to_interfaces_are_gone_on_pass_2(version: str) -> None:
    pass1 = kubevirt.with_placeholders(PASS1, 2, version)
    assert pass1.count("<interface ") == 3
    given = kubevirt.play(pass1, version, identity, dump_with_ports(1))[1].given
    assert given.count("<interface ") == 1
    assert block(given, "interface") == block(PASS1, "interface")
    assert '<controller type="pci" index="1" model="pcie-root-port"></controller>' in given


def test_only_the_devices_of_pass_1s_answer_reach_pass_2() -> None:
    def hook(xml: str) -> str:
        return xml.replace("<cpu></cpu>", '<cpu mode="maximum"></cpu>').replace('"-foo"', '"-bar"')

    pass1 = kubevirt.with_placeholders(PASS1, 1)
    passes = kubevirt.play(pass1, "1.9", hook, dump_with_ports(1), count=1)
    assert "<cpu></cpu>" in passes[1].given
    assert '<qemu:arg value="-foo"></qemu:arg>' in passes[1].given
    # Pass 3 does start from an answer, as far as the structs hold it.
    assert '<cpu mode="maximum"></cpu>' in passes[2].given
    assert "qemu:" not in passes[2].given


def test_an_answer_go_cannot_parse_is_neither_defined_nor_asked_for_again() -> None:
    done: list[str] = []

    def hook(xml: str) -> str:
        done.append("called")
        return ""

    def define(xml: str) -> str:
        done.append("defined")
        return xml

    with pytest.raises(kubevirt.GoParseError):
        kubevirt.play(kubevirt.with_placeholders(PASS1, 1), "1.9", hook, define)
    assert done == ["called"]


@pytest.mark.parametrize(
    ("highest", "count", "appended"),
    [(7, 4, [8, 9, 10, 11]), (29, 4, [30, 31]), (31, 4, []), (40, 4, []), (7, 0, [])],
)
def test_pass_3_appends_ports_but_none_above_31(highest: int, count: int, appended: list[int]) -> None:
    pass2 = dump_with_ports(2, highest, 1)(PASS1)
    given = kubevirt.pass3(pass2, "1.9", count)
    indexes = re.findall(r'<controller type="pci" index="(\d+)" model="pcie-root-port"></controller>', given)
    assert [int(index) for index in indexes] == [2, highest, 1, *appended]


# --- the passes with a hook that places a device, libvirt real


EXPANDER = """\
		<controller type="pci" index="1" model="pcie-expander-bus">
			<target busNr="240">
				<node>1</node>
			</target>
			<alias name="ua-pcinuma-cell1"></alias>
		</controller>
		<controller type="pci" index="2" model="pcie-root-port">
			<target hotplug="off"></target>
			<alias name="ua-pcinuma-port0"></alias>
			<address type="pci" bus="0x01" slot="0x00" function="0x0"></address>
		</controller>
"""

GUEST_ADDRESS = '<address type="pci" bus="0x02" slot="0x00" function="0x0"></address>'


def placing_once(xml: str) -> str:
    """Puts the first hostdev behind an expander, unless there is an expander already."""
    if "pcie-expander-bus" in xml:
        return xml
    placed = re.sub(r"\t\t\t<alias name=\"ua-hostdevice-", rf"\t\t\t{GUEST_ADDRESS}\n\g<0>", xml, count=1)
    return placed.replace("\t\t<video>", f"{EXPANDER}\t\t<video>", 1)


@pytest.mark.libvirt
@pytest.mark.skipif(not SAMPLES.is_dir(), reason=WITHOUT_SAMPLES)
@EVERY_VERSION
def test_what_later_passes_see_of_an_expander(version: str, define: Callable[[str], str]) -> None:
    sample = Sample("v1.9.0/2n-4gpu-2nic-1sriov.pcinuma-false")
    passes = kubevirt.play(sample.passes[0], version, placing_once, define)
    for later in passes[1:]:
        domain = etree.fromstring(later.given)
        expander = domain.find("devices/controller[@model='pcie-expander-bus']")
        port = domain.find("devices/controller[@index='2']")
        hostdev = domain.find("devices/hostdev")
        assert expander is not None
        assert port is not None
        assert hostdev is not None
        assert expander.find("alias[@name='ua-pcinuma-cell1']") is not None
        assert expander.find("address[@bus='0x00']") is not None
        assert port.find("alias[@name='ua-pcinuma-port0']") is not None
        assert port.find("target[@hotplug]") is None
        assert hostdev.find("address[@bus='0x02']") is not None
        if version in ("1.8", "1.9"):
            assert expander.find("target[@busNr='240']/node") is not None
        else:
            assert expander.find("target") is None
    # The hook above took the crippled expander for finished. libvirt then defines one without a node.
    last = etree.fromstring(passes[-1].defined).find("devices/controller[@model='pcie-expander-bus']/target")
    assert last is not None
    assert (last.find("node") is not None) == (version in ("1.8", "1.9"))
