"""Compares the records of an H200 with vLLM's figures on the same kind of GPU.

    python benchmarks/scripts/vllm_comparison.py -o benchmarks/h200-vllm.json

vLLM 0.26 ran the same workloads with its defaults (FlashAttention 3, CUDA graphs, torch.compile) and random
weights. Nothing is measured here: run it again after a record of `windlass bench throughput` has changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.tools.common.record import Record, read_record

RECORDS = Path(__file__).parent.parent
_LLAMA, _QWEN, _SMOL = "h200-llama-3.1-8b", "h200-qwen3-0.6b", "h200-smollm2-135m"
_MOE = "h200-qwen3-30b-a3b"
_NOTES = (
    "Tokens per second if no other unit is given; decode: of steps in which all requests decode; prefill: "
    "prompt tokens. ratio: the speed of Windlass relative to vLLM, so less than 1 is slower. Each figure of "
    "Windlass is from the record named in its row, which has its command and commit. int4: vLLM with AWQ; no copies: --no-dequantized-copies. "
    "fp8: both with an fp8 KV cache; vLLM's head has 16 bits. Mixtures of experts in fp8 are not compared: "
    "with random weights vLLM's router sent all tokens to few experts."
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of vLLM, and where the one of Windlass is."""

    model: str
    vllm: float
    workload: str
    record: str
    key: str = ""  # of the row; default: by workload
    unit: str = ""

    @property
    def label(self) -> str:
        return f"{self.workload}, {self.unit}" if self.unit else self.workload

    def windlass(self, rows: Sequence[dict[str, Any]]) -> float:
        """The figure of the last row with this workload: the newest, if a record has several machines."""
        found = [row for row in rows if row["workload"] == self.workload][-1]
        value = float(found[self.key or _key(self.workload)])
        return value / 1e3 if self.key.startswith("ttft") else value

    def ratio(self, value: float) -> float:
        return round(self.vllm / value if self.unit else value / self.vllm, 2)


def _key(workload: str) -> str:
    if workload.startswith("decode"):
        return "decode_tok_s"
    return "prompt_tok_s" if workload == "prefill" else "output_tok_s"


def _figures(model: str, record: str, **values: float) -> Iterator[Figure]:
    for workload, value in values.items():
        yield Figure(model, value, workload, record)


FIGURES = (
    *_figures(
        "8B bf16", _LLAMA, decode_b1=201.8, decode_b8=1592, decode_b64=10505, decode_b256=22572,
        prefill=42097, mixed=9544, prefix=10722,
    ),
    *_figures(
        "8B fp8", f"{_LLAMA}-fp8", decode_b1=270, decode_b8=2104, decode_b64=13596, decode_b256=27993,
        prefill=73029, mixed=13483, prefix=12666,
    ),
    *_figures("8B fp8", f"{_LLAMA}-fp8-io1000", io1000x1000x1024=13796),
    *_figures("8B fp8", f"{_LLAMA}-fp8-io128", io128x2048x512=20888),
    *_figures(
        "8B int4", f"{_LLAMA}-int4", decode_b1=249, decode_b8=1958, decode_b64=10407,
        decode_b256=23611, mixed=10043,
    ),
    *_figures(
        "8B int4, no copies", f"{_LLAMA}-int4-no-copies", decode_b64=10407, decode_b256=23611,
        mixed=10043,
    ),
    Figure("8B bf16", 6.64, "io100000x64x1", f"{_LLAMA}-long", "ttft_p50_ms", "TTFT s"),
    Figure("8B bf16", 7.89, "io100000x64x1", f"{_LLAMA}-long", "decode_step_ms", "decode step ms"),
    Figure("8B bf16", 12.64, "io32000x256x8", f"{_LLAMA}-long", "seconds", "total s"),
    Figure("8B bf16", 12.53, "io32000x256x8", f"{_LLAMA}-long", "decode_step_ms", "decode step ms"),
    *_figures("0.6B bf16", _QWEN, decode_b1=390.8, decode_b64=19013, decode_b256=32096, nano=21134),
    *_figures(
        "135M bf16", _SMOL, decode_b1=597.9, decode_b8=4146, decode_b64=25396, decode_b256=42648,
        mixed=30209,
    ),
    *_figures(
        "30B-A3B bf16", _MOE, decode_b1=243, decode_b8=857, decode_b64=3582, decode_b256=11834
    ),
    *_figures("30B-A3B bf16", f"{_MOE}-512", prefill=66023, mixed=8172),
)  # fmt: skip


def compare(folder: Path) -> list[dict[str, Any]]:
    """The rows of the comparison, from the records of a folder."""
    records = {figure.record for figure in FIGURES}
    rows = {name: read_record(folder / f"{name}.json").rows for name in records}
    found = []
    for figure in FIGURES:
        value = figure.windlass(rows[figure.record])
        found.append(
            {
                "model": figure.model,
                "workload": figure.label,
                "vllm": figure.vllm,
                "windlass": round(value, 2) if value < 1000 else round(value),
                "ratio": figure.ratio(value),
                "record": figure.record,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=RECORDS / "h200-vllm.json")
    output = parser.parse_args().output
    hardware = read_record(RECORDS / f"{_LLAMA}.json").hardware
    Record(
        "vllm_comparison", compare(RECORDS), _NOTES, hardware=hardware, versions={"vllm": "0.26"}
    ).save(output)
    print(f"written to {output}")


if __name__ == "__main__":
    main()
