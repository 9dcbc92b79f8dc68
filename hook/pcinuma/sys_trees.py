"""Where the host is read: thin reads of this machine, through udev, or of a tree laid out like ``/sys``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Protocol

from pcinuma.errors import HostUnreadable
from pcinuma.model import PciAddress

_MAX_READ = 65536
_CPUINFO_READ = 4096  # the first CPU says what all do, and the kernel makes the text as it is read
BDF_NAME = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\Z")
ROOT_NAME = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}\Z")
_VHOST_NAME = re.compile(r"vhost-vdpa-[0-9]{1,9}\Z")


class SysTree(Protocol):
    """The few reads that discovery makes; ``path`` is what :meth:`function_path` and the others returned."""

    def function_path(self, address: PciAddress) -> str | None: ...
    def mdev_path(self, uuid: str) -> str | None: ...
    def vdpa_paths(self) -> Mapping[str, str]: ...
    def node_paths(self) -> Mapping[int, str]: ...
    def cpu_path(self) -> str | None: ...
    def all_functions(self) -> Iterable[PciAddress]: ...
    def all_mdevs(self) -> Iterable[str]: ...
    def cpuinfo(self) -> str | None: ...
    def attribute(self, path: str, name: str) -> str | None: ...
    def link(self, path: str, name: str) -> str | None: ...


class RecordedTree:
    """A directory laid out like ``/sys``: ``bus/pci/devices``, ``bus/mdev/devices``, ``devices/system/node``."""

    def __init__(self, directory: str):
        if not os.path.isdir(directory):
            raise HostUnreadable("no such directory", where=directory, hint="--sysfs takes a tree laid out like /sys")
        self._root = os.path.realpath(directory)
        if not any(
            os.path.isdir(os.path.join(directory, *part)) for part in (("bus", "pci"), ("devices", "system", "node"))
        ):
            inside = os.path.join(directory, "sys")
            hint = f"give {inside}" if os.path.isdir(inside) else "--sysfs takes a tree laid out like /sys"
            raise HostUnreadable(
                "not a /sys tree: it has neither bus/pci nor devices/system/node", where=directory, hint=hint
            )

    def function_path(self, address: PciAddress) -> str | None:
        return self._resolve("bus", "pci", "devices", str(address)) or self._unlinked.get(str(address))

    def mdev_path(self, uuid: str) -> str | None:
        return self._resolve("bus", "mdev", "devices", uuid)

    def vdpa_paths(self) -> Mapping[str, str]:
        names = _listed(os.path.join(self._root, "bus", "vdpa", "devices"))
        return _vhost_paths(self._resolve("bus", "vdpa", "devices", name) for name in names)

    def node_paths(self) -> Mapping[int, str]:
        base = self._resolve("devices", "system", "node") or ""
        numbers = (re.fullmatch(r"node([0-9]{1,4})", name) for name in _listed(base))
        return {int(match[1]): os.path.join(base, match[0]) for match in numbers if match}

    def cpu_path(self) -> str | None:
        return self._resolve("devices", "system", "cpu")

    def all_functions(self) -> Iterable[PciAddress]:
        names = {*_listed(os.path.join(self._root, "bus", "pci", "devices")), *self._unlinked}
        return [PciAddress.parse(name) for name in sorted(names) if BDF_NAME.match(name)]

    @cached_property
    def _unlinked(self) -> dict[str, str]:
        """Every function's folder below ``devices/pci*``: a gathered tree may lack the link from ``bus/pci``."""
        base = os.path.join(self._root, "devices")
        roots = [os.path.join(base, name) for name in _listed(base) if ROOT_NAME.match(name)]
        found: dict[str, str] = {}
        while roots:
            folder = roots.pop()
            for name in _listed(folder):
                path = os.path.join(folder, name)
                if (BDF_NAME.match(name) or ROOT_NAME.match(name)) and os.path.isdir(path) and not os.path.islink(path):
                    found[name] = path
                    roots.append(path)
        return found

    def all_mdevs(self) -> Iterable[str]:
        return _listed(os.path.join(self._root, "bus", "mdev", "devices"))

    def cpuinfo(self) -> str | None:
        """Of the ``/proc`` that was recorded beside the tree, as hwloc-gather-topology does."""
        return _read(os.path.join(os.path.dirname(self._root), "proc", "cpuinfo"), _CPUINFO_READ)

    def attribute(self, path: str, name: str) -> str | None:
        return _read(os.path.join(path, name))

    def link(self, path: str, name: str) -> str | None:
        return _link_name(path, name)

    def _resolve(self, *parts: str) -> str | None:
        """The real path of a folder of the tree; beyond the tree is this machine, not what was recorded."""
        path = os.path.join(self._root, *parts)
        try:
            folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            real = os.readlink(f"/proc/self/fd/{folder}")  # what realpath finds by looking at every part of the path
        except OSError:
            real = os.path.realpath(path)
        finally:
            os.close(folder)
        return real if real.startswith(self._root + os.sep) else None


class LiveTree:
    """This machine through libudev."""

    def __init__(self) -> None:
        import pyudev  # costs 20 ms of CPU: loaded only for a live host

        self._devices = pyudev.Devices
        self._not_found: type[Exception] = pyudev.DeviceNotFoundError
        try:
            self._context = pyudev.Context()
        except (ImportError, OSError):  # pyudev looks for the library only now
            raise HostUnreadable(
                "libudev is not installed", hint="install it (Debian: libudev1), or give --sysfs /sys"
            ) from None
        self._known: dict[str, pyudev.Device] = {}

    def function_path(self, address: PciAddress) -> str | None:
        return self._find("pci", str(address))

    def mdev_path(self, uuid: str) -> str | None:
        return self._find("mdev", uuid)

    def vdpa_paths(self) -> Mapping[str, str]:
        return _vhost_paths(str(device.sys_path) for device in self._context.list_devices(subsystem="vdpa"))

    def node_paths(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        for device in self._context.list_devices(subsystem="node"):
            if match := re.fullmatch(r"node([0-9]{1,4})", device.sys_name):
                self._known[device.sys_path] = device
                found[int(match[1])] = device.sys_path
        return found

    def cpu_path(self) -> str | None:
        try:
            device = self._devices.from_path(self._context, "/sys/devices/system/cpu")
        except self._not_found:
            return None
        self._known[device.sys_path] = device
        return str(device.sys_path)

    def all_functions(self) -> Iterable[PciAddress]:
        names = (device.sys_name for device in self._context.list_devices(subsystem="pci"))
        return [PciAddress.parse(name) for name in names if BDF_NAME.match(name)]

    def all_mdevs(self) -> Iterable[str]:
        return [device.sys_name for device in self._context.list_devices(subsystem="mdev")]

    def cpuinfo(self) -> str | None:
        return _read("/proc/cpuinfo", _CPUINFO_READ)

    def attribute(self, path: str, name: str) -> str | None:
        value = self._known[path].attributes.get(name)
        return None if value is None else value.decode("utf-8", "replace").strip()

    def link(self, path: str, name: str) -> str | None:
        return _link_name(path, name)  # libudev resolves no links but driver, subsystem and module

    def _find(self, subsystem: str, name: str) -> str | None:
        try:
            device = self._devices.from_name(self._context, subsystem, name)
        except self._not_found:
            return None
        self._known[device.sys_path] = device
        return str(device.sys_path)


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _vhost_paths(vdpa_devices: Iterable[str | None]) -> dict[str, str]:
    """The path of each vDPA device by the name of its character device, a folder inside it (linux vhost/vdpa.c)."""
    return {name: path for path in vdpa_devices if path for name in _listed(path) if _VHOST_NAME.match(name)}


def _read(path: str, limit: int = _MAX_READ) -> str | None:
    try:
        # an attribute is never a link: one in a recorded tree leads to this machine, which was not recorded
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return os.read(file, limit).decode("utf-8", "replace").strip()
    except OSError:
        return None
    finally:
        os.close(file)


def _link_name(path: str, name: str) -> str | None:
    try:
        return os.path.basename(os.readlink(os.path.join(path, name)))
    except OSError:
        return None
