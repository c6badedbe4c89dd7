"""Runs a causal LM through transformers' own code, with Windlass' attention and linear layers in it.

For architectures without a network of their own. The steps are right, but slower: every operation other
than attention and linear layers is transformers' and runs one by one. transformers_probe.py has checked
before that the model can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.card import Choice
from windlass.core.kv_layout import KVLayout
from windlass.errors import UnsupportedError
from windlass.kernels.attention_options import AttentionOptions, RopeOptions
from windlass.kernels.batch import AdapterRows, Heads, StepBatch, attention_layout
from windlass.kernels.gemm_io import Inputs
from windlass.layers.linear import Linear
from windlass.layers.rotary import Rotary
from windlass.models.hparams import HParams
from windlass.models.network import Network, Parts
from windlass.models.transformers_model import TransformersModel
from windlass.parallel.mesh import Mesh
from windlass.quant.shard import Shard

_NAME = "windlass"
# Largest relative difference of a token's hidden state beside other tokens; rounding is far below.
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class _Call:
    """The step that transformers' code is computing; its functions have no argument for it."""

    network: TransformersNetwork
    batch: StepBatch | None = None  # None: tokens attend to themselves only
    hidden: Tensor | None = None  # given hidden states: compute logits only
    aux_hidden_states: dict[int, Tensor] = field(default_factory=dict)


_CALL: ContextVar[_Call] = ContextVar("_CALL")


@contextmanager
def _during(call: _Call) -> Iterator[None]:
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over the paged KV cache, with the interface of transformers' attention functions.

    q, k and v are [1, heads, tokens, dim]; the result is [1, tokens, heads, dim]. The probe has read
    scale, window and soft cap, and refused other arguments.
    """
    del attention_mask
    call = _CALL.get()
    network, index = call.network, int(module.layer_idx)  # type: ignore[arg-type]
    layer, heads = network.found.layers[index], network.heads
    if call.batch is None:
        own = (part.repeat_interleave(heads.group, dim=1) for part in (key, value))
        return (query + sum(own)).transpose(1, 2).contiguous(), None
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]
    options = AttentionOptions(
        scale=layer.scale,
        window=layer.window,
        soft_cap=layer.soft_cap,
        sinks=None if s_aux is None else s_aux.float(),
    )
    attended = network.parts.ops.attend(
        torch.cat(parts, dim=1).flatten(1).to(network.parts.dtype),
        heads,
        RopeOptions(network.no_rotation.cos_sin),  # transformers has rotated q and k
        call.batch.kv_of(index),
        call.batch,
        options,
    )
    return attended[None], None


class _Linear(Linear):
    """A linear layer with the interface of nn.Linear: inputs have any number of dimensions."""

    def __init__(self, linear: nn.Linear, name: str, parts: Parts, method_name: str) -> None:
        prefix, _, leaf = method_name.rpartition(".")
        super().__init__(
            outputs={name: Shard(linear.out_features)},
            inputs=Shard(linear.in_features),
            method=parts.method_for(f"{prefix}." if prefix else "", [leaf]),
            group=parts.mesh.tp,
            bias=None if linear.bias is None else parts.dtype,
        )
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Inputs, adapters: AdapterRows | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        y = super().forward(x.flatten(0, -2), adapters)
        return y.unflatten(0, x.shape[:-1])


class TransformersNetwork(Network):
    """A model of transformers. Its modules are this network's, under their names in transformers."""

    why_eager = "transformers' own code computes the layers"

    def __init__(self, hparams: HParams, parts: Parts) -> None:
        super().__init__()
        assert hparams.transformers is not None
        if parts.mesh.world.size > 1:
            raise UnsupportedError(
                f"{hparams.architecture} runs through transformers' code, which computes whole layers "
                "on one device. Leave out --tensor-parallel-size."
            )
        self.found, self.parts = hparams.transformers, parts
        self.heads = Heads(hparams.num_heads, hparams.num_kv_heads, hparams.head_dim)
        self.tied = self.found.tied
        model = _build(self.found, parts.dtype)
        _take_over(model, self.found, parts)
        for name, child in model.named_children():
            self.add_module(name, child)
        # A table that rotates nothing, so that the kernels with RoPE write the pages.
        self.no_rotation = Rotary(
            inv_freq=torch.zeros(hparams.head_dim // 2, device="cpu"),
            scale=1.0,
            max_positions=parts.max_positions,
            device=parts.device,
        )
        self._model = (model,)  # a tuple, so that its modules are registered once
        self._body = (model.get_submodule(self.found.body),)
        _stop_at_given_hidden(self._body[0])
        if self.found.blocks is not None:
            for index, block in enumerate(model.get_submodule(self.found.blocks).children()):
                block.register_forward_pre_hook(_keep_input(index), with_kwargs=True)

    @classmethod
    def kv_layout(
        cls, hparams: HParams, block_size: int, dtype: torch.dtype, mesh: Mesh
    ) -> KVLayout:
        del mesh  # refused when the network is built
        return attention_layout(
            hparams.sliding_windows,
            num_kv_heads=hparams.num_kv_heads,
            dim=hparams.head_dim,
            block_size=block_size,
            dtype=dtype,
        )

    @property
    def choices(self) -> list[Choice]:
        value = f"transformers' {self.found.class_name}, operator by operator"
        swapped = sum(isinstance(module, _Linear) for module in self.modules())
        others = [
            parameter
            for module in self.modules()
            if not isinstance(module, (_Linear, nn.Embedding))
            for parameter in module.parameters(recurse=False)
            if parameter.ndim > 1
        ]
        remark = f"; {len(others)} other matrices, which are never quantised" if others else ""
        how = f"Windlass' attention and {swapped} linear layers in it{remark}"
        return [Choice("network", value, how)]

    @property
    def table(self) -> Tensor | None:
        table = self.get_submodule(self.found.table)
        return table.weight if type(table) is nn.Embedding else None

    def embed(self, ids: Tensor) -> Tensor:
        return self.get_submodule(self.found.table)(ids)

    def forward(
        self, ids: Tensor, batch: StepBatch, aux_hidden_states: dict[int, Tensor] | None = None
    ) -> Tensor:
        call = _Call(self, batch, aux_hidden_states=aux_hidden_states or {})
        if call.aux_hidden_states and self.found.blocks is None:
            raise UnsupportedError(
                f"{self.found.class_name} has no list of layers, so EAGLE heads cannot read them."
            )
        hidden = self._hidden(call, ids, batch.positions)
        indices = batch.logits_indices
        return hidden if indices is None else hidden[indices.tokens]

    def _hidden(self, call: _Call, ids: Tensor, positions: Tensor | None) -> Tensor:
        (body,) = self._body
        position_ids = None if positions is None else positions.long()[None]
        with _during(call):
            output = body(input_ids=ids.long()[None], position_ids=position_ids, use_cache=False)
        return output[0][0]

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        assert adapters is None
        (model,) = self._model
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with _during(_Call(self, hidden=hidden)):
            return model(input_ids=ids, use_cache=False).logits[0]

    @torch.inference_mode()
    def check(self) -> None:
        """Refuse a model whose tokens depend on each other beside attention, or on where they stand.

        Rows are packed into one sequence. With tokens that attend to themselves only, a token's hidden
        state may depend on its position and on nothing else.
        """
        first, second, other = (
            torch.tensor(ids, device=self.parts.device) for ids in ((3, 5), (5, 3), (5, 7))
        )
        forward = torch.tensor((0, 1), device=self.parts.device)
        call = _Call(self)
        try:
            whole = self._hidden(call, first, forward)
            pairs = {
                "it counts positions in a way of its own": (self._hidden(call, first, None), whole),
                "tokens depend on their place in the batch": (
                    self._hidden(call, second, forward.flip(0)).flip(0),
                    whole,
                ),
                "tokens depend on each other beside attention": (
                    self._hidden(call, other, forward.flip(0))[0],
                    whole[1],
                ),
            }
        except Exception as error:  # transformers' code may raise anything
            raise UnsupportedError(
                f"{self.found.class_name} cannot run through transformers' code with these weights: "
                f"{type(error).__name__}: {error}"
            ) from error
        for reason, (got, want) in pairs.items():
            difference = (got - want).abs().max() / want.abs().max()
            if not difference < _TOLERANCE:
                raise UnsupportedError(
                    f"{self.found.class_name} cannot run through transformers' code: {reason} (relative "
                    f"difference {difference:.2g}), and a step packs the tokens of all requests."
                )


def _build(found: TransformersModel, dtype: torch.dtype) -> Any:
    """The model with parameters on the meta device, and buffers with their values on the CPU."""
    import transformers
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    model_class = getattr(transformers, found.class_name)
    config = model_class.config_class.from_dict(dict(found.config))
    # Parameters are allocated, and no page of them is written; buffers are computed.
    with torch.device("cpu"), no_init_weights():
        model = model_class._from_config(config, attn_implementation=_NAME, dtype=dtype).eval()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    return model


def _take_over(model: Any, found: TransformersModel, parts: Parts) -> None:
    """Replace linear layers by Windlass', and make stored buffers parameters for the loader."""
    keep = tuple(model._keep_in_fp32_modules_strict or ())
    for path, module in list(model.named_modules()):
        parent, _, leaf = path.rpartition(".")
        is_kept = any(part in keep for part in path.split("."))
        if type(module).forward is nn.Linear.forward and not is_kept:
            is_head = path == found.head
            name = found.table if is_head and found.tied else leaf
            method_name = "lm_head" if is_head else path
            linear = _Linear(module, name, parts, method_name)
            setattr(model.get_submodule(parent), leaf, linear)
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_kept:
                setattr(module, name, nn.Parameter(parameter.float(), requires_grad=False))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name in module._non_persistent_buffers_set:
                setattr(module, name, buffer.to(parts.device))
            else:
                delattr(module, name)
                setattr(module, name, nn.Parameter(buffer.to("meta"), requires_grad=False))


def _stop_at_given_hidden(body: nn.Module) -> None:
    """Let the body return given hidden states, so that the model computes logits from them.

    The model's own code then scales or caps the logits, as its family needs.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    compute = body.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = _CALL.get().hidden
        if hidden is None:
            return compute(*args, **kwargs)
        batch: Any = hidden[None]
        output = MoeModelOutputWithPast(last_hidden_state=batch)
        output.cross_attentions = None  # some models pass it on
        return output

    body.forward = forward


def _keep_input(index: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        wanted = _CALL.get().aux_hidden_states
        if index in wanted:
            hidden = args[0] if args else kwargs["hidden_states"]
            wanted[index] = hidden[0].clone()

    return hook
