"""Compares a tiny model of every causal LM class of transformers with itself inside Windlass.

`python -m tests.models.transformers_survey [MODEL_TYPE ...]` prints a line per class: same, or why it was
refused. docs/models.md has the result.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models.comparison import our_logits
from windlass.errors import EngineError

_MAX_PARAMETERS = 20_000_000
_NUM_TOKENS = 37
# Fields of all configs, by their names there; a config gets those that it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "sliding_window": 8,
    "vocab_size": 97,
    "is_decoder": True,
}


def tiny_config(model_type: str) -> Any:
    """A config with small sizes, and one layer of each of the first two types."""
    config_class = transformers.CONFIG_MAPPING[model_type]
    default = config_class()
    given = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for name, value in _SIZES.items():
        is_property = any(
            isinstance(vars(base).get(name), property) for base in config_class.__mro__
        )
        known = name in default.to_dict() or (name == "head_dim" and hasattr(default, name))
        if name == "head_dim" and "qk_rope_head_dim" in default.to_dict():
            continue  # of the rotated part, with MLA
        if known and not is_property and (name != "sliding_window" or default.sliding_window):
            given[name] = value
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(default.to_dict().get(name) or ()))
        if kinds:
            given[name] = (kinds * 2)[:2]
    return config_class(**given)


def compare(model_type: str) -> str:
    """One line about a model: same, different, refused, or not made."""
    try:
        model = _model(tiny_config(model_type))
    except Exception as error:  # configs that need more than small sizes
        return f"not made: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
    ids = torch.randint(3, 90, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            got = our_logits(Path(folder), ids.tolist(), [5, 1, 31], model_impl="transformers")
        except EngineError as error:
            return f"refused: {error}"
    with torch.inference_mode():
        want = model(ids[None]).logits[0]
    difference = float((got - want).abs().max())
    return f"{'same' if difference < 1e-4 else 'DIFFERENT'} ({difference:.1g} of {want.std():.1g})"


def _model(config: Any) -> Any:
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        count = sum(each.numel() for each in model_class(copy.deepcopy(config)).parameters())
    if count > _MAX_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(1)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name and parameter.ndim == 1
            parameter.normal_(1.0 if is_norm else 0.0, 0.1)
    return model


def main() -> None:
    transformers.logging.set_verbosity_error()
    for model_type, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if not sys.argv[1:] or model_type in sys.argv[1:]:
            print(f"{class_name}: {compare(model_type)}", flush=True)


if __name__ == "__main__":
    main()
