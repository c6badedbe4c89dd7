"""Puts adapters together: their slots on the device, their places on disk, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.config import EngineConfig
from windlass.core.card import Choice
from windlass.lora.bank import Bank
from windlass.lora.packing import compiled_code
from windlass.lora.places import locate
from windlass.lora.store import AdapterStore
from windlass.models.network import Network
from windlass.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Adapting:
    """The device's slots and the adapters in host memory."""

    bank: Bank
    store: AdapterStore
    choice: Choice


def open_adapters(config: EngineConfig, spec: ModelSpec, network: Network) -> Adapting:
    """Take the memory, and check the adapters that the config names; no weight of them is read."""
    wish = config.lora
    bank = Bank(network, spec, wish.max_loras, wish.max_lora_rank, wish.lora_dtype)
    store = AdapterStore(spec, wish.max_lora_rank, wish.max_host, bank.pack)
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
