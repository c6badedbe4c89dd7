"""The offline API: `generate` gives the completions of `stream`."""

from __future__ import annotations

import json

import pytest

from tests.runner.test_deterministic import CONFIG
from windlass import LLM, SamplingParams
from windlass.text.completion import Completion

PROMPTS = [[i + 1, 2, 3, 5] for i in range(6)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return LLM(str(path), load_format="dummy", device="cpu", num_blocks=400, max_num_seqs=4)


@pytest.fixture
def feeds(monkeypatch) -> list[int]:
    """Number of tokens of each call."""
    counts: list[int] = []
    feed = Completion.feed

    def counted(self, output):
        counts.append(len(output.tokens))
        return feed(self, output)

    monkeypatch.setattr(Completion, "feed", counted)
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop_token_ids": tuple(range(0, 500, 7))},
        {"temperature": 1.0, "seed": 3},
        {"min_tokens": 5},
    ],
    ids=["plain", "stop tokens", "sampled", "at least"],
)
def test_generate_equals_stream(llm: LLM, feeds: list[int], options) -> None:
    params = SamplingParams(max_tokens=24, **{"temperature": 0.0, **options})
    whole = llm.generate(PROMPTS, params)
    assert len(feeds) == len(PROMPTS)
    texts = ["".join(llm.stream(prompt, params)) for prompt in PROMPTS]
    assert [result.outputs[0].text for result in whole] == texts
    assert sum(feeds[: len(PROMPTS)]) == sum(feeds[len(PROMPTS) :])
    for result in whole:
        assert result.timeline is not None
        assert result.timeline.num_output == len(result.outputs[0].token_ids)


def test_logprobs_and_stop_strings_are_checked_in_every_step(llm: LLM, feeds: list[int]) -> None:
    plain = SamplingParams(max_tokens=24, temperature=0.0)
    free = llm.generate(PROMPTS[:1], plain)[0].outputs[0]
    pieces = list(llm.stream(PROMPTS[0], plain))
    stop = next(pieces[i] for i in range(3, 24) if pieces[i] not in "".join(pieces[:i]))
    feeds.clear()
    params = SamplingParams(max_tokens=24, temperature=0.0, stop=[stop])
    ended = llm.generate(PROMPTS[:1], params)[0].outputs[0]
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.finish_reason == "stop"
    assert 1 < len(feeds) < 24
    feeds.clear()
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)
    scored = llm.generate(PROMPTS[:1], params)[0].outputs[0]
    assert scored.token_ids == free.token_ids
    assert len(scored.logprobs) == len(feeds) == 24


def test_texts_and_token_prompts_can_be_mixed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    results = llm.generate(["abc", [1, 2, 3], "a", [7], "xyz"], params)
    assert [result.prompt for result in results] == ["abc", None, "a", None, "xyz"]
    tokens = [result.prompt_token_ids for result in results]
    assert tokens == [[97, 98, 99], [1, 2, 3], [97], [7], [120, 121, 122]]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in tokens]
    assert [result.outputs[0].token_ids for result in results] == alone
