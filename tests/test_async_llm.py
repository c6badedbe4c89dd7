"""AsyncLLM gives what LLM gives, from an engine in another process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.serve.tiny_model import write_tiny_model
from windlass import LLM, AsyncLLM, SamplingParams
from windlass.outputs import BeamSearchOutput, RequestOutput
from windlass.text.beam_search import BeamSearchParams

OPTIONS: dict[str, Any] = {"num_blocks": 64, "dtype": "float32", "device": "cpu", "num_threads": 1}
HI = [{"role": "user", "content": "Hi"}]
TEXTS = ["a rope", "a drum and a crank"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=5)


def tokens_of(result: RequestOutput | BeamSearchOutput) -> list[list[int]]:
    if isinstance(result, BeamSearchOutput):
        return [each.tokens for each in result.sequences]
    return [each.token_ids for each in result.outputs]


def rounded(values: Iterable[float]) -> list[float]:
    """Other rows of a batch may change the last bits."""
    return [round(value, 4) for value in values]


async def results_of(folder: Path) -> dict[str, Any]:
    async with AsyncLLM(str(folder), **OPTIONS) as llm:
        chat, embeddings, scores, ranking, beams = await asyncio.gather(
            llm.chat(HI, GREEDY),
            llm.embed(TEXTS),
            llm.score("rope", TEXTS),
            llm.rerank("rope", TEXTS, top_n=1),
            llm.beam_search("Hi", BEAMS),
        )
        deltas = [delta.text async for delta in llm.stream_chat(HI, GREEDY)]
    return {
        "chat": tokens_of(chat),
        "message": chat.outputs[0].message,
        "stream": "".join(deltas),
        "vectors": [rounded(each.outputs.embedding) for each in embeddings],
        "scores": rounded(each.outputs.score for each in scores),
        "ranking": [each.index for each in ranking],
        "beams": tokens_of(beams),
    }


def test_coroutines_give_the_results_of_the_blocking_api(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    llm = LLM(str(folder), **OPTIONS)
    (chat,) = llm.chat(HI, GREEDY)
    (beams,) = llm.beam_search("Hi", BEAMS)
    expected = {
        "chat": tokens_of(chat),
        "message": chat.outputs[0].message,
        "stream": "".join(llm.stream_chat(HI, GREEDY)),
        "vectors": [rounded(each.outputs.embedding) for each in llm.embed(TEXTS)],
        "scores": rounded(each.outputs.score for each in llm.score("rope", TEXTS)),
        "ranking": [each.index for each in llm.rerank("rope", TEXTS, top_n=1)],
        "beams": tokens_of(beams),
    }
    assert asyncio.run(results_of(folder)) == expected
