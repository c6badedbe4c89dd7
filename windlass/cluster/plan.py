"""What a fleet would start: replicas, devices, memory, and dollars per hour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windlass.cluster.fleet import Fleet, Model
from windlass.cluster.quality import read_probes
from windlass.errors import ConfigError, EngineError
from windlass.lora.peft import CONFIG
from windlass.lora.peft_config import PeftConfig
from windlass.serve.keys_file import KeysFile
from windlass.tools.plan.formats import STORED
from windlass.tools.plan.select import select_quantization

_ANY_MEMORY = 2**60  # the plan says what is needed, not what fits
_ANY_BANDWIDTH = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """One model; bytes are those of one replica. Its fields are keys of `cluster plan --json`."""

    name: str
    model: str
    min_replicas: int
    max_replicas: int
    ranks: int
    cpus: float
    gpus: float
    concurrency: int
    context: int
    weight_bytes: int
    total_bytes: int  # with the KV cache of `concurrency` requests of `context` tokens
    min_per_hour: float
    max_per_hour: float


def check_files(fleet: Fleet) -> None:
    """Read the small files that a fleet names; raises an error with the file and the reason.

    Without this, the first to find a mistake in one would be a replica that starts.
    """
    if fleet.tenants is not None:
        KeysFile(fleet.tenants, fleet.serve_config(fleet.models[0])).read()
    for model in fleet.models:
        if model.rollout.quality is not None:
            read_probes(model.rollout.quality)
        for name, folder in model.adapters.items():
            try:
                PeftConfig.read(Path(folder) / CONFIG)
            except EngineError as error:
                raise ConfigError(f"model {model.name!r}: adapter {name!r}: {error}") from error


def plan_model(fleet: Fleet, model: Model, context: int | None = None) -> ModelPlan:
    """Read the model's headers and count; nothing is loaded or started."""
    engine = model.engine
    device: Literal["cpu", "cuda"] = "cuda" if model.gpus else "cpu"
    plan = select_quantization(
        model.model,
        memory=_ANY_MEMORY,
        bandwidth=_ANY_BANDWIDTH,
        context=context or engine.model.max_model_len,
        concurrency=engine.limits(device).max_num_seqs,
        kv_cache_dtype=engine.cache.kv_cache_dtype,
        formats=(engine.model.quantization or STORED,),
        device=device,
    )
    if not plan.candidates:
        reason = "; ".join(plan.refused.values())
        raise ConfigError(f"model {model.name!r} cannot be planned: {reason}")
    found, replicas = plan.candidates[0], model.replicas
    price = fleet.price_per_hour(model)
    return ModelPlan(
        name=model.name,
        model=plan.model,
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        ranks=model.num_ranks,
        cpus=model.cpus,
        gpus=model.gpus,
        concurrency=plan.concurrency,
        context=plan.context,
        weight_bytes=found.weight_bytes,
        total_bytes=found.total_bytes,
        min_per_hour=replicas.min * price,
        max_per_hour=replicas.max * price,
    )
