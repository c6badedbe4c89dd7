"""Finds out how a model of transformers attends, without weights.

Builds the model on the meta device and computes a few tokens. An attention function and a mask function
in transformers' registries record what each layer asks for. What the paged KV cache cannot serve is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from windlass.models.transformers_model import LayerAttention, TransformersModel

_NAME = "windlass_probe"
_NUM_TOKENS = 3
# Arguments of attention functions that change nothing in a causal step without dropout.
_HARMLESS = {
    "attention_mask",
    "cache_position",
    "dropout",
    "is_causal",
    "layer_idx",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
}


class Refused(Exception):
    """Why a model cannot run through transformers' code; the caller adds its name."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands for a mask: which keys a query sees, and the length of a window or chunk."""

    sees: Callable[..., Any]
    local_size: int | None

    def _changed(self, *_: Any) -> Any:
        raise Refused("its code changes attention masks, as for sparse attention or ALiBi")

    __getattr__ = __getitem__ = __add__ = __radd__ = __and__ = __invert__ = _changed

    def window(self) -> int | None:
        """The causal window; None: all earlier keys. Raises for other masks."""
        size = self.local_size
        query = 10 * (size or 1) + 7  # not at the start of a chunk
        first = 0 if size is None else query - size + 1
        for key in (query + 1, query, first, first - 1):
            indices = (torch.tensor(index, device="cpu") for index in (0, 0, query, key))
            if key >= 0 and bool(self.sees(*indices)) != (first <= key <= query):
                raise Refused("its attention masks are neither causal nor sliding windows")
        return size


def _mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> _Mask:
    return _Mask(mask_function, local_size)


@dataclass(frozen=True, slots=True)
class _Recorder:
    layers: dict[int, LayerAttention] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: _Mask | Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Record the layer; the output has the right shape."""
        name, index = type(module).__name__, getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise Refused(f"{name} does not say which layer it is")
        if index in self.layers:
            raise Refused(f"layer {index} attends more than once in a step")
        unknown = {key for key, given in others.items() if given is not None} - _HARMLESS
        if unknown:
            raise Refused(f"{name} gives its attention function {', '.join(sorted(unknown))}")
        if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise Refused(f"{name} is not causal")
        _check_shapes(query, key, value)
        self.modules[index] = module
        self.layers[index] = LayerAttention(
            num_q=query.shape[1],
            num_kv=key.shape[1],
            dim=key.shape[-1],
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=_window(attention_mask, sliding_window),
            soft_cap=softcap,
            sinks=s_aux is not None,
        )
        values = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return values.transpose(1, 2).contiguous(), None


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if key.shape[-1] != value.shape[-1]:
        raise Refused(
            f"its keys have {key.shape[-1]} features and its values {value.shape[-1]}, as with MLA"
        )
    if not query.shape[2] == key.shape[2] == _NUM_TOKENS:
        raise Refused("its layers do not compute one query and one key per token")
    if query.shape[1] % key.shape[1]:
        raise Refused(f"{query.shape[1]} query heads do not divide by {key.shape[1]} kv heads")


def _window(mask: _Mask | Tensor | None, sliding_window: int | None) -> int | None:
    """The window of a layer, which its mask and its argument must agree on."""
    if isinstance(mask, Tensor):
        raise Refused("it adds a mask or bias of its own to the attention scores")
    if mask is None:
        return sliding_window
    window = mask.window()
    if None not in (window, sliding_window) and window != sliding_window:
        raise Refused(f"a layer has a mask of {window} tokens and a window of {sliding_window}")
    return window


def probe(model_class: Any, config: Any, values: Mapping[str, Any]) -> TransformersModel:
    """Compute a few tokens on the meta device. Raises Refused."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    if not model_class._can_set_attn_implementation():
        raise Refused("its attention does not go through transformers' attention functions")
    recorder = _Recorder()
    AttentionInterface.register(_NAME, recorder.attend)
    AttentionMaskInterface.register(_NAME, _mask)
    try:
        model, body, logits = _trial(model_class, config)
    except Refused:
        raise
    except Exception as error:  # transformers' code may raise anything
        message = str(error).strip().partition("\n")[0]
        raise Refused(f"a trial step failed ({type(error).__name__}: {message})") from error
    layers = tuple(recorder.layers[index] for index in sorted(recorder.layers))
    _check_layers(layers, recorder.layers, config)
    if "position_ids" not in inspect.signature(body.forward).parameters:
        raise Refused(f"{type(body).__name__} takes no position_ids, and rows start anywhere")
    paths = {module: path for path, module in model.named_modules()}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(table, nn.Embedding):
        raise Refused("its LM head is not a linear layer")
    tied = head.weight is table.weight
    if tied and ("." in paths[head] or head.bias is not None):
        raise Refused("its tied LM head has a bias, or is inside another module")
    if next(model.parameters(recurse=False), None) is not None:
        raise Refused("it has weights outside of its modules")
    return TransformersModel(
        class_name=model_class.__name__,
        config=values,
        layers=layers,
        body=paths[body],
        blocks=_blocks(model, [recorder.modules[index] for index in range(len(layers))]),
        table=paths[table],
        head=paths[head],
        tied=tied,
        vocab_size=logits.shape[-1],
        hidden_size=head.in_features,
    )


def _trial(model_class: Any, config: Any) -> tuple[Any, nn.Module, Tensor]:
    """The model on the meta device, the module that computes hidden states, and logits."""
    with torch.device("meta"), torch.inference_mode():
        # This implementation of experts needs no values.
        model = model_class._from_config(
            config,
            attn_implementation=_NAME,
            experts_implementation="batched_mm",
            dtype=torch.float32,
        ).eval()
        called: list[nn.Module] = []
        base = model.base_model
        for module in (base, getattr(base, "decoder", None)):
            if isinstance(module, nn.Module):
                module.register_forward_pre_hook(lambda module, _: called.append(module))
        ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
        # With a padding mask, transformers does not look for packed sequences in the positions.
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    if not called:
        raise Refused("it computes hidden states and logits in one module")
    return model, called[0], logits


def _check_layers(
    layers: tuple[LayerAttention, ...], by_index: Mapping[int, LayerAttention], config: Any
) -> None:
    count = config.num_hidden_layers
    if sorted(by_index) != list(range(count)):
        raise Refused(
            f"{len(layers)} of its {count} layers attend through transformers' attention functions; "
            "recurrent state and convolutions have no KV cache here"
        )
    shapes = {(layer.num_q, layer.num_kv, layer.dim) for layer in layers}
    if len(shapes) > 1:
        raise Refused(f"its layers have different heads (q, kv, size): {sorted(shapes)}")


def _blocks(model: nn.Module, attentions: list[nn.Module]) -> str | None:
    """The list whose i-th module has the i-th layer's attention."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(attentions):
            pairs = zip(module, attentions, strict=True)
            if all(attention in list(block.modules()) for block, attention in pairs):
                return path
    return None
