"""The settings of adapters, and which of them go together. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from windlass.errors import ConfigError
from windlass.settings import at_least, flag, option

LoraDType = Literal["auto", "int8"]

MAX_RANK = 256
_HOST_PER_SLOT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters: many fine-tuned variants of one model, served together."""

    enable_lora: bool = option(False, "Serve adapters (LoRA) beside the model.")
    lora_modules: tuple[str, ...] = option(
        (), "An adapter, as NAME=FOLDER or NAME=org/name; may be given several times."
    )
    max_loras: int = option(8, "Most adapters on the device, and so in one step.")
    max_cpu_loras: int | None = option(
        None, "Most adapters in host memory; default: four times --max-loras."
    )
    max_lora_rank: int = option(
        64, f"Largest rank of an adapter, 1 to {MAX_RANK}; room is kept for it in every slot."
    )
    lora_dtype: LoraDType = option(
        "auto",
        "How adapters are held: in the model's own arithmetic, or rounded to one byte, which takes "
        "half the memory of 16 bits and half the time to read.",
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
                "adapters reach the device by way of host memory. Raise the first."
            )
        self.modules()

    @property
    def max_host(self) -> int:
        """Most adapters in host memory."""
        return self.max_cpu_loras or _HOST_PER_SLOT * self.max_loras

    def modules(self) -> dict[str, str]:
        """Folder or hub id by name."""
        found: dict[str, str] = {}
        for item in self.lora_modules:
            name, equals, place = item.partition("=")
            if not equals or not place:
                raise ConfigError(
                    f"--lora-modules takes NAME=FOLDER or NAME=org/name, got {item!r}."
                )
            check_adapter_name(name)
            if name in found:
                raise ConfigError(f"--lora-modules names {name!r} twice.")
            found[name] = place
        return found


def check_adapter_name(name: str) -> None:
    """Refuse what cannot be a model's name in the API."""
    if not name or len(name) > 200 or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"{name!r:.220} cannot be an adapter's name: give 1 to 200 printable characters, with "
            "no space at either end."
        )


def below(path: str, roots: tuple[str, ...]) -> Path | None:
    """Where `path` really lies, links followed, if that is below one of `roots`; else None."""
    real = Path(path).resolve()
    return real if any(real.is_relative_to(Path(root).resolve()) for root in roots) else None
