"""Measures the cost of LoRA adapters: the same requests with and without, in alternation.

The adapters have random weights for every linear layer of a block. Only a few folders are written;
many adapter names share each folder, but each is loaded and computed separately.
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
from windlass.lora.modules import linear_shapes
from windlass.models.hparams import HParams
from windlass.runner.device import whole_bytes
from windlass.tools.common.drive import EngineRun, run_all
from windlass.tools.common.price import price_of
from windlass.tools.common.record import Record
from windlass.tools.common.requests import Request
from windlass.tools.common.workload import Sizes, Workload, find

RANK = 16
_CONCURRENCY = 64
_REGISTERED = 200
_FOLDERS = 4
_TENANTS = 100
_ROUNDS = 4  # in the last workload, requests per concurrent request
_NOTES = (
    f"Rank {RANK} on all seven projections of every layer. 128 tokens in, 256 out (last row: 16 to "
    "64 in, 8 to 256 out). decode: tok/s while all requests decode. output: tok/s of the last row, "
    "whose adapters are all in host memory. The same engine runs the requests with and without "
    f"adapters in alternation; medians. {_TENANTS} tenants: shared is one engine with all adapters "
    "on the device, separate is one engine per tenant. Machines: from the weights and one request of "
    "full length per tenant, with as many engines per machine as its memory holds. Dollars: at a "
    "typical price of this machine."
)


def adapters(
    options: dict[str, Any],
    num_requests: int | None,
    repeat: int,
    log: Callable[[str], None],
    registered: int | None = None,
) -> Record:
    """Measure one request, a batch with an adapter each, and more adapters than the device holds."""
    concurrency = num_requests or _CONCURRENCY
    known = max(registered or _REGISTERED, concurrency)
    options = {**options, "enable_lora": True}
    opened = open_model(EngineConfig.of(**options))
    with tempfile.TemporaryDirectory(prefix="windlass-adapters-") as folder:
        paths = [_write(Path(folder) / str(i), opened.hparams, seed=i) for i in range(_FOLDERS)]
        names = [f"adapter-{i}" for i in range(known)]
        modules = tuple(f"{name}={paths[i % len(paths)]}" for i, name in enumerate(names))
        lora = {"max_loras": concurrency, "max_cpu_loras": known, "max_lora_rank": RANK}
        own = {**options, "max_num_seqs": concurrency, "lora_modules": modules}
        built = build_engine(EngineConfig.of(**own, **lora), opened.source)
        log(next(f"{c.value}; {c.reason}" for c in built.report.choices if c.what == "adapters"))
        run_all(built.engine, [Request([1, 2, 3, 4], 1, adapter=name) for name in names])
        log(f"{known} adapters are in host memory")
        tenancy = _tenancy(built, concurrency + 1)
        many = find("ragged", Sizes(num_requests=_ROUNDS * concurrency))
        workloads = [find(f"decode_b{count}") for count in sorted({1, concurrency})]
        rows = []
        for workload in [*workloads, many]:
            row = _compare(built, workload, names, repeat=repeat, decode=workload is not many)
            rows.append({**row, **tenancy})
            log(f"{row['workload']}: {row['ratio']} of the base's {row['base_tok_s']:,} tok/s")
    return Record("adapters", rows, _NOTES, settings=options)


def _compare(
    built: Built, workload: Workload, names: Sequence[str], *, repeat: int, decode: bool
) -> dict[str, Any]:
    """Run without and with adapters in alternation."""
    count, vocab_size = len(workload.shapes), built.report.vocab_size
    chosen = list(names)[:count] if decode else Random(0).choices(names, k=count)
    pairs: list[tuple[float, float]] = []
    for draw in range(repeat + 1):
        requests = workload.requests(vocab_size, draw)
        adapted = [
            replace(request, adapter=name) for request, name in zip(requests, chosen, strict=True)
        ]
        runs = (run_all(built.engine, each) for each in (requests, adapted))
        base, own = (_decode_speed(run) if decode else run.tok_s for run in runs)
        built.engine.reset_prefix_cache()
        pairs.append((base, own))
    base, own = (statistics.median(each) for each in zip(*pairs[1:], strict=True))
    return {
        "workload": workload.name if decode else f"{count} requests, {len(names)} registered",
        "adapters": len(set(chosen)),
        "figure": "decode" if decode else "output",
        "base_tok_s": round(base, 1),
        "adapters_tok_s": round(own, 1),
        "ratio": round(own / base, 3),
    }


def _tenancy(built: Built, num_slots: int) -> dict[str, Any]:
    """Memory, machines and cost of 100 tenants in one shared engine and in separate engines."""
    report, device = built.report, built.weights.parts.device
    base, adapter = report.memory["weights"], report.memory["adapters"] / num_slots
    capacity = report.capacity
    # KV cache of one request of full length, for which every tenant needs room.
    cache = capacity.layout.blocks_for(report.max_model_len) * capacity.bytes_per_block
    total = whole_bytes(device)
    shared = math.ceil((base + _TENANTS * (adapter + cache)) / total)
    separate = math.ceil(_TENANTS / max(1, total // (base + adapter + cache)))
    price = price_of(None, device.type).per_hour
    return {
        "adapter_mib": round(adapter / 2**20, 1),
        "together_gib": round((base + _TENANTS * adapter) / 2**30, 2),
        "apart_gib": round(_TENANTS * (base + adapter) / 2**30, 2),
        "machines_together": shared,
        "machines_apart": separate,
        "usd_hour_together": _usd_per_tenant(price, shared),
        "usd_hour_apart": _usd_per_tenant(price, separate),
    }


def _usd_per_tenant(price: float | None, machines: int) -> float | None:
    return None if price is None else round(price * machines / _TENANTS, 4)


def _decode_speed(run: EngineRun) -> float:
    assert run.window is not None  # all requests of these workloads decode together
    return run.window.tok_s


def _write(folder: Path, hparams: HParams, seed: int) -> Path:
    """Write a random adapter in PEFT's format, in bfloat16 as most adapters are stored."""
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
