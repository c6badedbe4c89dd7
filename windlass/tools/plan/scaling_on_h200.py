"""The scaling model of H200 GPUs in one machine, the GPU whose kernels were measured."""

from __future__ import annotations

from pathlib import Path

from windlass.config import EngineConfig
from windlass.errors import ConfigError
from windlass.tools.common.price import gpu_price, price_of
from windlass.tools.plan.fabric import Fabric
from windlass.tools.plan.kernel_times import read_kernel_times
from windlass.tools.plan.scaling import Gpu, ScalingModel, ScalingPlan, ScalingQuery

NAME = "H200"
_MEMORY = 139 * 2**30


def plan_on_h200(
    config: EngineConfig,
    query: ScalingQuery,
    *,
    memory: int | None = None,
    link_bandwidth: float | None = None,
    price_per_hour: float | None = None,
    records: Path | None = None,
) -> ScalingPlan:
    """Compare layouts. `records`: a folder that may have measured kernels of divided weights."""
    if config.model.device == "cpu":
        raise ConfigError("--device cpu: only GPUs are planned together. Omit the flag.")
    if memory is not None and memory < 1:
        raise ConfigError(f"--memory must be above 0, got {memory}. Example: 139GiB.")
    if link_bandwidth is not None and link_bandwidth <= 0:
        raise ConfigError(
            f"--link-bandwidth must be above 0, got {link_bandwidth:g}. Example: 450GB/s."
        )
    gpu = Gpu(
        name=NAME,
        memory=_MEMORY if memory is None else memory,
        memory_source="what an H200 has free" if memory is None else "--memory",
        price=gpu_price(NAME) if price_per_hour is None else price_of(price_per_hour, "cuda"),
    )
    fabric = Fabric() if link_bandwidth is None else Fabric(bandwidth=link_bandwidth)
    times = read_kernel_times(records, NAME)
    return ScalingModel(config, gpu=gpu, times=times, fabric=fabric).plan(query)
