"""Reasoning within a token budget, and grammars that begin behind the reasoning."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runner.test_deterministic import CONFIG
from windlass import LLM, SamplingParams
from windlass.core.reasoning import ReasoningPhase
from windlass.errors import RequestError
from windlass.models.dummy import ByteTokenizer
from windlass.text.chat_output import chat_output
from windlass.text.grammar.reasoning import ReasoningFollower, Stage
from windlass.text.parsing.output import ToolSet
from windlass.text.parsing.registry import choose_format

END = tuple(b"</think>")
OPEN = ReasoningPhase(ends=(END,), closing=END, max_tokens=5)
VOCAB, EOS = 300, 256
TOKENIZER = ByteTokenizer(VOCAB, (EOS,))
THINKING = "<tool_call>{{ messages[0].content }}<think>"


def follow(phase: ReasoningPhase, tokens: bytes) -> tuple[bytes, Stage]:
    """What is written if a model writes `tokens` unless another is forced."""
    follower, written = ReasoningFollower(phase), b""
    for token in tokens:
        forced = follower.forced
        token = token if forced is None else forced
        follower.take(token)
        written += bytes([token])
    return written, follower.stage


def test_the_budget_closes_the_reasoning() -> None:
    assert follow(OPEN, b"abc") == (b"abc", Stage.REASONING)
    assert follow(OPEN, b"a" * 15) == (b"aaaaa</think>aa", Stage.ANSWER)
    assert follow(replace(OPEN, max_tokens=0), b"a" * 9) == (b"</think>a", Stage.ANSWER)
    assert follow(replace(OPEN, max_tokens=None), b"a" * 99) == (b"a" * 99, Stage.REASONING)


def test_reasoning_may_end_before() -> None:
    phase = replace(OPEN, max_tokens=20)
    written = b"hm</think>" + b"a" * 30
    assert follow(phase, written) == (written, Stage.ANSWER)


def test_an_output_may_begin_with_the_answer() -> None:
    phase = replace(OPEN, start=tuple(b"<think>"))
    assert follow(phase, b"<thin air") == (b"<thin air", Stage.ANSWER)
    assert follow(phase, b"<thi") == (b"<thi", Stage.UNDECIDED)
    assert follow(phase, b"<think>" + b"a" * 14) == (b"<think>aaaaa</think>a", Stage.ANSWER)


def test_a_longer_text_may_close_the_reasoning() -> None:
    phase = ReasoningPhase(ends=(tuple(b"final:"),), closing=tuple(b"|end|final:"), max_tokens=2)
    assert follow(phase, b"a" * 14) == (b"aa|end|final:a", Stage.ANSWER)


def test_a_mask_waits_for_a_token_only_near_the_budget() -> None:
    follower = ReasoningFollower(OPEN)
    follower.take(ord("a"))
    assert [follower.may_force(count) for count in range(6)] == [False] * 4 + [True] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"head_dim": 16, "intermediate_size": 224, "vocab_size": VOCAB, "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    return path


@pytest.fixture(scope="module", params=["", "n-gram", "eager"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    options: dict[str, Any] = {
        "": {},
        "n-gram": {"spec": "ngram"},
        "eager": {"enforce_eager": True},
    }[request.param]
    return LLM(str(folder), load_format="dummy", device="cpu", num_blocks=200, **options)


def params(prompt: str = "<think>", tools: ToolSet | None = None, **given: Any) -> SamplingParams:
    """The sampling params of a chat with a model that reasons."""
    sampling = SamplingParams(max_tokens=120, **given)
    made = chat_output(
        choose_format(THINKING, "auto", "auto"), tools, sampling, prompt=prompt, tokenizer=TOKENIZER
    )
    return made.sampling


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode("latin-1")


def test_budgets_in_one_batch(llm: LLM) -> None:
    budgets = [0, 1, 7, 40, None]
    # A token that never ends the output, and a bias that never writes a tag by chance.
    common = {"seed": 3, "ignore_eos": True, "temperature": 0.0}
    sampling = [params(thinking_token_budget=budget, **common) for budget in budgets]
    results = llm.generate([[5, 6]] * len(budgets), sampling)
    texts = [text_of(result.outputs[0].token_ids) for result in results]
    free = results[-1].outputs[0].token_ids
    for budget, result, text in zip(budgets[:-1], results[:-1], texts[:-1], strict=True):
        tokens = result.outputs[0].token_ids
        assert tokens[:budget] == free[:budget]
        assert tuple(tokens[budget : budget + len(END)]) == END
        assert "</think>" in text
    assert "</think>" not in texts[-1]


def test_the_answer_follows_its_grammar(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    forms = [{"json": schema}, {"regex": "[0-9]{3}"}]
    for budget in (0, 9):
        given = [
            params(thinking_token_budget=budget, structured_outputs=form, seed=budget)
            for form in forms
        ]
        results = llm.generate([[5, 6]] * 2, given)
        for result, pattern in zip(
            results, (r"\{\s*\"a\"\s*:\s*(1|22)\s*\}", "[0-9]{3}"), strict=True
        ):
            tokens = result.outputs[0].token_ids
            assert tuple(tokens[budget : budget + len(END)]) == END
            answer = text_of(tokens[budget + len(END) :])
            assert re.fullmatch(pattern, answer), answer
            assert result.outputs[0].finish_reason == "stop"


def test_required_calls_follow_the_reasoning(llm: LLM) -> None:
    tools = ToolSet({"now": {}}, max_calls=1, forced=True)
    (result,) = llm.generate([[5]], params(tools=tools, thinking_token_budget=3, seed=1))
    written = text_of(result.outputs[0].token_ids)
    assert re.match(r".{0,3}</think>\[\s*\{\s*\"name\"\s*:\s*\"now\"", written, flags=re.DOTALL)


def test_a_prompt_that_opens_no_reasoning() -> None:
    plain = params("<assistant>", structured_outputs={"regex": "a"})
    assert plain.reasoning is None  # the answer begins at once
    limited = params("<assistant>", thinking_token_budget=3)
    assert limited.reasoning is not None
    assert limited.reasoning.start == tuple(b"<think>")
    # The grammar could not tell the tokens of the tag from an answer.
    both = params("<assistant>", thinking_token_budget=3, structured_outputs={"regex": "a"})
    assert both.reasoning is None


class OneToken(ByteTokenizer):
    """Writes each tag as one token."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        parts = re.split("(<think>|</think>)", text)
        ids = {"<think>": [290], "</think>": [291]}
        pieces = [
            ids.get(part) or super(OneToken, self).encode(part, False) for part in parts if part
        ]
        return super().encode("", add_special) + [token for piece in pieces for token in piece]


def test_a_model_may_open_its_reasoning_before_a_grammar(llm: LLM) -> None:
    sampling = SamplingParams(
        max_tokens=60,
        thinking_token_budget=4,
        structured_outputs={"regex": "[0-9]{3}"},
        temperature=0.0,
        logit_bias={290: 100.0},
    )
    made = chat_output(
        choose_format(THINKING, "auto", "auto"),
        None,
        sampling,
        prompt="<assistant>",
        tokenizer=OneToken(VOCAB, (EOS,)),
    )
    assert made.parsing.reasoning is not None
    tokens = llm.generate([[5]], made.sampling)[0].outputs[0].token_ids
    assert tokens[0] == 290
    assert tokens[5] == 291
    assert re.fullmatch("[0-9]{3}", text_of(tokens[6:]))
    without = replace(made.sampling, logit_bias={290: -100.0})
    tokens = llm.generate([[5]], without)[0].outputs[0].token_ids
    assert re.fullmatch("[0-9]{3}", text_of(tokens))


def test_a_model_may_reason_before_an_answer_of_a_format() -> None:
    tools = ToolSet({"now": {}})
    required = replace(tools, forced=True)
    for prompt, start in (
        ("<assistant>", (290,)),
        ("<think>", ()),
        ("<think>\n\n</think>\n\n", None),
    ):
        for given, form in ((None, {"regex": "a"}), (tools, {"regex": "a"}), (required, None)):
            made = chat_output(
                choose_format(THINKING, "auto", "auto"),
                given,
                SamplingParams(structured_outputs=form),
                prompt=prompt,
                tokenizer=OneToken(VOCAB, (EOS,)),
            )
            phase = made.sampling.reasoning
            assert (None if phase is None else phase.start) == start
            assert (made.parsing.reasoning is None) == (phase is None)


class Merging(ByteTokenizer):
    """Merges the end of a tag with a line feed, as BPE does."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        pieces = text.split(">\n")
        tokens = super().encode(pieces[0], add_special)
        for piece in pieces[1:]:
            tokens += [299, *super().encode(piece, False)]
        return tokens


def test_tags_without_own_tokens_cannot_be_followed() -> None:
    given = {"prompt": "<think>", "tokenizer": Merging(VOCAB, (EOS,))}
    form = choose_format(THINKING, "auto", "auto")
    with pytest.raises(RequestError, match="tokens of their own"):
        chat_output(form, None, SamplingParams(thinking_token_budget=3), **given)
    structured = SamplingParams(structured_outputs={"regex": "a"})
    assert chat_output(form, None, structured, **given).sampling.reasoning is None


def test_harmony_ends_in_the_final_channel() -> None:
    form = choose_format("<|channel|><|message|>", "auto", "auto")
    sampling = SamplingParams(thinking_token_budget=3)
    made = chat_output(form, None, sampling, prompt="<|start|>assistant", tokenizer=TOKENIZER)
    phase = made.sampling.reasoning
    assert phase is not None
    assert bytes(phase.closing) == b"<|end|><|start|>assistant<|channel|>final<|message|>"
    finals = [
        b"<|channel|>final<|message|>",
        b"<|channel|>final json<|message|>",
        b"<|channel|>final<|constrain|>json<|message|>",
        b"<|channel|>final <|constrain|>json<|message|>",
    ]
    assert list(map(bytes, phase.ends)) == [*finals, b"<|channel|>commentary"]
    structured = SamplingParams(structured_outputs={"regex": "a"})
    made = chat_output(form, None, structured, prompt="<|start|>assistant", tokenizer=TOKENIZER)
    assert made.sampling.reasoning is not None
    assert list(map(bytes, made.sampling.reasoning.ends)) == finals
    assert made.parsing.dialect is form.dialect


def test_a_budget_needs_a_chat(llm: LLM) -> None:
    with pytest.raises(RequestError, match="needs a chat"):
        llm.generate([[5]], SamplingParams(thinking_token_budget=3))


def test_strict_calls_begin_behind_the_reasoning() -> None:
    tools = ToolSet({"now": {}}, strict=frozenset(["now"]))
    strict = params(tools=tools)
    assert strict.structured_outputs is not None
    assert strict.structured_outputs.calls is not None
    assert strict.reasoning is not None
    # The tag has several tokens here, and the grammar allows it as text.
    assert params("<assistant>", tools=tools).reasoning is None
    with pytest.raises(RequestError, match="tokens of their own"):
        params("<assistant>", tools=tools, thinking_token_budget=3)
    form = choose_format("<|channel|><|message|>", "auto", "auto")
    given = {"prompt": "<|start|>assistant", "tokenizer": TOKENIZER}
    with pytest.raises(RequestError, match="harmony calls"):
        chat_output(form, tools, SamplingParams(thinking_token_budget=3), **given)
    made = chat_output(form, tools, SamplingParams(), **given)
    assert made.sampling.reasoning is None
    assert made.parsing.dialect is form.dialect
