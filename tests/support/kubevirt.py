"""Plays KubeVirt's virt-launcher: what it gives a hook, call after call, during one VM start.

Between two calls KubeVirt holds the domain in Go structs. Parsing into them drops whatever the structs
have no field for, and marshalling them again is the only form a hook ever sees. Both are done here from a
table of the structs' fields, so that a domain loses in a test what it loses in a cluster.

Source of the table: KubeVirt's `pkg/virt-launcher/virtwrap/api/schema.go`, held against domains that
KubeVirt v1.7.0 and v1.9.0 made. What drops of PCI controllers, hostdevs and cells is established for every
version. Not established: the exact release that brought fields no passthrough VM needs (panic, tlbflush,
on_reboot …), and where 1.9 writes iommu and a hostdev's driver and acpi among their siblings. Source of the
order of calls: `virtwrap/manager.go`, `network/nichotplug.go`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from lxml import etree

VERSIONS = ("1.4", "1.6", "1.7", "1.8", "1.9")

QEMU_NAMESPACE = "http://libvirt.org/schemas/domain/qemu/1.0"

# KubeVirt appends no root port above this index: bus 0 has that many slots.
HIGHEST_PORT_INDEX = 31


class GoParseError(ValueError):
    """virt-launcher cannot parse the domain: the VM does not start."""


@dataclass(frozen=True)
class Pass:
    """One call of the hook: what it was given, what it answered, what libvirt made of the answer."""

    given: str
    answer: str
    defined: str


# One line a struct, its fields in struct order, which is the order they are written in.
#   @name   attribute         =      text of the element         name   element        a/b  b inside a
#   %name   element qemu:name, which Go writes but never finds again: it looks for a colon in a local name
#   :Type   a struct below, or uint, int, bool; without it a string
#   ?       left out when empty, zero or false      *  left out when absent      []  any number
#   (nothing of these: written even when absent)
#   {1.8-}  from this version on      {-1.7}  up to this version
_STRUCTS = """
Domain            @type name uuid? memory:Memory currentMemory:Memory* maxMemory:MaxMemory*
                  memoryBacking:MemoryBacking* os:OS sysinfo:SysInfo* devices:Devices clock:Clock*
                  resource:Resource* %commandline:Commandline* metadata:Metadata features:Features* cpu:CPU
                  vcpu:VCPU* vcpus:VCPUs* cputune:CPUTune* numatune:NUMATune* iothreads:IOThreads*
                  launchSecurity:LaunchSecurity* on_reboot?{1.8-} iommufd:IOMMUFD*{1.9-}

Memory            =:uint @unit
MaxMemory         =:uint @unit @slots:uint
MemoryBacking     hugepages:HugePages* source:TypeOnly* access:ModeOnly* allocation:ModeOnly*
                  nosharepages:Empty*
HugePages         page:HugePage[]
HugePage          @size @unit @nodeset
OS                type:OSType acpi:OSACPI* smbios:ModeOnly* boot:Boot[] bootmenu:BootMenu* bios:BIOS*
                  loader:Loader* nvram:NVRam* kernel? initrd? cmdline?
OSType            = @arch? @machine?
OSACPI            table:ACPITable[]
ACPITable         = @type?
Boot              @dev
BootMenu          @enable @timeout:uint*
BIOS              @useserial?
Loader            @readonly? @secure? @type? =
NVRam             @template? =
SysInfo           @type system/entry:Entry[] bios/entry:Entry[] baseBoard/entry:Entry[]
                  chassis/entry:Entry[]
Entry             @name =
Clock             @offset? @timezone? @adjustment? timer:Timer[]
Timer             @name @tickpolicy? @present? @track? @frequency?
Resource          partition
Commandline       %env:Env[] %arg:Arg[]
Env               @name @value
Arg               @value
Metadata          kubevirt:KubeVirt
KubeVirt          uid graceperiod:GracePeriod* migration:Migration* backup:Backup*{1.8-}
                  accessCredential:AccessCredential* memoryDump:MemoryDump*
GracePeriod       deletionGracePeriodSeconds:int deletionTimestamp* markedForGracefulShutdown:bool*
Migration         uid? startTimestamp* endTimestamp* completed:bool?{-1.4} failed:bool? failureReason?
                  abortStatus? mode?
Backup            name? mode? skipQuiesce:bool? startTimestamp* endTimestamp* completed:bool? failed:bool?
                  backupMsg? checkpointName? volumes?
AccessCredential  succeeded:bool? message?
MemoryDump        fileName? startTimestamp* endTimestamp* completed:bool? failed:bool? failureReason?
Features          acpi:Empty* apic:Empty* hyperv:Hyperv* smm:Empty* kvm:KVM* pvspinlock:State* pmu:State*
                  vmport:State*
Hyperv            @mode? relaxed:State* vapic:State* spinlocks:Spinlocks* vpindex:State* runtime:State*
                  synic:State* stimer:SyNICTimer* reset:State* vendor_id:VendorID* frequencies:State*
                  reenlightenment:State* tlbflush:TLBFlush* ipi:State* evmcs:State*
Spinlocks         @state? @retries:uint*
SyNICTimer        direct:State* @state?
VendorID          @state? @value?
TLBFlush          direct:State*{1.8-} extended:State*{1.8-} @state?
KVM               hidden:State* hint-dedicated:State*
CPU               @mode? model? feature:CPUFeature[] topology:CPUTopology* numa:NUMA*
CPUFeature        @name @policy?
CPUTopology       @sockets:uint? @cores:uint? @threads:uint?
NUMA              cell:Cell[]
Cell              @id @cpus{-1.8} @cpus?{1.9-} @memory:uint?{-1.8} @memory:uint*{1.9-} @unit? @memAccess?
                  distances:Distances*{1.9-}
Distances         sibling:Sibling[]
Sibling           @id @value:uint
VCPU              @placement =:uint
VCPUs             vcpu:OneVCPU[]
OneVCPU           @id:uint @enabled? @hotpluggable? @order:uint?
CPUTune           vcpupin:VCPUPin[] iothreadpin:IOThreadPin[] emulatorpin:EmulatorPin*
VCPUPin           @vcpu:uint @cpuset
IOThreadPin       @iothread:uint @cpuset
EmulatorPin       @cpuset
NUMATune          memory:NUMAMemory memnode:MemNode[]
NUMAMemory        @mode @nodeset
MemNode           @cellid:uint @mode @nodeset
IOThreads         =:uint
LaunchSecurity    @type dhCert? session? cbitpos? reducedPhysBits? policy? quoteGenerationService:QGS*{1.8-}
QGS               @path?
IOMMUFD           @enabled @fdgroup?

Devices           emulator? interface:Interface[] channel:Channel[] hostdev:HostDevice[] panic:Panic[]{1.6-}
                  controller:Controller[] video:Video[] graphics:Graphics[] memballoon:Balloon* disk:Disk[]
                  input:Input[] serial:Serial[] console:Console[] watchdog:Watchdog[] rng:Rng*
                  filesystem:Filesystem[] redirdev:Redirdev[] sound:Sound[] tpm:TPM[] vsock:VSOCK*
                  memory:MemoryDevice* iommu:IOMMU[]{1.9-}

Address           @type{-1.7} @type?{1.8-} @domain? @bus{-1.7} @bus?{1.8-} @slot? @function? @controller?
                  @target? @unit? @uuid? @device? @cssid?{1.6-} @ssid?{1.6-} @devno?{1.6-}
Alias             @name
BootOrder         @order:uint
Interface         address:Address* @type @trustGuestRxFilters? source:InterfaceSource
                  target:InterfaceTarget* model:TypeOnly* mac:MAC* mtu:MTU* bandwidth:Empty* boot:BootOrder*
                  link:LinkState* filterref:FilterRef* alias:Alias* driver:InterfaceDriver* rom:Rom*
                  acpi:ACPIIndex* backend:InterfaceBackend* portForward:PortForward[]
InterfaceSource   @network? @dev? @bridge? @mode? address:Address*
InterfaceTarget   @dev @managed?
MAC               @address
MTU               @size
LinkState         @state
FilterRef         @filter
InterfaceDriver   @name @queues:uint* @iommu?
Rom               @enabled
ACPIIndex         @index:uint
InterfaceBackend  @type? @logFile?
PortForward       @proto @address? @dev? range:PortRange[]
PortRange         @start:uint @end:uint? @to:uint? @exclude?
Channel           @type source:ChannelSource* target:ChannelTarget*
ChannelSource     @mode @path
ChannelTarget     @name? @type @address? @port:uint? @state?
HostDevice        source:HostSource @type boot:BootOrder* @managed? @mode? @model? address:Address*
                  alias:Alias* @display? @ramfb? driver:HostDriver*{1.9-} acpi:HostACPI*{1.9-}
HostSource        address:Address*
HostDriver        @iommufd?
HostACPI          @nodeset?
Panic             @model*
Controller        @type @index @model? driver:ControllerDriver* alias:Alias* address:Address*
                  pcihole64:PCIHole64*{1.6-} target:ControllerTarget*{1.8-}
ControllerDriver  @iothread:uint* @queues:uint* @iommu?
PCIHole64         =:uint @unit?
ControllerTarget  @busNr:uint* node:uint*
Video             model:VideoModel
VideoModel        @type @heads:uint* @ram:uint* @vram:uint* @vgamem:uint*
Graphics          @autoport? @defaultMode? listen:Listen* @passwdValidTo? @port:int? @tlsPort:int? @type
Listen            @type @address? @socket?
Balloon           @model stats:Stats* address:Address* driver:IOMMUOnly* @freePageReporting?
Stats             @period:uint
Disk              @device @snapshot? @type source:DiskSource target:DiskTarget serial? driver:DiskDriver*
                  readonly:Empty* auth:DiskAuth* alias:Alias* backingStore:BackingStore* boot:BootOrder*
                  address:Address* @model? blockio:BlockIO* filesystemOverhead* capacity:int*
                  expandDisksEnabled:bool?{-1.7} shareable:Empty*
DiskSource        @dev? @file? @startupPolicy? @protocol? @name? host:DiskHost* reservations:Reservations*
                  slices:Slices[] dataStore:BackingStore*{1.6-}
DiskTarget        @bus? @dev? @tray?
DiskDriver        @cache? @error_policy? @io? @name @type @iothread:uint* iothreads:DiskIOThreads*
                  @queues:uint* @discard? @iommu?
DiskIOThreads     iothread:DiskIOThread[]
DiskIOThread      @id:uint
DiskAuth          @username secret:DiskSecret*
DiskSecret        @type @usage? @uuid?
DiskHost          @name @port?
Reservations      @managed? source:ReservationSource*
ReservationSource @type @path? @mode?
Slices            slice:Slice
Slice             @type @offset:int @size:int
BackingStore      @type? format:TypeOnly* source:DiskSource*
BlockIO           @logical_block_size:uint? @physical_block_size:uint? @discard_granularity:uint*{1.6-}
Input             @type @bus alias:Alias* address:Address* @model?
Serial            @type target:SerialTarget* source:ModePath* alias:Alias* log:SerialLog*
SerialTarget      @port:uint*
SerialLog         @file? @append?
Console           @type target:ConsoleTarget* source:ModePath* alias:Alias*
ConsoleTarget     @type* @port:uint*
Watchdog          @model @action alias:Alias* address:Address*
Rng               @model backend:RngBackend* address:Address* driver:IOMMUOnly*
RngBackend        @model =
Filesystem        @type @accessMode source:FSSource* target:FSTarget* driver:FSDriver* binary:FSBinary*
FSSource          @dir @socket?
FSTarget          @dir?
FSDriver          @type @queue?
FSBinary          @path? @xattr? cache:FSCache* lock:FSLock*
FSCache           @mode?
FSLock            @posix? @flock?
Redirdev          @type @bus source:RedirSource
RedirSource       @mode @path
Sound             alias:Alias* @model
TPM               @model backend:TPMBackend
TPMBackend        @type @version @persistent_state?
VSOCK             @model? cid:CID
CID               @auto @address:uint?
MemoryDevice      @model target:MemoryTarget* alias:Alias* address:Address*
MemoryTarget      size:Memory requested:Memory current:Memory node block:Memory address:MemoryBase*
MemoryBase        @base
IOMMU             @model driver:IOMMUDriver*
IOMMUDriver       @pciBus? @accel? @ats? @ril? @ssidSize? @oas?

Empty
State             @state?
TypeOnly          @type
ModeOnly          @mode
ModePath          @mode? @path?
IOMMUOnly         @iommu?
"""

_FIELD = re.compile(
    r"(?P<place>[@=%]?)(?:(?P<wrapper>\w+)/)?(?P<name>[\w-]*)(?::(?P<type>\w+))?(?P<keep>\?|\*|\[\])?"
    r"(?:\{(?P<first>[\d.]*)-(?P<last>[\d.]*)\})?"
)

# Go matches names whatever their namespace, except where the struct names one.
_NAMESPACES = {"kubevirt": "http://kubevirt.io"}

_ZERO = {"string": "", "uint": "0", "int": "0", "bool": "false"}


@dataclass(frozen=True)
class _Field:
    place: str
    wrapper: str | None
    name: str
    type: str
    keep: str | None


def through_structs(xml: str, version: str) -> str:
    """The domain after Go parsed it into that version's structs and marshalled them again.

    Raises GoParseError where Go's parser fails, which ends the start of the VM: no XML, an encoding other
    than UTF-8, a number that is not decimal in a numeric field (`busNr="0xf7"`, from 1.8 on).
    """
    return _Structs(version).written(_parsed(xml))


def pass2(pass1_answer: str, pass1_input: str, libvirt_dump: str, version: str) -> str:
    """What the hook is given on pass 2.

    Only `<devices>` come from libvirt's inactive dump of pass 1's answer, and of these not the interfaces.
    All else, `qemu:commandline` included, is the domain as it was before pass 1, because KubeVirt called the
    hook on a copy: what the hook changed there on pass 1 is gone. The answer is parsed all the same, and one
    that Go cannot parse ends the start.
    """
    through_structs(pass1_answer, version)
    given = _parsed(pass1_input)
    interfaces = [one for one in given.findall("devices/interface") if not _is_placeholder(one)]
    devices = _section(_parsed(libvirt_dump), "devices")
    for interface in devices.findall("interface"):
        devices.remove(interface)
    devices.extend(interfaces)
    given.replace(_section(given, "devices"), devices)
    return _Structs(version, parsed=False).written(given)


def pass3(pass2_answer: str, version: str, count: int = 4) -> str:
    """What the hook is given on pass 3: pass 2's answer parsed, and up to `count` empty root ports more.

    libvirt is not asked in between, so nothing it added when it defined that answer is there.
    """
    root = _parsed(pass2_answer)
    indexes = [one.get("index", "") for one in root.findall("devices/controller[@type='pci']")]
    following = max((int(index) for index in indexes if re.fullmatch(r"[+-]?\d+", index)), default=0) + 1
    for index in range(following, min(following + count, HIGHEST_PORT_INDEX + 1)):
        port = {"type": "pci", "index": str(index), "model": "pcie-root-port"}
        etree.SubElement(_section(root, "devices"), "controller", port)
    return _Structs(version).written(root)


def play(
    pass1: str,
    version: str,
    hook: Callable[[str], str],
    define: Callable[[str], str],
    *,
    count: int | None = None,
) -> list[Pass]:
    """Calls `hook` as often as that version does for the domain `pass1`, and defines each answer.

    `define` takes a domain and returns libvirt's inactive dump of it. `count` is the number of empty root
    ports of pass 3, 0 for no pass 3; unless given it is what the version does: 4 from 1.8 on (KubeVirt takes
    0 to 16, by memory and devices), none before. The patch releases 1.6.4 and 1.7.2 do as 1.8 does: give the
    count for them. A domain without placeholders gets no pass 2; that is one with four NICs and more, which
    from 1.8 on goes from pass 1's answer to pass 3 with nothing from libvirt in it. i440fx and
    `kubevirt.io/placePCIDevicesOnRootComplex` get no pass 3.
    """
    root = _parsed(pass1)
    passes: list[Pass] = []

    def call(given: str) -> None:
        answer = hook(given)
        through_structs(answer, version)
        passes.append(Pass(given, answer, define(answer)))

    call(pass1)
    if any(_is_placeholder(interface) for interface in root.findall("devices/interface")):
        call(pass2(passes[0].answer, pass1, passes[0].defined, version))
    ports = count if count is not None else (4 if _at_least(version, "1.8") else 0)
    if ports and _takes_empty_ports(root):
        call(pass3(passes[-1].answer, version, ports))
    return passes


def with_placeholders(pass1: str, count: int, version: str = "1.9") -> str:
    """The domain of pass 1 with `count` placeholder interfaces after its last interface.

    From 1.8 on they carry an alias. The whole is written as that version writes it, without what its structs
    have no field for: KubeVirt could not have made that.
    """
    root = _parsed(pass1)
    models = root.findall("devices/interface/model")
    model_type = models[-1].get("type", "") if models else "virtio-non-transitional"
    for number in range(count):
        name = f"placeholder-{number}"
        placeholder = etree.SubElement(_section(root, "devices"), "interface", {"type": "ethernet"})
        etree.SubElement(placeholder, "target", {"dev": name, "managed": "no"})
        etree.SubElement(placeholder, "model", {"type": model_type})
        if _at_least(version, "1.8"):
            etree.SubElement(placeholder, "alias", {"name": name})
    return _Structs(version, parsed=False).written(root)


def _at_least(version: str, other: str) -> bool:
    return VERSIONS.index(version) >= VERSIONS.index(other)


def _is_placeholder(interface: etree._Element) -> bool:
    return any(target.get("dev", "").startswith("placeholder-") for target in interface.findall("target"))


def _takes_empty_ports(root: etree._Element) -> bool:
    machine = root.find("os/type")
    if machine is not None and not re.search("q35|virt", machine.get("machine", "")):
        return False
    # On the root complex KubeVirt addresses every device itself, the balloon too; elsewhere never that.
    return root.find("devices/memballoon/address") is None


def _section(root: etree._Element, name: str) -> etree._Element:
    section = root.find(name)
    return etree.SubElement(root, name) if section is None else section


def _parsed(xml: str) -> etree._Element:
    declared = re.match(r"\s*<\?xml[^>]*encoding\s*=\s*[\"']([^\"']*)", xml)
    if declared and declared[1].lower() != "utf-8":
        raise GoParseError(f"xml: encoding {declared[1]!r} declared but Decoder.CharsetReader is nil")
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    try:
        root = etree.fromstring(xml.encode(), parser)
    except etree.XMLSyntaxError as error:
        raise GoParseError(f"not XML: {error}") from error
    if _local(root.tag) != "domain":
        raise GoParseError(f"expected element type <domain> but have <{_local(root.tag)}>")
    return root


def _local(name: str) -> str:
    return name.rpartition("}")[2]


@cache
def _table() -> dict[str, list[re.Match[str]]]:
    table: dict[str, list[re.Match[str]]] = {}
    for line in _STRUCTS.splitlines():
        words = line.split()
        if words and not line[0].isspace():
            fields = table[words.pop(0)] = []
        for word in words:
            match = _FIELD.fullmatch(word)
            if match is None:
                raise ValueError(f"no field of a struct: {word}")
            fields.append(match)
    return table


@dataclass(frozen=True)
class _Structs:
    """The structs of one version; `parsed` if Go filled them from XML, else KubeVirt itself built them."""

    version: str
    parsed: bool = True

    def written(self, root: etree._Element) -> str:
        if self.version not in VERSIONS:
            raise ValueError(f"no such version: {self.version}; known: {', '.join(VERSIONS)}")
        lines = self._value("Domain", "domain", [root], 0)
        # Another name with a colon that Go writes and does not find again.
        if not self.parsed and QEMU_NAMESPACE in root.nsmap.values():
            lines[0] = f'{lines[0].removesuffix(">")} xmlns:qemu="{QEMU_NAMESPACE}">'
        return "\n".join(lines)

    def _value(self, struct: str, tag: str, elements: list[etree._Element], depth: int) -> list[str]:
        """The lines of one value; several elements parsed into one field are merged, the last one winning."""
        attributes = f' xmlns="{_NAMESPACES[tag]}"' if tag in _NAMESPACES else ""
        text = ""
        inside: list[str] = []
        for field in _fields(struct, self.version):
            if field.place == "@":
                value = _kept(field, [one for element in elements for one in _attribute(element, field.name)])
                if value is not None:
                    attributes += f' {field.name}="{_escaped(value)}"'
            elif field.place == "=":
                text = _escaped(_kept(field, [_text(element) for element in elements]) or "")
            elif field.place == "%":
                found = [] if self.parsed else _children(elements, field.name, QEMU_NAMESPACE)
                inside += self._elements(field, f"qemu:{field.name}", found, depth + 1)
            elif field.wrapper:
                wrapped = _children(_children(elements, field.wrapper), field.name)
                entries = self._elements(field, field.name, wrapped, depth + 2)
                inside += _enclosed(field.wrapper, "", "", entries, depth + 1)
            else:
                found = _children(elements, field.name, _NAMESPACES.get(field.name))
                inside += self._elements(field, field.name, found, depth + 1)
        return _enclosed(tag, attributes, text, inside, depth)

    def _elements(self, field: _Field, tag: str, found: list[etree._Element], depth: int) -> list[str]:
        if field.type in _ZERO:
            value = _kept(field, [_text(element) for element in found])
            return [] if value is None else _enclosed(tag, "", _escaped(value), [], depth)
        if field.keep == "[]":
            return [line for element in found for line in self._value(field.type, tag, [element], depth)]
        if field.keep == "*" and not found:
            return []
        return self._value(field.type, tag, found, depth)


@cache
def _fields(struct: str, version: str) -> tuple[_Field, ...]:
    """The fields that struct has in that version, in their order."""
    return tuple(
        _Field(field["place"], field["wrapper"], field["name"], field["type"] or "string", field["keep"])
        for field in _table()[struct]
        if _at_least(version, field["first"] or VERSIONS[0]) and _at_least(field["last"] or VERSIONS[-1], version)
    )


def _attribute(element: etree._Element, name: str) -> list[str]:
    return [str(value) for key, value in element.attrib.items() if _local(str(key)) == name]


def _enclosed(tag: str, attributes: str, text: str, inside: list[str], depth: int) -> list[str]:
    tabs = "\t" * depth
    if inside:
        return [f"{tabs}<{tag}{attributes}>{text}", *inside, f"{tabs}</{tag}>"]
    return [f"{tabs}<{tag}{attributes}>{text}</{tag}>"]


def _children(elements: Iterable[etree._Element], name: str, namespace: str | None = None) -> list[etree._Element]:
    return [
        child
        for element in elements
        for child in element
        if isinstance(child.tag, str)
        and _local(child.tag) == name
        and (namespace is None or child.tag == f"{{{namespace}}}{name}")
    ]


def _text(element: etree._Element) -> str:
    """Its own text without that of its children, which Go parses into the children."""
    return (element.text or "") + "".join(child.tail or "" for child in element)


def _kept(field: _Field, found: list[str]) -> str | None:
    """The value as Go writes it, None if it is left out."""
    values = [_canonical(field, one) for one in found]
    if field.keep == "*" and not values:
        return None
    value = values[-1] if values else _ZERO[field.type]
    return None if field.keep == "?" and value == _ZERO[field.type] else value


def _canonical(field: _Field, value: str) -> str:
    if field.type == "string":
        return value
    stripped = value.strip()
    if not value:
        return _ZERO[field.type]
    if field.type == "bool":
        if stripped not in ("1", "t", "T", "true", "TRUE", "True", "0", "f", "F", "false", "FALSE", "False"):
            raise GoParseError(f"{field.name}: strconv.ParseBool: parsing {stripped!r}: invalid syntax")
        return "true" if stripped[0] in "1tT" else "false"
    # Go reads base 10 whatever the number looks like: 0x1f is an error, 010 is ten. libvirt reads as C does.
    if not re.fullmatch(r"[0-9]+" if field.type == "uint" else r"[+-]?[0-9]+", stripped):
        raise GoParseError(f"{field.name}: strconv.Parse{field.type.title()}: parsing {stripped!r}: invalid syntax")
    return str(int(stripped))


_ESCAPES = str.maketrans(
    {
        "&": "&amp;",
        "<": "&lt;",
        ">": "&gt;",
        '"': "&#34;",
        "'": "&#39;",
        "\t": "&#x9;",
        "\n": "&#xA;",
        "\r": "&#xD;",
    }
)


def _escaped(value: str) -> str:
    return value.translate(_ESCAPES)
