"""Opens a model's files: the card for the server, hyper-parameters and checkpoint for the network.

torch is imported only when a tensor is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.config import ModelConfig
from windlass.core.card import ModelCard
from windlass.core.sampling import SamplingParams
from windlass.core.tokenizer import Tokenizer
from windlass.errors import CheckpointError, ConfigError, RequestError
from windlass.models import default_model, gguf_tokenizer, tokenizer_files
from windlass.models.checkpoint import Checkpoint, SafetensorsCheckpoint
from windlass.models.dummy import ByteTokenizer, DummyCheckpoint
from windlass.models.families.registry import (
    ARCHITECTURES,
    family_of,
    has_family,
    read_hparams,
)
from windlass.models.fields import Fields
from windlass.models.gguf_file import GGUFCheckpoint
from windlass.models.hparams import HParams
from windlass.models.json_file import merged, read_json, read_json_if_there
from windlass.models.pooling_head import causal_config, file_rules, read_pooling
from windlass.models.source import ModelFiles
from windlass.models.tensor_rules import Rule, mapped
from windlass.models.tokenizer import HFTokenizer, TextSide
from windlass.models.transformers_config import read_transformers

_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def read_headers(files: ModelFiles, config: ModelConfig) -> tuple[HParams, ModelCard]:
    """The hyper-parameters and the model card, with one read of the files."""
    gguf = _gguf(files)
    hparams = _hparams(files, config, gguf)
    card = _card(files, config, gguf, hparams)
    values = _config_values(files, config, gguf)
    head, pooling = read_pooling(
        values,
        generates=causal_config(values, ARCHITECTURES) is None,
        folder=files.path if gguf is None else None,
        hidden_size=hparams.hidden_size,
        tokenizer=card.tokenizer,
        config=config,
    )
    return replace(hparams, pooling=head), replace(card, pooling=pooling)


def load_card(files: ModelFiles, config: ModelConfig) -> ModelCard:
    """The model card: tokenizer, chat template and sampling defaults."""
    return read_headers(files, config)[1]


def _card(
    files: ModelFiles, config: ModelConfig, gguf: GGUFCheckpoint | None, hparams: HParams
) -> ModelCard:
    generation = _generation_config(files)
    text = _text_side(files, config, gguf)
    ends = generation.token_ids("eos_token_id") + hparams.eos_ids
    tokenizer: Tokenizer
    if text is None:
        tokenizer = ByteTokenizer(hparams.vocab_size, ends)
    else:
        tokenizer = HFTokenizer(text.backend, tuple(dict.fromkeys(ends + text.eos_ids)))
    return ModelCard(
        name=files.name,
        path=str(files.path),
        architecture=hparams.architecture,
        max_positions=hparams.max_positions,
        tokenizer=tokenizer,
        chat_template=text.chat_template if text else None,
        special_tokens=text.special_tokens if text else {},
        default_sampling=_sampling(generation, config),
        fim=text.fim if text else None,
        aliases=_aliases(config),
    )


def _aliases(config: ModelConfig) -> tuple[str, ...]:
    """Names in the API beside the first; "default" where a command line has it and no other name."""
    if config.model == "default" and not config.served_model_name:
        return ("default",)
    return config.served_model_name[1:]


def load_hparams(files: ModelFiles, config: ModelConfig) -> HParams:
    """The network's hyper-parameters, with --hf-overrides applied."""
    return _hparams(files, config, _gguf(files))


def open_checkpoint(
    files: ModelFiles, config: ModelConfig, *, hparams: HParams | None = None
) -> Checkpoint:
    """Open the checkpoint; random weights with --load-format dummy.

    `hparams`: of the network whose tensors are read; None: the model's own.
    """
    if config.load_format == "dummy":
        dtype = load_hparams(files, config).dtype if config.dtype == "auto" else config.dtype
        return DummyCheckpoint(config.seed, dtype or "float32", on_gpu=config.device != "cpu")
    gguf = _gguf(files)
    hparams = hparams or _hparams(files, config, gguf)
    if hparams.transformers is not None:
        from windlass.models.transformers_weights import TransformersCheckpoint

        stored = SafetensorsCheckpoint(files.weights, files.index)
        return TransformersCheckpoint(stored, hparams.transformers)
    family = family_of(hparams.architecture)
    if gguf is not None:
        own = family.gguf
        return mapped(mapped(gguf, own.outer_rules(hparams)), own.rules(hparams))
    stored = SafetensorsCheckpoint(files.weights, files.index)
    renamed = mapped(mapped(stored, _scale_rules(stored.names())), file_rules(stored.names()))
    return mapped(mapped(renamed, family.outer_rules(hparams)), family.rules(hparams))


def _scale_rules(names: Collection[str]) -> list[Rule]:
    """Rules for static fp8 scales of tensors under the names that transformers gives them."""
    if not any(name.endswith(".activation_scale") for name in names):
        return []
    return [
        Rule(pattern=r"(.*)\.activation_scale", name=r"\1.input_scale"),
        Rule(pattern=r"(.*)\.weight_scale_inv", name=r"\1.weight_scale"),
    ]


def _gguf(files: ModelFiles) -> GGUFCheckpoint | None:
    return GGUFCheckpoint(files.path) if files.kind == "gguf" else None


def _hparams(files: ModelFiles, config: ModelConfig, gguf: GGUFCheckpoint | None) -> HParams:
    source = files.path if gguf else files.path / "config.json"
    values = _config_values(files, config, gguf)
    values = causal_config(values, ARCHITECTURES) or values
    if _uses_transformers(values, str(source), config, gguf):
        return read_transformers(values, str(source))
    return read_hparams(values, str(source))


def _config_values(
    files: ModelFiles, config: ModelConfig, gguf: GGUFCheckpoint | None
) -> dict[str, Any]:
    """The fields of config.json, or of a GGUF file in its form, with --hf-overrides applied."""
    values = gguf.hf_config() if gguf else read_json(files.path / "config.json")
    return merged(values, config.hf_overrides)


def _uses_transformers(
    values: Mapping[str, Any], source: str, config: ModelConfig, gguf: GGUFCheckpoint | None
) -> bool:
    """Whether transformers' own code computes the network."""
    if config.model_impl == "transformers" and gguf is not None:
        raise ConfigError(
            "--model-impl transformers reads safetensors, and this model is a GGUF file. Use the "
            "original model, or omit the flag."
        )
    if config.model_impl != "auto" or gguf is not None:
        return config.model_impl == "transformers"
    return not has_family(values, source)


def _text_side(
    files: ModelFiles, config: ModelConfig, gguf: GGUFCheckpoint | None
) -> TextSide | None:
    """The tokenizer of --tokenizer, or the model's; None for dummy weights without a tokenizer."""
    if config.tokenizer is not None:
        path = Path(config.tokenizer).expanduser()
        if not path.exists():
            raise CheckpointError(f"--tokenizer: no such file or folder: {path}")
        text = tokenizer_files.load_text(path)
        own = (
            gguf_tokenizer.chat_template(gguf.header)
            if gguf
            else tokenizer_files.chat_template(files.path)
        )
        return replace(text, chat_template=text.chat_template or own)
    if gguf:
        return gguf_tokenizer.load_text(gguf.header)
    if config.load_format == "dummy" and not tokenizer_files.has_tokenizer(files.path):
        return None
    return tokenizer_files.load_text(files.path)


def _generation_config(files: ModelFiles) -> Fields:
    """The fields of generation_config.json. A GGUF model has none, even with a file next to it."""
    path = files.path / "generation_config.json"
    return Fields(read_json_if_there(path), str(path))


def _sampling(generation: Fields, config: ModelConfig) -> dict[str, Any]:
    """The sampling defaults, under the names of the request's sampling params."""
    sampling: dict[str, Any] = {}
    if config.generation_config != "none":
        found = generation.present(*_SAMPLING)
        own = default_model.SAMPLING if config.model == "default" else {}
        sampling = {**own, **{_SAMPLING[name]: value for name, value in found.items()}}
        try:
            SamplingParams(**sampling)
        except RequestError as error:
            raise CheckpointError(
                f"{generation.source}: {error} Correct the file, or use --generation-config none."
            ) from error
    return sampling | _overrides(config)


def _overrides(config: ModelConfig) -> dict[str, Any]:
    """The defaults of --override-generation-config."""
    given = config.override_generation_config
    unknown = [name for name in given if name not in _SAMPLING]
    if unknown:
        raise ConfigError(
            f"--override-generation-config has {unknown[0]!r}. Known: {', '.join(_SAMPLING)}."
        )
    sampling = {_SAMPLING[name]: value for name, value in given.items()}
    try:
        SamplingParams(**sampling)
    except RequestError as error:
        raise ConfigError(f"--override-generation-config: {error}") from error
    return sampling
