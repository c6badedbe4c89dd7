"""What families share whose layers are recurrent or have attention, and those with Mamba-2."""

from __future__ import annotations

from typing import Any

from windlass.core.recurrent import RecurrentHeads
from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.fields import Fields
from windlass.models.gguf_header import GGUFHeader
from windlass.models.hparams import HParams, RecurrentHParams
from windlass.models.tensor_rules import Rule, split

_MIXER = "model.layers.*.mamba"
# As Python and as transformers write infinity to JSON.
_NO_LIMITS = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
# Names of norms and MLPs in the files of Bamba and Falcon-H1.
MAMBA_MLP_NAMES = {
    "model.final_layernorm": "model.norm",
    "model.layers.*.pre_ff_layernorm": "model.layers.*.post_attention_layernorm",
    **{
        f"model.layers.*.feed_forward.{part}_proj": f"model.layers.*.mlp.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
GGUF_MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt",
    "ssm_a": "mamba.A",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}


def listed_layers(
    fields: Fields,
    recurrent: tuple[str, ...],
    attention: tuple[str, ...],
    name: str = "layer_types",
) -> tuple[bool, ...] | None:
    """Whether each layer is recurrent, from the kinds in a list; None if the config has no such list."""
    kinds, layers = fields.sequence(name), fields.positive_int("num_hidden_layers")
    if kinds is None:
        return None
    unknown = {str(kind) for kind in kinds} - {*recurrent, *attention}
    if unknown:
        raise UnsupportedError(
            f"{fields.source}: {name} contains {', '.join(sorted(unknown))}; supported are "
            f"{', '.join((*recurrent, *attention))}."
        )
    if len(kinds) != layers:
        raise CheckpointError(
            f"{fields.source}: {name} has {len(kinds)} layers, num_hidden_layers is {layers}."
        )
    return tuple(kind in recurrent for kind in kinds)


def read_mamba(fields: Fields, layers: tuple[bool, ...], **known: Any) -> RecurrentHParams:
    """The Mamba-2 layers, from fields as Bamba names them. `known`: fields that the family implies."""
    count, groups = (
        fields.positive_int(f"mamba_n_{name}", default)
        for name, default in (("heads", 128), ("groups", 1))
    )
    inner = fields.number("mamba_expand", 2.0) * fields.positive_int("hidden_size")
    what = "mamba_expand times hidden_size"
    if "mamba_d_ssm" in fields:
        inner, what = fields.positive_int("mamba_d_ssm"), "mamba_d_ssm"
    dim = inner / count
    if fields.present("mamba_d_head").get("mamba_d_head", "auto") != "auto":
        dim = fields.positive_int("mamba_d_head")
    if dim * count != inner or dim != int(dim):
        raise CheckpointError(
            f"{fields.source}: mamba_n_heads ({count}) times mamba_d_head ({dim:g}) is not {what} "
            f"({inner:g})."
        )
    if count % groups:
        raise CheckpointError(
            f"{fields.source}: mamba_n_heads ({count}) is not a multiple of mamba_n_groups ({groups})."
        )
    check_time_steps(fields)
    return RecurrentHParams(
        kind="mamba",
        heads=RecurrentHeads(
            num_heads=count,
            dim=int(dim),
            num_groups=groups,
            state_size=fields.positive_int("mamba_d_state", 256),
            conv_size=fields.positive_int("mamba_d_conv", 4),
        ),
        layers=layers,
        conv_bias=fields.flag("mamba_conv_bias", True),
        proj_bias=fields.flag("mamba_proj_bias", False),
        **known,
    )


def check_time_steps(fields: Fields, activation: str = "hidden_act") -> None:
    """Refuse options of Mamba-2 that kernels do not have. `activation`: the field of its function."""
    limit = list(fields.sequence("time_step_limit") or _NO_LIMITS[0])
    if limit not in _NO_LIMITS:
        raise UnsupportedError(
            f"{fields.source}: time_step_limit {limit} is not supported, only [0, Infinity]."
        )
    found = fields.text(activation, "silu")
    if found not in ("silu", "swish"):
        raise UnsupportedError(
            f"{fields.source}: {activation} {found!r} is not supported with Mamba layers, only silu."
        )


def mamba_rules(hparams: HParams) -> list[Rule]:
    """Rules for the mixers of Mamba-2, whose projections and convolutions are stored together."""
    return [*_fused_rules(hparams), Rule(pattern=r"(.*\.mamba)\.A_log", name=r"\1.A", log=True)]


def gguf_mamba_rules(hparams: HParams) -> list[Rule]:
    return [*_fused_rules(hparams), Rule(pattern=r"(.*\.mamba)\.dt\.bias", name=r"\1.dt_bias")]


def _fused_rules(hparams: HParams) -> list[Rule]:
    if hparams.recurrent is None:
        return []
    heads = hparams.recurrent.heads
    inner, shared = heads.inner, heads.group_features
    conv = {"x": inner, "b": shared, "c": shared}
    projections = {"gate": inner, **conv, "dt": heads.num_heads}
    return [
        *split(f"{_MIXER}.in_proj", {f"{_MIXER}.{k}_proj": n for k, n in projections.items()}),
        *split(f"{_MIXER}.conv1d", {f"{_MIXER}.{k}_conv": n for k, n in conv.items()}),
    ]


def gguf_mamba(keys: Fields, header: GGUFHeader) -> dict[str, Any]:
    """The fields of `read_mamba` from a GGUF file."""
    heads, inner = keys.positive_int("ssm.time_step_rank"), keys.positive_int("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_n_groups": keys.positive_int("ssm.group_count", 1),
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // heads,
        "mamba_d_state": keys.positive_int("ssm.state_size"),
        "mamba_d_conv": keys.positive_int("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in header.tensors),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in header.tensors),
    }
