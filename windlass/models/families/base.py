"""What a family defines, and the fields of config.json that most families share.

A family is one file here and a line for each architecture in registry.py. It reads the config into
`HParams`, and lists rules for tensors whose names or shapes differ from those of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import Activation, HParams, NormHParams
from windlass.models.rope_config import RopeConfig
from windlass.models.tensor_rules import Rule, split

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}


def _no_rules(hparams: HParams) -> Sequence[Rule]:
    del hparams
    return ()


def _no_fields(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    del keys, header
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How GGUF files of an architecture differ from those of llama.

    `names`: modules of a layer by their GGUF names, beside or instead of the common ones.
    `config`: fields of config.json from the metadata, beside or instead of the common ones.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    outer_names: Mapping[str, str] = field(default_factory=dict)
    config: Callable[[Fields, GGUFHeader], dict[str, Any]] = _no_fields
    outer_rules: Callable[[HParams], Sequence[Rule]] = _no_rules  # applied before `rules`
    rules: Callable[[HParams], Sequence[Rule]] = _no_rules
    # Lists of a value for each layer, which `config` reads; elsewhere the largest value counts.
    layer_lists: tuple[str, ...] = ()
    permuted: bool = False  # q and k rows are stored with RoPE pairs interleaved


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. `read` gets the config's fields and the architecture's name."""

    model_type: str
    read: Callable[[Fields, str], HParams]
    rules: Callable[[HParams], Sequence[Rule]] = _no_rules  # for safetensors
    # Applied before `rules`: those of a model that contains this one.
    outer_rules: Callable[[HParams], Sequence[Rule]] = _no_rules
    gguf: GGUFFamily = field(default_factory=GGUFFamily)


def read_decoder(
    fields: Fields,
    architecture: str,
    *,
    head_dim: int | None = None,
    norm: NormHParams | None = None,
    windows: tuple[int | None, ...] | None = None,
    **known: Any,
) -> HParams:
    """Read the common fields. `known` has fields of HParams that the family implies.

    `head_dim`: the default if config.json has none; None: hidden_size / num_attention_heads.
    """
    heads = fields.positive_int("num_attention_heads")
    kv_heads = fields.positive_int("num_key_value_heads", heads)
    hidden = fields.positive_int("hidden_size")
    layers = fields.positive_int("num_hidden_layers")
    dim = fields.positive_int("head_dim", head_dim or _head_dim(hidden, heads, fields))
    if heads % kv_heads:
        raise CheckpointError(
            f"{fields.source}: num_attention_heads ({heads}) is not a multiple of "
            f"num_key_value_heads ({kv_heads})."
        )
    if fields.mapping("per_layer_config") and "layer_kv_heads" not in known:
        raise UnsupportedError(
            f"{fields.source}: per_layer_config, settings that differ between layers, is not supported for "
            f"{architecture}."
        )
    rope = known.pop("rope", None) or RopeConfig.from_hf(fields, dim)
    common: dict[str, Any] = {
        "intermediate_size": fields.positive_int("intermediate_size"),
        "activation": activation(fields),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "max_positions": rope.max_context(fields.positive_int("max_position_embeddings")),
    } | {name: known.pop(name) for name in list(known) if name in _OVERRIDABLE}
    return HParams(
        architecture=architecture,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        vocab_size=fields.positive_int("vocab_size"),
        norm=norm or NormHParams(eps=fields.number("rms_norm_eps", 1e-6)),
        rope=rope,
        sliding_windows=windows or (None,) * layers,
        dtype=fields.text("dtype", None) or fields.text("torch_dtype", None),
        bos_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_ids=fields.token_ids("eos_token_id"),
        quantization=fields.mapping("quantization_config") or fields.mapping("compression_config"),
        source=fields.source,
        **common,
        **known,
    )


_OVERRIDABLE = ("intermediate_size", "activation", "tie_embeddings", "max_positions")


def activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
    """The activation function of the MLP. Raises for an unknown one."""
    found = fields.text(name, default)
    if found not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{fields.source}: {name} {found!r} is not supported. "
            f"Supported: {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[found]


def layer_norm(fields: Fields, name: str = "layer_norm_eps", **options: Any) -> NormHParams:
    """LayerNorms with a bias, unless `options` say otherwise. `name`: the field of their epsilon."""
    return NormHParams(
        **{"eps": fields.number(name, 1e-5), "kind": "layer", "bias": True, **options}
    )


def periodic_windows(fields: Fields, window: int | None) -> tuple[int | None, ...]:
    """The windows from `layer_types`; else every layer has one but each `sliding_window_pattern`th."""
    found = layer_windows(fields, window)
    if found is not None:
        return found
    step = fields.positive_int("sliding_window_pattern", 4)
    layers = fields.positive_int("num_hidden_layers")
    return tuple(window if (layer + 1) % step else None for layer in range(layers))


def rotating_layers(fields: Fields) -> list[bool]:
    """Whether each layer rotates q and k: no_rope_layers has a 1 for those that do."""
    layers = fields.positive_int("num_hidden_layers")
    step = fields.positive_int("no_rope_layer_interval", 4)
    found = fields.sequence("no_rope_layers")
    if not found:
        return [(layer + 1) % step != 0 for layer in range(layers)]
    if len(found) != layers:
        raise CheckpointError(
            f"{fields.source}: no_rope_layers has {len(found)} layers, num_hidden_layers is {layers}."
        )
    return [bool(each) for each in found]


def layer_windows(
    fields: Fields, window: int | None, local: str = "sliding_attention"
) -> tuple[int | None, ...] | None:
    """The sliding window of each layer from `layer_types`; None if the config has no such field.

    `local`: the type of the layers that have one.
    """
    kinds = fields.sequence("layer_types")
    if kinds is None:
        return None
    layers = fields.positive_int("num_hidden_layers")
    if len(kinds) != layers:
        raise CheckpointError(
            f"{fields.source}: layer_types has {len(kinds)} layers, num_hidden_layers is {layers}."
        )
    unknown = set(kinds) - {local, "full_attention"}
    if unknown:
        raise UnsupportedError(
            f"{fields.source}: layer_types contains {', '.join(sorted(map(str, unknown)))}; "
            f"only {local} and full_attention are supported."
        )
    return tuple(window if kind == local else None for kind in kinds)


def fused_qkv(
    hparams: HParams, module: str = "model.layers.*.self_attn.qkv_proj", **options: Any
) -> list[Rule]:
    """Rules for a projection that stores q, k and v together. `options`: those of `split`."""
    q, kv = (n * hparams.head_dim for n in (hparams.num_heads, hparams.num_kv_heads))
    parts = {
        f"model.layers.*.self_attn.{part}_proj": n
        for part, n in zip("qkv", (q, kv, kv), strict=True)
    }
    return split(module, parts, **options)


def fused_gate_up(
    hparams: HParams,
    module: str = "model.layers.*.mlp.gate_up_proj",
    mlp: str = "model.layers.*.mlp",
) -> list[Rule]:
    """Rules for a projection that stores gate and up together."""
    inner = hparams.intermediate_size
    return split(module, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner})


def gguf_windows(keys: Fields, period: int = 4) -> dict[str, Any]:
    """The windows of a GGUF file; without a list of layers, each `period`th has full attention.

    Empty if the file has no window.
    """
    window = keys.count("attention.sliding_window", 0)
    if not window:
        return {}
    name, layers = "attention.sliding_window_pattern", keys.positive_int("block_count")
    listed = keys.sequence(name)
    slides = listed or [(layer + 1) % period != 0 for layer in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    return {"sliding_window": window, "layer_types": kinds}


def _head_dim(hidden: int, heads: int, fields: Fields) -> int:
    if hidden % heads and "head_dim" not in fields:
        raise CheckpointError(
            f"{fields.source}: hidden_size ({hidden}) is not a multiple of num_attention_heads "
            f"({heads}), and head_dim is not set."
        )
    return hidden // heads
