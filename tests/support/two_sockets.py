"""``examples/two-sockets`` as it must come out, by hand: four devices on cell 0 and three on cell 1, in the host's order,
so 5 and 4 bus numbers that end at 255."""

from __future__ import annotations

from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "two-sockets"

# by alias, as domains.layout has them
CONTROLLERS: dict[str, tuple[object, ...]] = {
    "ua-pcinuma-cell0": (1, 247, 0),
    "ua-pcinuma-0000-1a-00-0": (2, "off", 1, 0, 0),
    "ua-pcinuma-0000-1c-00-0": (3, "off", 1, 1, 0),
    "ua-pcinuma-0000-3d-00-0": (4, "off", 1, 2, 0),
    "ua-pcinuma-0000-5e-02-1": (5, "off", 1, 3, 0),
    "ua-pcinuma-cell1": (6, 252, 1),
    "ua-pcinuma-0000-9a-00-0": (7, "off", 6, 0, 0),
    "ua-pcinuma-0000-9c-00-0": (8, "off", 6, 1, 0),
    "ua-pcinuma-0000-bd-00-0": (9, "off", 6, 2, 0),
}
DEVICES: dict[str, tuple[int, ...] | None] = {
    "ua-gpu-gpu0": (2, 0, 0),
    "ua-hostdevice-ib0": (3, 0, 0),
    "ua-gpu-gpu1": (4, 0, 0),
    "ua-sriov-storage": (5, 0, 0),
    "ua-gpu-gpu2": (7, 0, 0),
    "ua-hostdevice-ib1": (8, 0, 0),
    "ua-gpu-gpu3": (9, 0, 0),
}
# where the guest sees each: BDF and node
SEEN = {
    "ua-gpu-gpu0": ("0000:f8:00.0", 0),
    "ua-hostdevice-ib0": ("0000:f9:00.0", 0),
    "ua-gpu-gpu1": ("0000:fa:00.0", 0),
    "ua-sriov-storage": ("0000:fb:00.0", 0),
    "ua-gpu-gpu2": ("0000:fd:00.0", 1),
    "ua-hostdevice-ib1": ("0000:fe:00.0", 1),
    "ua-gpu-gpu3": ("0000:ff:00.0", 1),
}
