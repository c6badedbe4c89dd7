"""Random adapters, folders with merged weights, and a runner driven by hand-made plans."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quant.folders import FFN, HIDDEN, VOCAB
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.core.types import BlockId, Row, RowResult, SlotId, SlotInit, StepOptions, StepPlan
from windlass.lora.bank import Bank
from windlass.lora.base import Adapter, LoraWeights
from windlass.lora_config import LoraDType
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.source import resolve
from windlass.runner.assemble import make_runner
from windlass.runner.load import load_network

# Outputs and inputs of the modules of the models in tests.quant.folders.
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
ALL = dict.fromkeys(SHAPES, 4)


def make_adapter(
    name: str,
    ranks: Mapping[str, int],
    seed: int = 0,
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    num_layers: int = 2,
) -> Adapter:
    """Random LoRA weights whose delta is as large as the weights.

    `ranks` has the modules of a layer, or "lm_head".
    """
    random = torch.Generator().manual_seed(seed)
    modules: dict[str, LoraWeights] = {}
    for module, rank in ranks.items():
        if module == "lm_head":
            names, (num_out, num_in) = [module], (VOCAB, HIDDEN)
        else:
            names = [f"model.layers.{layer}.{module}" for layer in range(num_layers)]
            num_out, num_in = shapes[module]
        for full_name in names:
            down = torch.randn(rank, num_in, generator=random)
            up = torch.randn(num_out, rank, generator=random) * 0.1 / rank**0.5
            modules[full_name] = LoraWeights(down, up)
    return Adapter(name, modules)


def merge(source: Path, target: Path, adapter: Adapter) -> Path:
    """Copy a model folder with the adapter merged into its weights; untie its head."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    for module, weights in adapter.modules.items():
        tensors[f"{module}.weight"] += weights.up @ weights.down
    save_file(tensors, target / "model.safetensors")
    return target


def save(folder: Path, adapter: Adapter) -> Path:
    """Write an adapter of uniform rank, with scaling 1, in PEFT's format."""
    folder.mkdir()
    ends = sorted({name.rpartition(".")[2] for name in adapter.modules})
    config = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.rank}
    config |= {"target_modules": ends, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, weights in adapter.modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = weights.down
        tensors[f"base_model.model.{name}.lora_B.weight"] = weights.up
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Parts:
    """A runner with a bank of adapters, and access to its logits."""

    def __init__(
        self,
        model: Path,
        adapters: Sequence[Adapter] = (),
        max_rank: int = 16,
        lora_dtype: LoraDType = "auto",
        **options: Any,
    ) -> None:
        options = {"num_blocks": 64, "max_num_seqs": 8, "device": "cpu", **options}
        # Captured programs on a CPU call no hooks, which `logits` needs.
        options.setdefault("enforce_eager", options["device"] == "cpu")
        config = EngineConfig.of(model=str(model), **options)
        files = resolve(config.model)
        hparams = load_hparams(files, config.model)
        loaded = load_network(config, hparams, open_checkpoint(files, config.model))
        self.network = loaded.network
        limits = config.limits(loaded.parts.device.type)
        self.runner = make_runner(config, hparams, loaded, limits).runner
        self.bank = Bank(
            self.network,
            hparams,
            loaded.parts,
            num_slots=max(1, len(adapters)),
            max_rank=max_rank,
            dtype=lora_dtype,
        )
        by_name = {adapter.name: adapter for adapter in adapters}
        self.runner.attach_adapters(self.bank, by_name.__getitem__)
        self.options = StepOptions()
        self._orders = [(slot, name) for slot, name in enumerate(by_name, start=1)]
        self._blocks = iter(range(64))
        self._count = 0

    def admit(self, tokens: Sequence[int], **sampling: Any) -> SlotInit:
        params = SamplingParams(**({"temperature": 0.0} | sampling))
        slot = SlotId(self._count)
        self._count += 1
        return SlotInit(str(slot), slot, list(tokens), len(tokens), params, frozenset(), 0)

    def row(
        self,
        request: SlotInit,
        start: int,
        count: int,
        adapter: int = 0,
        drafts: Sequence[int] = (),
    ) -> Row:
        """A row of tokens `start` to `start + count` of a request, and draft tokens."""
        tokens = (*request.tokens[start : start + count], *drafts)
        before, after = -(-start // 16), -(-(start + len(tokens)) // 16)
        blocks = tuple(BlockId(next(self._blocks)) for _ in range(after - before))
        last = start + count >= len(request.tokens)
        number = len(tokens)
        return Row(
            request.request_id,
            request.slot,
            start,
            number,
            tokens,
            blocks,
            last,
            len(drafts),
            adapter,
        )

    def run(self, rows: list[Row], admitted: Sequence[SlotInit] = ()) -> list[RowResult]:
        orders, self._orders = self._orders, []
        plan = StepPlan(rows, list(admitted), adapters=orders, options=self.options)
        return self.runner.run(plan).rows

    def logits(self, rows: list[Row], admitted: Sequence[SlotInit] = ()) -> Tensor:
        """Logits of all tokens of a step."""
        seen: list[tuple[Tensor, Any]] = []

        def record(_module: Any, given: tuple[Any, ...], hidden: Tensor) -> None:
            seen.append((hidden, given[1].adapters))

        hook = self.network.register_forward_hook(record)
        options, self.options = self.options, StepOptions(needs_all_hidden=True)
        self.run(rows, admitted)
        self.options = options
        hook.remove()
        ((hidden, adapters),) = seen
        with torch.inference_mode():
            return self.network.logits(hidden, adapters).float()

    def scores(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[int],
        chunks: Sequence[int] = (100,),
    ) -> list[Tensor]:
        """Logits of every position of prompts that are computed in request batch, in chunks.

        Reuses the slots and blocks of earlier prompts.
        """
        self._count, self._blocks = 0, iter(range(64))
        admitted = [self.admit(prompt) for prompt in prompts]
        found: list[list[Tensor]] = [[] for _ in prompts]
        start = 0
        for count in chunks:
            live = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
            sizes = [min(count, len(prompts[i]) - start) for i in live]
            rows = [
                self.row(admitted[i], start, size, adapters[i])
                for i, size in zip(live, sizes, strict=True)
            ]
            logits = self.logits(rows, admitted if start == 0 else ())
            for i, part in zip(live, logits.split(sizes), strict=True):
                found[i].append(part)
            start += count
        return [torch.cat(parts) for parts in found]

    def answer(self, prompt: Sequence[int], adapter: int, count: int) -> list[int]:
        """Greedy tokens, request per step."""
        request = self.admit(prompt)
        tokens = self.run([self.row(request, 0, len(prompt), adapter)], [request])[0].tokens
        while len(tokens) < count:
            request.tokens.append(tokens[-1])
            tokens += self.run([self.row(request, len(request.tokens) - 1, 1, adapter)])[0].tokens
        return tokens
