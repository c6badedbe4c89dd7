"""LoRA options and their validation. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from windlass.errors import ConfigError
from windlass.settings import at_least, flag, option

LoraDType = Literal["auto", "int8"]

MAX_RANK = 256
_HOST_PER_SLOT = 4  # default of max_cpu_loras, per device slot


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters: many fine-tuned variants of one base model, served together."""

    enable_lora: bool = option(False, "Serve LoRA adapters in addition to the base model.")
    lora_modules: tuple[str, ...] = option(
        (), "An adapter as NAME=FOLDER or NAME=org/name; repeatable."
    )
    max_loras: int = option(8, "Maximum number of adapters on the device, and so in one step.")
    max_cpu_loras: int | None = option(
        None, "Maximum number of adapters in host memory; default: four times --max-loras."
    )
    max_lora_rank: int = option(
        64, f"Maximum adapter rank, 1 to {MAX_RANK}; every slot reserves memory for it."
    )
    lora_dtype: LoraDType = option(
        "auto",
        "Data type of adapters: auto is the model's dtype; int8 quantises them, which takes half the "
        "memory and bandwidth of 16 bits.",
    )

    def __post_init__(self) -> None:
        if not self.enable_lora:
            for item in fields(self):
                if item.name != "enable_lora" and getattr(self, item.name) != item.default:
                    raise ConfigError(f"{flag(item.name)} does nothing without --enable-lora.")
        at_least(self, 1, "max_loras", "max_cpu_loras", "max_lora_rank")
        if self.max_lora_rank > MAX_RANK:
            raise ConfigError(f"--max-lora-rank must be at most {MAX_RANK}: {self.max_lora_rank}.")
        if self.max_host < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras ({self.max_cpu_loras}) is below --max-loras ({self.max_loras}): "
                "adapters are copied to the device from host memory. Raise --max-cpu-loras."
            )
        self.modules()

    @property
    def max_host(self) -> int:
        """Maximum number of adapters in host memory."""
        return self.max_cpu_loras or _HOST_PER_SLOT * self.max_loras

    def modules(self) -> dict[str, str]:
        """Folder or hub id of each adapter, by name."""
        found: dict[str, str] = {}
        for item in self.lora_modules:
            name, equals, location = item.partition("=")
            if not equals or not location:
                raise ConfigError(
                    f"--lora-modules takes NAME=FOLDER or NAME=org/name, got {item!r}."
                )
            check_adapter_name(name)
            if name in found:
                raise ConfigError(f"--lora-modules names {name!r} twice.")
            found[name] = location
        return found


def check_adapter_name(name: str) -> None:
    """Raise ConfigError if `name` cannot be a model name in the API."""
    if not name or len(name) > 200 or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"{name!r:.220} is not a valid adapter name: use 1 to 200 printable characters, without "
            "leading or trailing spaces."
        )


def below(path: str, roots: tuple[str, ...]) -> Path | None:
    """`path` with links resolved if it is inside one of `roots`, else None."""
    real = Path(path).resolve()
    return real if any(real.is_relative_to(Path(root).resolve()) for root in roots) else None
