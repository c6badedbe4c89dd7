"""Which way to guess `--hparams auto` means: by what lies in the folder of --spec-model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from windlass.config import EngineConfig, ModelConfig
from windlass.errors import CheckpointError
from windlass.models.json_file import read_json
from windlass.models.source import ModelFiles, resolve
from windlass.speculative.speculators import is_speculators


def kind_of(files: ModelFiles) -> Literal["medusa", "eagle", "draft"]:
    """What a folder can guess with: a head says so in its config, all else is a model."""
    if files.kind == "gguf":
        return "draft"
    config = read_json(files.path / "config.json")
    if "medusa_num_heads" in config:
        return "medusa"
    if is_speculators(config):
        return "eagle"  # those of another kind are refused there
    names = config.get("architectures") or []
    return "eagle" if any("eagle" in str(name).lower() for name in names) else "draft"


def settled(config: EngineConfig) -> EngineConfig:
    """The config with a way to guess in the place of auto."""
    wish = config.speculation
    if wish.spec != "auto":
        return config
    if wish.spec_model is None:
        return replace(config, speculation=replace(wish, spec="ngram"))
    own = config.model
    try:
        files = resolve(
            ModelConfig(
                model=wish.spec_model,
                load_format="dummy" if own.load_format == "dummy" else "auto",
                download_dir=own.download_dir,
                hf_token=own.hf_token,
            )
        )
    except CheckpointError as error:
        raise CheckpointError(f"--spec-model: {error}") from error
    return replace(config, speculation=replace(wish, spec=kind_of(files)))
