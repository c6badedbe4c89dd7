"""What adapters cost: requests with an adapter each, against the same requests without, in turns.

The adapters' weights are random and change every linear layer of a block. A few folders are
written; the many names that share them are read, held and computed each for itself.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from windlass.build import Built, build_engine, open_model
from windlass.config import EngineConfig
from windlass.core.card import EngineReport
from windlass.lora.peft import linear_shapes
from windlass.models.hparams import HParams
from windlass.runner.device import whole_bytes
from windlass.tools.common.drive import EngineRun, run_all
from windlass.tools.common.price import price_of
from windlass.tools.common.record import Record
from windlass.tools.common.requests import Request
from windlass.tools.common.workload import Sizes, Workload, find

RANK = 16
_AT_ONCE = 64
_REGISTERED = 200
_FOLDERS = 4
_TENANTS = 100
_ROUNDS = 4  # requests of the many, by how many run at once
_NOTES = (
    f"Rank {RANK} on all seven projections of every layer. 128 tokens in, 256 out (many: 16 to 64 "
    "in, 8 to 256 out); decode tok/s while all requests decode, output tok/s for the many, whose "
    "adapters are all in host memory. The same engine without adapters, in turns; medians. "
    f"{_TENANTS} tenants: in one engine with all adapters on the device, and in an engine for each; "
    "machines by these weights and a request of full length for each, as many engines on a machine as "
    "its memory holds; dollars at a usual price of this machine."
)


def adapters(
    options: dict[str, Any],
    num_requests: int | None,
    repeat: int,
    log: Callable[[str], None],
    registered: int | None = None,
) -> Record:
    """One request, many with as many adapters, and many more adapters than the device holds."""
    at_once, known = num_requests or _AT_ONCE, registered or _REGISTERED
    known = max(known, at_once)
    options = {**options, "enable_lora": True}
    opened = open_model(EngineConfig.of(**options))
    with tempfile.TemporaryDirectory(prefix="windlass-adapters-") as folder:
        places = [_write(Path(folder) / str(i), opened.hparams, seed=i) for i in range(_FOLDERS)]
        names = [f"adapter-{i}" for i in range(known)]
        modules = tuple(f"{name}={places[i % len(places)]}" for i, name in enumerate(names))
        room = {"max_loras": at_once, "max_cpu_loras": known, "max_lora_rank": RANK}
        own = {**options, "max_num_seqs": at_once, "lora_modules": modules}
        built = build_engine(EngineConfig.of(**own, **room), opened.source)
        log(next(f"{c.value}; {c.reason}" for c in built.report.choices if c.what == "adapters"))
        run_all(built.engine, [Request([1, 2, 3, 4], 1, adapter=name) for name in names])
        log(f"{known} adapters are in host memory")
        tenancy = _tenancy(built, at_once + 1)
        many = find("ragged", Sizes(num_requests=_ROUNDS * at_once))
        works = [(find(f"decode_b{count}"), names) for count in sorted({1, at_once})]
        rows = []
        for workload, group in [*works, (many, names)]:
            row = _compare(built, workload, group, repeat, decode=workload is not many)
            rows.append({**row, **tenancy})
            log(f"{row['workload']}: {row['ratio']} of the base's {row['base_tok_s']:,} tok/s")
    return Record("adapters", rows, _NOTES, settings=options)


def _compare(
    built: Built, workload: Workload, names: Sequence[str], repeat: int, decode: bool
) -> dict[str, Any]:
    """Runs without and with adapters, in turns."""
    num_jobs, vocab_size = len(workload.shapes), built.report.vocab_size
    chosen = list(names)[:num_jobs] if decode else Random(0).choices(names, k=num_jobs)
    pairs: list[tuple[float, float]] = []
    for draw in range(repeat + 1):
        requests = workload.requests(vocab_size, draw)
        adapted = [
            replace(request, adapter=name) for request, name in zip(requests, chosen, strict=True)
        ]
        base, own = (_speed(run_all(built.engine, each), decode) for each in (requests, adapted))
        built.engine.reset_prefix_cache()
        pairs.append((base, own))
    base, own = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
    return {
        "workload": workload.name if decode else f"{num_jobs} requests, {len(names)} registered",
        "adapters": len(set(chosen)),
        "figure": "decode" if decode else "output",
        "base_tok_s": round(base, 1),
        "adapters_tok_s": round(own, 1),
        "ratio": round(own / base, 3),
    }


def _tenancy(built: Built, num_slots: int) -> dict[str, Any]:
    """100 tenants in one engine and in one for each: weights, machines, dollars of each an hour."""
    report, device = built.report, built.weights.parts.device
    base, each = report.memory["weights"], report.memory["adapters"] / num_slots
    whole = whole_bytes(device)
    cache = _cache_of_one(report)
    together = math.ceil((base + _TENANTS * (each + cache)) / whole)
    apart = math.ceil(_TENANTS / max(1, whole // (base + each + cache)))
    price = price_of(None, device.type).per_hour
    return {
        "adapter_mib": round(each / 2**20, 1),
        "together_gib": round((base + _TENANTS * each) / 2**30, 2),
        "apart_gib": round(_TENANTS * (base + each) / 2**30, 2),
        "machines_together": together,
        "machines_apart": apart,
        "usd_hour_together": _share(price, together),
        "usd_hour_apart": _share(price, apart),
    }


def _cache_of_one(report: EngineReport) -> float:
    """Keys and values of a request of full length: what a tenant must have room for."""
    capacity = report.capacity
    return report.max_model_len / capacity.block_size * capacity.bytes_per_block


def _share(price: float | None, machines: int) -> float | None:
    """Dollars an hour of one tenant."""
    return None if price is None else round(price * machines / _TENANTS, 4)


def _speed(taken: EngineRun, decode: bool) -> float:
    if decode:
        assert taken.window is not None  # all requests of these workloads decode at once
        return taken.window.tok_s
    return taken.num_output / taken.duration


def _write(folder: Path, hparams: HParams, seed: int) -> Path:
    """A random adapter as PEFT writes it, in the type that most are stored in."""
    folder.mkdir()
    random = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, shape in linear_shapes(hparams).items() if name != "lm_head"}
    tensors = {}
    for name, (num_out, num_in) in shapes.items():
        for half, shape in (("A", (RANK, num_in)), ("B", (num_out, RANK))):
            values = torch.randn(shape, generator=random).mul_(0.02)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config["target_modules"] = sorted({name.rpartition(".")[2] for name in shapes})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
