"""Sets up LoRA serving: the device's slots, the host store, and the start-up table's line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from windlass.config import EngineConfig
from windlass.core.card import Choice
from windlass.errors import ConfigError, UnsupportedError
from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.lora import Lora
from windlass.layers.linear import Linear
from windlass.lora.bank import Bank, slot_bytes, slot_dtype
from windlass.lora.locate import locate
from windlass.lora.packing import compiled_code
from windlass.lora.store import AdapterStore
from windlass.lora_config import LoraConfig
from windlass.models.hparams import HParams
from windlass.models.network import Network, Parts

_MAX_TUNED_ROWS = 64  # row counts up to this one get a measured choice of GEMM


@dataclass(frozen=True, slots=True)
class AdapterSetup:
    """The device's slots and the store of adapters in host memory."""

    bank: Bank
    store: AdapterStore
    choice: Choice


def open_adapters(
    config: EngineConfig,
    hparams: HParams,
    *,
    network: Network,
    parts: Parts,
    gemm: TorchGemm,
    free: int,
) -> AdapterSetup:
    """Allocate the slots and check the adapters that the config names, without reading weights.

    `free` is the number of bytes available for the slots.
    """
    if hparams.transformers is not None:
        raise UnsupportedError(
            f"--enable-lora: {hparams.architecture} runs through transformers' code, whose layers take "
            "no adapters. Merge the adapter into the model's weights, and serve the result."
        )
    lora = config.lora
    _check_memory(lora, network, slot_dtype(parts, lora.lora_dtype), free)
    bank = Bank(
        network,
        hparams,
        parts,
        num_slots=lora.max_loras,
        max_rank=lora.max_lora_rank,
        dtype=lora.lora_dtype,
    )
    _tune(bank, network, gemm)
    store = AdapterStore(
        hparams,
        max_rank=lora.max_lora_rank,
        max_host=lora.max_host,
        pack=bank.pack,
        on_many_hosts=config.parallel.role != "both",
    )
    for name, location in lora.modules().items():
        folder = locate(location, config.model)
        store.check_folder(folder)
        store.register(name, folder)
    per_slot = bank.num_bytes / (lora.max_loras + 1) / 2**20
    choice = Choice(
        "adapters",
        f"{len(store.names)} named, {lora.max_loras} on the device, {lora.max_host} in memory",
        f"{per_slot:.1f} MiB per slot, for ranks up to {lora.max_lora_rank}"
        + (" in int8" if lora.lora_dtype == "int8" else "")
        + ("" if compiled_code() else "; no compiler: reading an adapter is several times slower"),
    )
    return AdapterSetup(bank, store, choice)


def _check_memory(lora: LoraConfig, network: Network, dtype: torch.dtype, free: int) -> None:
    """Raise if the slots do not fit: the system's OOM killer would give no reason."""
    need = (lora.max_loras + 1) * slot_bytes(network, lora.max_lora_rank, dtype)
    if need > free:
        advice = "" if lora.lora_dtype == "int8" else ", or set --lora-dtype int8"
        raise ConfigError(
            f"--max-loras {lora.max_loras} with --max-lora-rank {lora.max_lora_rank} takes "
            f"{need / 2**30:,.1f} GiB, but {free / 2**30:,.1f} GiB are free. Lower one of "
            f"them{advice}."
        )


def _tune(bank: Bank, network: Network, gemm: TorchGemm) -> None:
    """Choose GEMM kernels by their time together with the LoRA kernels."""
    weights = []
    for layer in network.modules():
        if isinstance(layer, Linear) and layer.lora is not None and layer.weight is not None:
            weight = layer.weight.data
            slots = torch.arange(_MAX_TUNED_ROWS, dtype=torch.int32, device=weight.device)
            weights.append(
                (weight, partial(_run_with_lora, layer.lora, slots % bank.num_slots + 1))
            )
    with bank.all_slots_full():
        gemm.tune_overlapped(weights)


def _run_with_lora(lora: Lora, slots: Tensor, x: Tensor, gemm: Callable[[], Tensor]) -> Tensor:
    """A layer's outputs for rows with the adapters of `slots`."""
    rows = AdapterRows(slots[: len(x)])
    low = lora.begin(x, rows)
    return lora.end(gemm(), low, rows)
