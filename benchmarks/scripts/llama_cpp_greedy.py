"""Compares greedy tokens with llama.cpp's, on the same GGUF file and prompts.

    python benchmarks/scripts/llama_cpp_greedy.py MODEL.gguf LIBRARY.so --data wikitext2

The prompts are the starts of paragraphs of the text, spread over it. For each prompt with a difference
it prints where the first one is and by how much llama.cpp's logit of its own token exceeds that of ours:
a small gap is a tie that rounding decides.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llama_library import LlamaCpp

from windlass import LLM, SamplingParams
from windlass.errors import EngineError
from windlass.tools.eval.data import read_corpus

_PROMPT_WORDS = 24


def main() -> None:
    """Print a line per prompt that differs, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--data", default="wikitext2")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    llm = LLM(str(args.model), device="cpu", max_model_len=512, max_num_seqs=1)
    sampling = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    prompts = [llm.card.tokenizer.encode(text) for text in _prompts(args.data, args.prompts)]
    ours = [llm.generate([prompt], sampling)[0].outputs[0].token_ids for prompt in prompts]
    library = LlamaCpp(args.llama_cpp)
    model = library.load(args.model)
    differences: list[tuple[int, float]] = []
    for i, (prompt, tokens) in enumerate(zip(prompts, ours, strict=True)):
        found = _first_difference(library, model, prompt, tokens, threads=args.threads)
        if found is not None:
            differences.append(found)
            print(f"prompt {i}: token {found[0] + 1} differs, logit gap {found[1]:.4f}")
    equal = len(prompts) - len(differences)
    print(f"{equal} of {len(prompts)} prompts agree in all {args.tokens} tokens")
    if differences:
        print(f"first differences: {sorted(differences)}")


def _prompts(data: str, count: int) -> list[str]:
    text = read_corpus(data).documents[0].text
    assert text is not None
    paragraphs = [line.strip() for line in text.splitlines() if len(line.split()) > _PROMPT_WORDS]
    chosen = paragraphs[:: max(1, len(paragraphs) // count)][:count]
    return [" ".join(line.split()[:_PROMPT_WORDS]) for line in chosen]


def _first_difference(
    library: LlamaCpp, model: int, prompt: Sequence[int], ours: Sequence[int], *, threads: int
) -> tuple[int, float] | None:
    """The index of the first output that llama.cpp chooses differently, and its logit gap."""
    length = len(prompt) + len(ours)
    batch = library.batch(length)
    context = library.context(model, rows=1, max_len=length, step_tokens=length, threads=threads)
    vocab_size = library.vocab_size(model)
    try:
        new, start = list(prompt), 0
        for i, token in enumerate(ours):
            batch.num_tokens = len(new)
            for k, each in enumerate(new):
                batch.token[k], batch.pos[k], batch.n_seq_id[k] = each, start + k, 1
                batch.seq_id[k][0] = 0
                batch.logits[k] = k == len(new) - 1
            failed = library.decode(context, batch)
            if failed:
                raise EngineError(f"llama_decode failed: it returned {failed}.")
            logits = library.logits(context, 1, vocab_size)[0]
            best = int(np.argmax(logits))
            if best != token:
                return i, float(logits[best] - logits[token])
            start, new = start + len(new), [token]
    finally:
        library.free(context, batch)
    return None


if __name__ == "__main__":
    main()
