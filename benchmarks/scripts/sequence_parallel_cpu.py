"""Compares prompts that are split over two ranks with whole ones, on this CPU with a thread each, in turns.

    python benchmarks/scripts/sequence_parallel_cpu.py -o benchmarks/cpu-sequence-parallel.json

The models are Llama 3.2 1B, and dense layers with the MLA of DeepSeek-V3 at a smaller size, whose latents every rank
computes for all tokens unless they are split; both with random weights. Collectives and their bytes come from the
formula of `windlass plan`, which tests compare with real steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from windlass import LLM, SamplingParams
from windlass.config import EngineConfig
from windlass.models.rank_weights import RankShape
from windlass.runner.sequence_parallel import MIN_TOKENS
from windlass.tools.common.price import Price
from windlass.tools.common.record import Record
from windlass.tools.plan.fabric import Fabric
from windlass.tools.plan.kernel_times import KernelTimes
from windlass.tools.plan.rank_work import StepSize
from windlass.tools.plan.scaling import Gpu, ScalingModel

LLAMA = Path(__file__).parents[1] / "models" / "llama-3.2-1b" / "config.json"
LATENTS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 5248,
    "first_k_dense_replace": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 448,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
SPLIT = {"enable_sequence_parallel": True}


def exchanged(config: dict[str, Any], folder: str, tokens: int, split: bool) -> tuple[int, float]:
    """Collectives of a prompt's step, and MiB that a rank receives in them, by the formula of `windlass plan`."""
    (Path(folder) / "config.json").write_text(json.dumps(config))
    settings = EngineConfig.of(model=folder, load_format="dummy", dtype="float32")
    gpu = Gpu("any", 2**40, "as given", Price(1.0, "as given"))
    model = ScalingModel(settings, gpu=gpu, times=KernelTimes(), fabric=Fabric())
    work = model.work(RankShape(tp=2), MIN_TOKENS["cpu"] if split else None)
    (stage,) = work.network.stages(1)
    found = work.stage(stage, StepSize(tokens, rows=1, context=1)).collectives
    received = sum(each.num_bytes / 2 * (2 if each.kind == "all-reduce" else 1) for each in found)
    return len(found), round(received / 2**20, 1)


def load(config: dict[str, Any], folder: str, **options: Any) -> LLM:
    (Path(folder) / "config.json").write_text(json.dumps(config))
    common = {"max_model_len": 2048, "max_num_seqs": 4, "num_threads": 1, "num_blocks": 256}
    ranks = {"tensor_parallel_size": 2, "load_format": "dummy"}
    return LLM(folder, device="cpu", **{**common, **ranks, **options})


def prompt_speed(llm: LLM, length: int, turn: int) -> float:
    """Tokens per second of a prompt that the turn makes new to the prefix cache."""
    prompt = [5 + (31 * turn + 13 * at) % 200 for at in range(length)]
    start = time.perf_counter()
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    return length / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows = []
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("llama-3.2-1b, int4", json.loads(LLAMA.read_text()), {"quantization": "int4"}),
        ("MLA layers, int8", LATENTS, {"quantization": "int8"}),
    ]
    for (name, config, given), backend in product(cases, ("auto", "gloo")):
        with tempfile.TemporaryDirectory() as folder:
            sent = [exchanged(config, folder, options.prompt, split) for split in (False, True)]
            given |= {"distributed_backend": backend}
            engines = [load(config, folder, **given, **more) for more in ({}, SPLIT)]
            timed = [
                [prompt_speed(llm, options.prompt, turn) for llm in engines]
                for turn in range(1 + options.turns)
            ][1:]  # the first one warms up
            del engines
        row: dict[str, Any] = {"model": name, "prompt": options.prompt}
        row |= {"collectives": "shared memory" if backend == "auto" else backend}
        for which, speeds, (count, received) in zip(
            ("whole", "split"), zip(*timed, strict=True), sent, strict=True
        ):
            row |= {f"{which}_tok_s": round(median(speeds), 1)}
            row |= {f"{which}_count": count, f"{which}_mib": received}
        row |= {"ratio": round(median(split / whole for whole, split in timed), 3)}
        rows.append(row)
        print(row)
    notes = (
        "Medians of turns in one run; ratio: split over whole, within each turn. Count and MiB: collectives of the "
        "prompt's step, and what a rank receives in them."
    )
    if options.output is not None:
        Record("sequence_parallel", rows, notes).save(options.output)


if __name__ == "__main__":
    main()
