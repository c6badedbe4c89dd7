"""What is known of the device without importing torch."""

from __future__ import annotations

from pathlib import Path

from windlass.errors import ConfigError
from windlass.machine.topology import process_topology

_NVIDIA = Path("/dev/nvidiactl")  # exists where the driver is loaded


def runs_on_cpu(device: str) -> bool:
    """Whether an engine with this --device will run on a CPU."""
    return device == "cpu" or (device == "auto" and not _NVIDIA.exists())


def check_cpu_replicas(num_replicas: int) -> None:
    """Refuse more replicas than CPUs."""
    cpus = process_topology().num_usable_cpus
    if num_replicas > cpus:
        raise ConfigError(
            f"--data-parallel-size {num_replicas}: a replica needs at least one CPU, and {cpus} are "
            f"allowed. Use at most {cpus} replicas."
        )
