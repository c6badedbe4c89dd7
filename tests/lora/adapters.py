"""Random adapters, folders that they were merged into, and engines' parts driven by plans of ours."""

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
from windlass.core.types import BlockId, Row, RowResult, SlotId, SlotInit, StepPlan
from windlass.lora.bank import Bank
from windlass.lora.base import Adapter, Low
from windlass.lora_config import LoraDType
from windlass.models.card import load_hparams, open_checkpoint
from windlass.models.source import resolve
from windlass.runner.assemble import load_network, make_runner

# Outputs and inputs of the modules of tests.quant.folders' models.
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
    """Random changes as large as the weights; `ranks` by the modules of a layer, or "lm_head"."""
    random = torch.Generator().manual_seed(seed)
    modules: dict[str, Low] = {}
    for module, rank in ranks.items():
        if module == "lm_head":
            whole, (num_out, num_in) = [module], (VOCAB, HIDDEN)
        else:
            whole = [f"model.layers.{layer}.{module}" for layer in range(num_layers)]
            num_out, num_in = shapes[module]
        for each in whole:
            down = torch.randn(rank, num_in, generator=random)
            up = torch.randn(num_out, rank, generator=random) * 0.1 / rank**0.5
            modules[each] = Low(down, up)
    return Adapter(name, modules)


def merge(source: Path, target: Path, adapter: Adapter) -> Path:
    """A copy of a folder whose weights are changed as the adapter says; its head is its own."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    for module, low in adapter.modules.items():
        tensors[f"{module}.weight"] += low.up @ low.down
    save_file(tensors, target / "model.safetensors")
    return target


def save(folder: Path, adapter: Adapter) -> Path:
    """As PEFT writes it; for adapters of one rank, whose scaling is 1."""
    folder.mkdir()
    ends = sorted({name.rpartition(".")[2] for name in adapter.modules})
    config = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.rank}
    config |= {"target_modules": ends, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    for name, low in adapter.modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = low.down
        tensors[f"base_model.model.{name}.lora_B.weight"] = low.up
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Parts:
    """A runner with a bank of adapters, and logits of what it computes."""

    def __init__(
        self,
        model: Path,
        adapters: Sequence[Adapter] = (),
        max_rank: int = 16,
        lora_dtype: LoraDType = "auto",
        **options: Any,
    ) -> None:
        options = {"num_blocks": 64, "max_num_seqs": 8, "device": "cpu", **options}
        # What is recorded on a CPU calls no hook, and `logits` needs one.
        options.setdefault("enforce_eager", options["device"] == "cpu")
        config = EngineConfig.of(model=str(model), **options)
        files = resolve(config.model)
        spec = load_hparams(files, config.model)
        loaded = load_network(config, spec, open_checkpoint(files, config.model))
        self.network = loaded.network
        limits = config.limits(loaded.parts.device.type)
        self.runner = make_runner(config, spec, loaded, limits).runner
        self.bank = Bank(self.network, spec, max(1, len(adapters)), max_rank, lora_dtype)
        by_name = {adapter.name: adapter for adapter in adapters}
        self.runner.attach_adapters(self.bank, by_name.__getitem__)
        self._orders = [(slot, name) for slot, name in enumerate(by_name, start=1)]
        self._blocks = iter(range(64))
        self._count = 0

    def admit(self, tokens: Sequence[int], **wish: Any) -> SlotInit:
        params = SamplingParams(**({"temperature": 0.0} | wish))
        slot = SlotId(self._count)
        self._count += 1
        return SlotInit(str(slot), slot, list(tokens), len(tokens), params, frozenset(), 0)

    def row(
        self, one: SlotInit, start: int, count: int, adapter: int = 0, drafts: Sequence[int] = ()
    ) -> Row:
        """Tokens `start` to `start + count` of what was admitted, and guesses."""
        tokens = (*one.tokens[start : start + count], *drafts)
        before, after = -(-start // 16), -(-(start + len(tokens)) // 16)
        blocks = tuple(BlockId(next(self._blocks)) for _ in range(after - before))
        last = start + count >= len(one.tokens)
        number = len(tokens)
        return Row(
            one.request_id, one.slot, start, number, tokens, blocks, last, len(drafts), adapter
        )

    def run(self, rows: list[Row], admitted: Sequence[SlotInit] = ()) -> list[RowResult]:
        orders, self._orders = self._orders, []
        return self.runner.run(StepPlan(rows, list(admitted), adapters=orders)).rows

    def logits(self, rows: list[Row], admitted: Sequence[SlotInit] = ()) -> Tensor:
        """Of all tokens of a step."""
        seen: list[tuple[Tensor, Any]] = []

        def note(_module: Any, given: tuple[Any, ...], hidden: Tensor) -> None:
            seen.append((hidden, given[1].adapters))

        listener = self.network.register_forward_hook(note)
        self.runner.needs_all_hidden = True
        self.run(rows, admitted)
        self.runner.needs_all_hidden = False
        listener.remove()
        ((hidden, adapters),) = seen
        with torch.inference_mode():
            return self.network.logits(hidden, adapters).float()

    def scores(
        self,
        prompts: Sequence[Sequence[int]],
        adapters: Sequence[int],
        chunks: Sequence[int] = (100,),
    ) -> list[Tensor]:
        """Logits of every position of prompts that are computed together, in chunks.

        Slots and blocks are those of earlier prompts.
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
        """Greedy tokens, one a step."""
        one = self.admit(prompt)
        tokens = self.run([self.row(one, 0, len(prompt), adapter)], [one])[0].tokens
        while len(tokens) < count:
            one.tokens.append(tokens[-1])
            tokens += self.run([self.row(one, len(one.tokens) - 1, 1, adapter)])[0].tokens
        return tokens
