"""The reference model of a quality measurement: its name and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.cli.options import ENGINE_OPTIONS
from windlass.config import EngineConfig
from windlass.errors import ConfigError

# Options of the machine and the user, not of the model: the reference inherits them.
_SHARED = ("device", "num_threads", "download_dir", "hf_token")


def reference_config(
    values: Mapping[str, Any], against: str | None, options: str | None
) -> EngineConfig:
    """Return the config of `against`, or of the same model, with `options` (`name=value,...`).

    It inherits only the machine's options from `values`: the reference is unquantised unless its own
    options say otherwise.
    """
    shared = {name: values[name] for name in _SHARED if name in values}
    model = against or values.get("model", "default")
    return EngineConfig.of(**{**shared, **parse_options(options or ""), "model": model})


def parse_options(text: str) -> dict[str, Any]:
    """Parse `dtype=bfloat16,block_size=32` as values of a config file."""
    import yaml

    by_key = {key: option for option in ENGINE_OPTIONS for key in option.keys}
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        key = name.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise ConfigError(f"{item!r}: expected name=value, for example dtype=bfloat16.")
        # EngineConfig refuses an unknown name, and suggests the nearest.
        option = by_key.get(key)
        parsed = yaml.safe_load(value)
        found[option.name if option else key] = option.from_file(parsed) if option else parsed
    return found
