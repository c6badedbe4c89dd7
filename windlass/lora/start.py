"""Puts adapters together: their slots on the device, their places on disk, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from windlass.config import EngineConfig
from windlass.core.card import Choice
from windlass.errors import ConfigError
from windlass.kernels.batch import AdapterRows
from windlass.kernels.gemm import TorchGemm
from windlass.kernels.lora import Lora
from windlass.layers.linear import Linear
from windlass.lora.bank import Bank, bytes_of_slot
from windlass.lora.packing import compiled_code
from windlass.lora.places import locate
from windlass.lora.store import AdapterStore
from windlass.lora_config import LoraConfig
from windlass.models.hparams import HParams
from windlass.models.network import Network

_MOST_ROWS = 64  # for which products are chosen by measuring


@dataclass(frozen=True, slots=True)
class Adapting:
    """The device's slots and the adapters in host memory."""

    bank: Bank
    store: AdapterStore
    choice: Choice


def open_adapters(
    config: EngineConfig, hparams: HParams, network: Network, gemm: TorchGemm, free: int
) -> Adapting:
    """Take the memory, of which `free` bytes are left, and check the adapters that the config names;
    no weight of them is read.
    """
    wish = config.lora
    _check_room(wish, network, free)
    bank = Bank(network, hparams, wish.max_loras, wish.max_lora_rank, wish.lora_dtype)
    _tune(bank, network, gemm)
    store = AdapterStore(hparams, wish.max_lora_rank, wish.max_host, bank.pack)
    for name, place in wish.modules().items():
        folder = locate(place, config.model)
        store.check_folder(folder)
        store.register(name, folder)
    per_slot = bank.num_bytes / (wish.max_loras + 1) / 2**20
    choice = Choice(
        "adapters",
        f"{len(store.names)} named, {wish.max_loras} on the device, {wish.max_host} in memory",
        f"{per_slot:.1f} MiB per slot, for ranks up to {wish.max_lora_rank}"
        + (" in int8" if wish.lora_dtype == "int8" else "")
        + (
            "" if compiled_code() else "; no compiler here: reading one takes several times as long"
        ),
    )
    return Adapting(bank, store, choice)


def _check_room(wish: LoraConfig, network: Network, free: int) -> None:
    """Refuse slots that would not fit: a system may end the process instead of saying so."""
    need = (wish.max_loras + 1) * bytes_of_slot(network, wish.max_lora_rank, wish.lora_dtype)
    if need > free:
        advice = "" if wish.lora_dtype == "int8" else ", or set --lora-dtype int8"
        raise ConfigError(
            f"--max-loras {wish.max_loras} with --max-lora-rank {wish.max_lora_rank} takes "
            f"{need / 2**30:,.1f} GiB, but {free / 2**30:,.1f} GiB are free. Lower one of "
            f"them{advice}."
        )


def _tune(bank: Bank, network: Network, gemm: TorchGemm) -> None:
    """Choose products by how long they take with what adapters add."""
    weights = []
    for layer in network.modules():
        if isinstance(layer, Linear) and layer.lora is not None and layer.weight is not None:
            weight = layer.weight.data
            slots = torch.arange(_MOST_ROWS, dtype=torch.int32, device=weight.device)
            weights.append((weight, partial(_adapted, layer.lora, slots % bank.num_slots + 1)))
    with bank.as_if_full():
        gemm.tune_accompanied(weights)


def _adapted(lora: Lora, slots: Tensor, x: Tensor, gemm: Callable[[], Tensor]) -> Tensor:
    """A layer's outputs for rows with these adapters."""
    rows = AdapterRows(slots[: len(x)])
    low = lora.begin(x, rows)
    return lora.end(gemm(), low, rows)
