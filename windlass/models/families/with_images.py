"""Models that also read images, without that part: their text model is one of another family."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from windlass.errors import UnsupportedError
from windlass.models.families.base import Family
from windlass.models.families.llama import MISTRAL
from windlass.models.families.ministral import MINISTRAL3
from windlass.models.families.qwen import QWEN2, QWEN3
from windlass.models.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE
from windlass.models.fields import Fields
from windlass.models.hparams import HParams
from windlass.models.tensor_rules import Rule

# The prefix of the text model's modules, in files and in configs of weight formats.
_PREFIX = re.compile(r"(?:language_model(\\?\.)model|model(\\?\.)language_model)(?=\\?\.)")
_HEAD = re.compile(r"language_model\\?\.(?=lm_head)")
_OUTER = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")


def text_fields(fields: Fields) -> Fields:
    """The fields of the text model. Those of the whole model are outside text_config."""
    outer = fields.present(*_OUTER)
    text = Fields(fields.mapping("text_config"), f"{fields.source} (text_config)")
    found = text.with_defaults(outer)
    formats = fields.mapping("quantization_config") or fields.mapping("compression_config")
    if not formats:
        return found
    return found.updated(quantization_config=rename_modules(formats, _without_prefix))


def text_rules(hparams: HParams) -> Sequence[Rule]:
    """Rules that drop the vision part, and the prefix before the text model's names."""
    del hparams
    return (
        Rule(
            pattern=r"(?:.*\.)?(?:vision_tower|vision_model|multi_modal_projector|visual)\..*",
            name="",
        ),
        Rule(pattern=r"(?:language_model\.model|model\.language_model)\.(.*)", name=r"model.\1"),
        Rule(pattern=r"language_model\.(lm_head\..*)", name=r"\1"),
    )


def _without_prefix(name: str) -> str:
    """A module's name, or an expression for such names, in the text model."""
    return _HEAD.sub("", _PREFIX.sub("model", name))


def rename_modules(value: Any, rename: Callable[[str], str]) -> Any:
    """The settings of a weight format with other names of modules."""
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, Mapping):
        return {key: rename_modules(each, rename) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rename_modules(each, rename) for each in value]
    return value


def _reader(**families: Family) -> Callable[[Fields, str], HParams]:
    """Read the text model with the family of its model_type."""

    def read(fields: Fields, architecture: str) -> HParams:
        # Configs of older versions have no text_config: their fields are those of the text model.
        text = text_fields(fields) if "text_config" in fields else fields
        kind = text.text("model_type", next(iter(families)))
        if kind not in families:
            raise UnsupportedError(
                f"{fields.source}: the text model of {architecture} is of the type {kind!r}, which is "
                f"not supported. Supported: {', '.join(families)}."
            )
        tied = any(each.flag("tie_word_embeddings", False) for each in (text, fields))
        return families[kind].read(text.updated(tie_word_embeddings=tied), architecture)

    return read


def _with_plain_rope(read: Callable[[Fields, str], HParams]) -> Callable[[Fields, str], HParams]:
    """Of text, all three positions of M-RoPE are equal: it is the default RoPE."""

    def plain(fields: Fields, architecture: str) -> HParams:
        for name in ("rope_scaling", "rope_parameters"):
            rope = fields.mapping(name)
            kinds = {key: "default" for key in ("type", "rope_type") if rope.get(key) == "mrope"}
            fields = fields.updated(**{name: {**rope, **kinds}})
        return read(fields, architecture)

    return plain


_QWEN2 = replace(QWEN2, read=_with_plain_rope(QWEN2.read))
MISTRAL3 = Family(
    model_type="mistral3",
    read=_reader(mistral=MISTRAL, ministral3=MINISTRAL3),
    rules=text_rules,
)
QWEN2_VL = Family(
    model_type="qwen2_vl",
    read=_reader(qwen2_vl_text=_QWEN2, qwen2_vl=_QWEN2),
    rules=text_rules,
)
QWEN2_5_VL = Family(
    model_type="qwen2_5_vl",
    read=_reader(qwen2_5_vl_text=_QWEN2, qwen2_5_vl=_QWEN2),
    rules=text_rules,
)
QWEN3_5_WITH_IMAGES = Family(
    model_type="qwen3_5",
    read=_reader(qwen3_5_text=QWEN3_5),
    outer_rules=text_rules,
    rules=QWEN3_5.rules,
)
QWEN3_5_MOE_WITH_IMAGES = Family(
    model_type="qwen3_5_moe",
    read=_reader(qwen3_5_moe_text=QWEN3_5_MOE),
    outer_rules=text_rules,
    rules=QWEN3_5_MOE.rules,
)
QWEN3_VL = Family(model_type="qwen3_vl", read=_reader(qwen3_vl_text=QWEN3), rules=text_rules)
