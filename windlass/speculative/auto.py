"""Resolves `--spec auto` from the files of the model and of --spec-model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from windlass.config import EngineConfig, ModelConfig
from windlass.errors import CheckpointError
from windlass.models.json_file import read_json
from windlass.models.source import ModelFiles, resolve
from windlass.speculative.speculators import is_speculators
from windlass.speculative_config import SpecName


def detect_method(files: ModelFiles) -> Literal["medusa", "eagle", "draft"]:
    """The method that a folder's config names: a head, else a draft model."""
    if files.kind == "gguf":
        return "draft"
    config = read_json(files.path / "config.json")
    if "medusa_num_heads" in config:
        return "medusa"
    if is_speculators(config):
        return "eagle"  # speculators.py refuses other kinds of heads
    names = config.get("architectures") or []
    return "eagle" if any("eagle" in str(name).lower() for name in names) else "draft"


def resolve_auto(config: EngineConfig, has_mtp: Callable[[], bool] = lambda: False) -> EngineConfig:
    """Replace auto by a method. `has_mtp`: whether the target has an MTP layer."""
    options = config.speculation
    if options.spec != "auto":
        return config
    if options.spec_model is None:
        own_method: SpecName = "mtp" if has_mtp() else "ngram"
        return replace(config, speculation=replace(options, spec=own_method))
    own = config.model
    try:
        files = resolve(
            ModelConfig(
                model=options.spec_model,
                load_format="dummy" if own.load_format == "dummy" else "auto",
                download_dir=own.download_dir,
                hf_token=own.hf_token,
            )
        )
    except CheckpointError as error:
        raise CheckpointError(f"--spec-model: {error}") from error
    return replace(config, speculation=replace(options, spec=detect_method(files)))
