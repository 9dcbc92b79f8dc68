"""pcinuma: guest NUMA placement for the passthrough PCI devices of KubeVirt VMs."""

__version__ = "0.1.0"
