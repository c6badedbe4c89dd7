"""Text workloads and request files: lengths, shared prefixes, seeds, and invalid lines."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from windlass.errors import ConfigError
from windlass.tools.common.jsonl import raise_problems
from windlass.tools.common.request_files import RequestFile, read_request_file
from windlass.tools.common.requests import TextRequest, fingerprint
from windlass.tools.common.text_workload import TEXT_WORKLOADS, Sizes, make_requests
from windlass.tools.common.texts import Scale, Writer, measure_scale, samples, scale_of


def words(text: str) -> int:
    return len(text.split())


def shared_words(texts: list[str]) -> int:
    """Number of leading words that all texts share."""
    count = 0
    for column in zip(*(text.split() for text in texts), strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


WRITER = Writer(Scale(1.0, 1.0))  # a word is a token


def made(name: str, **sizes: int) -> list[TextRequest]:
    return make_requests(name, Sizes(**{"num_prompts": 8, **sizes}), WRITER)


def texts(requests: list[TextRequest]) -> list[str]:
    return [str(request.as_prompt()) for request in requests]


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_every_workload_is_determined_by_its_seed(name: str) -> None:
    sizes = Sizes(6, input_len=40, output_len=5)
    first = make_requests(name, sizes, WRITER, "1")
    assert first == make_requests(name, sizes, WRITER, "1")
    assert fingerprint(first) != fingerprint(make_requests(name, sizes, WRITER, "2"))
    assert len(first) == 6
    assert {request.max_tokens for request in first} == {5}
    assert all(message["content"] for request in first for message in request.as_messages())


def test_random_has_the_requested_lengths() -> None:
    assert {words(text) for text in texts(made("random", input_len=50))} == {50}
    requests = make_requests("random", Sizes(50, 100, 20, range_ratio=0.5), WRITER)
    lengths = [words(text) for text in texts(requests)]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 10
    assert {request.max_tokens for request in requests} <= set(range(10, 31))
    assert words(texts(made("random", input_len=50, prefix_len=30))[0]) == 80


def test_a_chat_grows_and_each_turn_follows_the_previous() -> None:
    requests = made("chat", turns=4, input_len=10, output_len=20)
    assert [request.follows for request in requests] == [None, None, 0, 1, 2, 3, 4, 5]
    for request in requests:
        assert [m["role"] for m in request.messages] == (
            ["user", "assistant"] * len(request.messages)
        )[: len(request.messages)]
        if request.follows is not None:
            past = requests[request.follows].messages
            assert request.messages[: len(past)] == past
            assert len(request.messages) == len(past) + 2
    assert words(requests[-1].messages[-2]["content"]) == 20
    assert made("chat", prefix_len=9)[0].messages[0]["role"] == "system"


def test_shared_prefixes() -> None:
    shared = made("shared_prefix", prefix_len=200, input_len=20)
    assert len({request.messages[0]["content"] for request in shared}) == 1
    assert words(shared[0].messages[0]["content"]) == 200
    assert len({request.messages[1]["content"] for request in shared}) == 8
    examples = texts(made("few_shot", prefix_len=320, input_len=10))
    assert shared_words(examples) > 320
    assert len(set(examples)) == 8
    documents = texts(made("long_document", input_len=300))
    assert shared_words(documents) < 5
    assert all(300 <= words(text) < 310 for text in documents)


def test_rag_repeats_passages_with_decreasing_frequency() -> None:
    requests = made("rag", num_prompts=60, input_len=80)
    passages = [request.messages[1]["content"].split("\n\n")[:-1] for request in requests]
    counts: dict[str, int] = {}
    for chosen in passages:
        assert len(set(chosen)) == 4
        for passage in chosen:
            counts[passage] = counts.get(passage, 0) + 1
    assert len(counts) <= 16
    assert max(counts, key=counts.__getitem__).startswith("[1]")


def test_generated_code_compiles() -> None:
    request = made("code_edit", input_len=120)[0]
    code = request.messages[0]["content"].split("```python\n")[1].split("\n```")[0]
    compile(f"{code}\n{' ' * 16}pass" if code.endswith(":") else code, "made", "exec")
    assert 120 <= words(code) < 130
    assert request.max_tokens == 120


def test_invalid_sizes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="--num-prompts must be at least 1"):
        Sizes(0)
    with pytest.raises(ConfigError, match="--range-ratio"):
        Sizes(range_ratio=1.0)


def test_tokens_per_word_are_independent_of_a_chat_template() -> None:
    def count(text: str) -> int:
        return 3 * len(text.split())

    assert measure_scale(count) == Scale(3.0, 3.0)
    both = {kind: tuple(count(t) + 17 for t in samples(kind)) for kind in ("prose", "code")}
    assert scale_of(both) == Scale(3.0, 3.0)  # type: ignore[arg-type]
    assert words(Writer(Scale(3.0, 3.0)).prose(Random(0), 300)) == 100


def read(name: str, path: Path, lines: list[object] | str, **sizes: int) -> RequestFile:
    text = lines if isinstance(lines, str) else "\n".join(map(json.dumps, lines))
    path.write_text(text)
    return read_request_file(name, path, Sizes(**sizes), WRITER, "0")


def test_a_trace_is_sorted_and_invalid_lines_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    good = {"timestamp": 5, "prompt": "one two", "max_tokens": 7}
    lines = [
        json.dumps(good),
        "{not json",
        "",
        json.dumps({"timestamp": 1.5, "messages": [{"role": "user", "content": "Hi"}]}),
        json.dumps({"prompt": "no time"}),
        json.dumps({"timestamp": -1, "prompt": "x"}),
        json.dumps({"timestamp": 1, "prompt": "x", "output_tokens": "many"}),
        json.dumps({"timestamp": 1, "messages": [{"role": "user"}]}),
        json.dumps([1]),
        json.dumps({"timestamp": 1, "prompt": []}),
    ]
    found = read("timed_trace", path, "\n".join(lines))
    assert [(request.at, request.max_tokens) for request in found.requests] == [
        (1.5, 128),
        (5.0, 7),
    ]
    numbers = [problem.split(":")[0] for problem in found.problems]
    assert numbers == [f"line {n}" for n in (2, 5, 6, 7, 8, 9, 10)]
    with pytest.raises(
        ConfigError, match=r"7 invalid lines(.|\n)*line 2: is not JSON(.|\n)*and 2 more"
    ):
        raise_problems(path, found.problems)


def test_equal_hashes_of_a_trace_become_equal_texts(tmp_path: Path) -> None:
    lines: list[object] = [
        {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 600, "output_length": 8, "hash_ids": [1, 7]},
    ]
    first, second = read("timed_trace", tmp_path / "t.jsonl", lines).requests
    assert (second.at, second.max_tokens) == (2.5, 8)
    assert [words(str(request.prompt)) for request in (first, second)] == [1100, 600]
    assert shared_words([str(first.prompt), str(second.prompt)]) == 512


def test_custom_prompts_and_token_ids(tmp_path: Path) -> None:
    lines: list[object] = [{"prompt": "Hi"}, {"a": 1}, {"prompt": [1, 2, 3]}, {"prompt": "Ho"}]
    found = read("custom", tmp_path / "c.jsonl", lines, num_prompts=2, output_len=3)
    assert [request.as_prompt() for request in found.requests] == ["Hi", [1, 2, 3]]
    assert found.problems == ['line 2: has neither "prompt" nor "messages"']


def test_sharegpt_takes_the_first_turn(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "one two three"}]
    value = json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, 5])
    found = read("sharegpt", tmp_path / "s.json", value)
    assert found.requests == [TextRequest(3, prompt="Why?")]
    assert sorted(problem.split(":")[0] for problem in found.problems) == [
        "conversation 2",
        "conversation 3",
    ]


@pytest.mark.parametrize("text", ["{", "{}", ""])
def test_empty_or_invalid_files_are_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--dataset-path"):
        read("sharegpt", tmp_path / "s.json", text)
    with pytest.raises(ConfigError, match="--dataset-path"):
        read_request_file("custom", tmp_path / "missing", Sizes(), WRITER, "0")
