"""The model that another one is measured against: its name, and options of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.cli.options import ENGINE_OPTIONS
from windlass.config import EngineConfig
from windlass.errors import ConfigError

# What concerns the machine and the user, not the model: the reference takes these over.
_SHARED = ("device", "num_threads", "download_dir", "hf_token")


def reference_config(
    values: Mapping[str, Any], against: str | None, options: str | None
) -> EngineConfig:
    """The reference's config: `against` or the same model, with `name=value,...` and no more.

    Of the model's own options (`values`) only those about the machine carry over, so that the
    reference is the plain model unless its options say otherwise.
    """
    shared = {name: values[name] for name in _SHARED if name in values}
    model = against or values.get("model", "default")
    return EngineConfig.of(**{**shared, **parse_options(options or ""), "model": model})


def parse_options(text: str) -> dict[str, Any]:
    """`dtype=bfloat16,block_size=32` as a config file would read it."""
    import yaml

    homes = {key: option for option in ENGINE_OPTIONS for key in option.keys}
    found: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        key = name.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise ConfigError(f"{item!r}: expected name=value, such as dtype=bfloat16.")
        # A name that is not known stays, for EngineConfig to refuse with the nearest one.
        option = homes.get(key)
        parsed = yaml.safe_load(value)
        found[option.name if option else key] = option.from_file(parsed) if option else parsed
    return found
