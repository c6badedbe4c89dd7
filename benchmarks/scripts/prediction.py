"""Measures predicted outputs (`prediction`) against the same requests without, in turns, in one process.

    python benchmarks/scripts/prediction.py -o benchmarks/cpu-prediction.json

The predicted text is the model's own output, the same with some words replaced, or another text. Every
turn compares the tokens; a difference is an error.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from windlass import LLM, SamplingParams
from windlass.tools.common.record import Record

_SUBJECTS = ("the sea", "a garden", "bread", "a bicycle", "winter", "a library", "iron", "maps")
_PROMPT = "Write a long and detailed text about {}."
_NOTES = (
    "Medians of turns in one run; ratio: tokens per second with the prediction over without, within "
    "each turn. Greedy; prompts are cached, so that outputs are measured. accepted: share of the verified "
    "draft tokens."
)


def replaced(text: str, every: int) -> str:
    """The text with one word in `every` replaced by another word of it."""
    words, chance = text.split(" "), Random(0)
    return " ".join(chance.choice(words) if chance.random() * every < 1 else word for word in words)


def run(llm: LLM, prompts: list[str], prediction: list[str], output: int) -> dict[str, Any]:
    """The tokens of a batch, its seconds, and its draft tokens."""
    before = llm.engine.stats()
    start = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    results = llm.generate(prompts, params, prediction=prediction)
    seconds, after = time.perf_counter() - start, llm.engine.stats()
    return {
        "tokens": [result.outputs[0].token_ids for result in results],
        "text": [result.outputs[0].text for result in results],
        "seconds": seconds,
        "drafted": after.num_draft_tokens - before.num_draft_tokens,
        "accepted": after.num_accepted_tokens - before.num_accepted_tokens,
    }


def measure(llm: LLM, num_rows: int, output: int, turns: int) -> list[dict[str, Any]]:
    messages = [_PROMPT.format(_SUBJECTS[i]) for i in range(num_rows)]
    prompts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in messages]
    nothing = [""] * num_rows
    texts = run(llm, prompts, nothing, output)["text"]
    kinds = {
        "the output itself": texts,
        "1 of 20 words replaced": [replaced(text, 20) for text in texts],
        "1 of 5 words replaced": [replaced(text, 5) for text in texts],
        "another text": [*texts[1:], _PROMPT] if num_rows > 1 else [_PROMPT * 20],
    }
    rows = []
    for kind, prediction in kinds.items():
        found = []
        for _ in range(turns):
            plain = run(llm, prompts, nothing, output)
            predicted = run(llm, prompts, prediction, output)
            if predicted["tokens"] != plain["tokens"]:
                raise SystemExit(f"{kind}: other tokens than without a prediction.")
            found.append((plain, predicted))
        last = found[-1][1]
        row = {"requests": num_rows, "prediction": kind}
        row |= {
            name: round(median(num_rows * output / pair[at]["seconds"] for pair in found), 1)
            for at, name in enumerate(("plain_tok_s", "tok_s"))
        }
        row["ratio"] = round(median(a["seconds"] / b["seconds"] for a, b in found), 3)
        row["accepted"] = round(last["accepted"] / last["drafted"], 3) if last["drafted"] else None
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, device=options.device)
    rows: list[dict[str, Any]] = []
    for num_rows in (1, 8):
        rows += measure(llm, num_rows, options.tokens, options.turns)
    if options.output is not None:
        Record("prediction", rows, _NOTES).save(options.output)


if __name__ == "__main__":
    main()
