"""Structured outputs: exactly the tokens that break the grammar are masked."""

from __future__ import annotations

import json
import re
import threading
import time
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runner.test_deterministic import CONFIG
from windlass import LLM, SamplingParams, StructuredOutputs
from windlass.config import GrammarConfig
from windlass.core.types import NewRequest, SlotId, SlotInit
from windlass.errors import EngineError, RequestError
from windlass.models.dummy import ByteTokenizer
from windlass.runner.grammar import Grammar, open_grammar
from windlass.runner.sampler import Sampler
from windlass.text.grammar import matchers as matchers_module
from windlass.text.grammar.backend import GrammarBackend
from windlass.text.grammar.compiler import GrammarCompiler
from windlass.text.grammar.matcher import RequestMatcher
from windlass.text.grammar.matchers import RequestMatchers

pytest.importorskip("llguidance")

HANG_GUARD_S = 120
NUMBERS = count()
ENDLESS = {"type": "integer", "multipleOf": 99999937}  # hours, gigabytes
EOS = 256
VOCAB = 300
TOKENIZER = ByteTokenizer(VOCAB, (EOS,))
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": r"^\d{2}-[\dx]$"},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["id", "colour"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": r"\d{3}[\d.]{2}"}, r"[0-9]{3}[0-9.]{2}"),
    "choice": ({"choice": ["red", 'gr"een', "blue\n"]}, 'red|gr"een|blue\n'),
    "lark": ({"grammar": 'start: "yes" | "no" " indeed"?'}, "yes|no( indeed)?"),
    "gbnf": ({"grammar": 'root ::= "a" [0-9] [0-9]? "z"'}, "a[0-9][0-9]?z"),
    "json": (
        {"json": SCHEMA},
        r'\{\s*"id"\s*:\s*"[0-9]{2}-[0-9x]"\s*,\s*"colour"\s*:\s*"(red|green)"\s*\}',
    ),
}


@cache
def grammars() -> GrammarCompiler:
    """Shared by all tests, because its sandbox starts slowly."""
    config = GrammarConfig()
    return GrammarCompiler(GrammarBackend(lambda: TOKENIZER, VOCAB + 4, config), config)


@cache
def matchers() -> RequestMatchers:
    return RequestMatchers(grammars().built, GrammarConfig(), VOCAB + 4)


def admission(form: dict[str, Any], tokens: bytes = b"", **sampling: Any) -> SlotInit:
    """The SlotInit of a request with a compiled grammar."""
    params = SamplingParams(structured_outputs=form, **sampling)
    name = f"request {next(NUMBERS)}"
    grammars().enter(name, params.structured_outputs)
    deadline = time.monotonic() + HANG_GUARD_S
    while not grammars().ready(name):
        assert time.monotonic() < deadline, "the grammar is never compiled"
        grammars().begin()
    return SlotInit(
        request_id=name,
        slot=SlotId(0),
        tokens=[1, 2, *tokens],
        num_prompt=2,
        sampling=params,
        stop_ids=frozenset({EOS}),
        seed=7 if params.seed is None else params.seed,
        grammar=grammars().acquire(name),
    )


def write(new: SlotInit, max_tokens: int = 200) -> str | None:
    """The output of a model with uniform logits; None if it has not ended."""
    sampler = Sampler(VOCAB + 4, torch.device("cpu"))
    sampler.grammars = matchers()
    sampler.admit(new)
    out = bytearray(new.tokens[2:])
    for _ in range(max_tokens):
        (token,), _ = sampler.sample(torch.zeros(1, VOCAB + 4), [0])
        assert not matchers().take_failures()
        if token == EOS:
            return out.decode()
        out.append(token)
    return None


def test_masks_computed_in_parallel_equal_those_of_each_request(monkeypatch) -> None:
    forms = [form for form, _ in FORMS.values()]
    alone, together = ([matchers().open(admission(form)) for form in forms] for _ in "ab")
    for turn in range(6):
        slow = turn == 2
        monkeypatch.setattr(matchers_module, "_SLOW_S", 0.0 if slow else 9.0)
        matchers().prefetch(together)
        assert matchers()._was_slow == slow
        if turn == 3:  # after slow masks the next ones are computed one by one
            assert all(each._next_mask is None for each in together)
        for one, other in zip(alone, together, strict=True):
            mask = one.mask()
            assert mask is not None
            assert (other.mask() or b"")[: len(mask)] == mask
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token = int(np.flatnonzero(bits)[0])
            one.take(token)
            other.take(token)
    assert not matchers().take_failures()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FORMS)
def test_outputs_satisfy_the_grammar(name: str, seed: int) -> None:
    form, expected = FORMS[name]
    text = write(admission(form, seed=seed))
    assert text is not None
    assert re.fullmatch(expected, text), text
    if name == "json":
        json.loads(text)


def test_any_object_is_json() -> None:
    """Random outputs may not end; those that end must be objects."""
    texts = [
        write(admission({"json_object": True}, seed=seed), max_tokens=60) for seed in range(40)
    ]
    ended = [text for text in texts if text is not None]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_a_preempted_request_continues_its_grammar() -> None:
    assert write(admission(FORMS["gbnf"][0], b"a1")) in {"a1z", *(f"a1{i}z" for i in range(10))}


@pytest.mark.parametrize(
    "sampling",
    [
        {"allowed_token_ids": [ord("q")]},
        {"min_tokens": 9, "max_tokens": 20},
        {"bad_token_ids": ((ord("y"),), (ord("n"),))},
    ],
)
def test_the_grammar_takes_precedence_over_other_params(sampling: dict[str, Any]) -> None:
    assert write(admission(FORMS["lark"][0], **sampling)) in {"yes", "no", "no indeed"}


def test_other_params_apply_to_the_allowed_tokens() -> None:
    for seed in range(5):
        sampling = {"logit_bias": {ord("y"): -100.0}, "seed": seed}
        assert write(admission(FORMS["lark"][0], **sampling)) in {"no", "no indeed"}


def allowed(grammar: Grammar) -> list[int]:
    scores = torch.zeros(VOCAB + 4)
    return grammar.mask(scores, scores).isfinite().nonzero().flatten().tolist()


def test_requests_share_a_grammar_but_not_its_state() -> None:
    before = grammars().stats().num_checks
    made = [open_grammar(matchers(), admission({"regex": "a[0-9]{2}"})) for _ in range(2)]
    first, second = made
    assert first is not None
    assert second is not None
    first.take(ord("a"))
    assert allowed(first) == list(range(ord("0"), ord("9") + 1))
    assert allowed(second) == [ord("a")]
    assert grammars().stats().num_checks == before + 1


def test_a_rejected_token_ends_the_request() -> None:
    new = admission(FORMS["gbnf"][0])
    grammar = open_grammar(matchers(), new)
    assert grammar is not None
    grammar.take(ord("q"))
    (failure,) = matchers().take_failures()
    assert failure.request_id == new.request_id
    error = grammars().fail(failure)
    assert isinstance(error, RequestError)
    assert "doesn't satisfy the grammar" in str(error)
    assert "\n" not in str(error)
    scores = torch.zeros(VOCAB + 4)
    assert grammar.mask(scores, scores).equal(scores)


def test_steps_of_an_ambiguous_grammar_are_bounded() -> None:
    """Each mask takes longer than the one before, until the request has used up its time."""
    new = admission({"grammar": 'start: s\ns: s s | s s s | "a" | ""'})
    grammar = open_grammar(matchers(), new)
    assert grammar is not None
    for _ in range(2000):
        allowed(grammar)
        grammar.take(ord("a"))
        failures = matchers().take_failures()
        if failures:
            break
    (failure,) = failures
    assert failure.too_slow
    assert isinstance(grammars().fail(failure), RequestError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"head_dim": 16, "intermediate_size": 224, "vocab_size": VOCAB, "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    return path


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", device="cpu", num_blocks=100, **options)


def backend_of(llm: LLM) -> GrammarBackend:
    return llm.engine._scheduler.grammars._backend


def test_the_sandbox_ends_with_its_llm(folder: Path) -> None:
    """The garbage collector does not look at an engine, so the sandbox must not wait for it."""
    llm = make(folder)
    llm.generate("x", SamplingParams(max_tokens=2, structured_outputs={"regex": "[a-z]+"}))
    made = backend_of(llm)._made
    assert made is not None
    assert made[0].pid is not None
    del llm
    assert made[0].pid is None


@pytest.mark.parametrize("options", [{}, {"plain_kernels": True}, {"enforce_eager": True}])
def test_requests_with_and_without_a_grammar_run_together(folder: Path, options: Any) -> None:
    llm = make(folder, **options)
    free = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    alone = llm.generate([[5, 6]], free)[0].outputs[0].token_ids
    formed = [
        SamplingParams(structured_outputs=form, max_tokens=150, seed=1)
        for form, _ in FORMS.values()
    ]
    results = llm.generate([[5, 6]] * (1 + len(formed)), [free, *formed])
    assert results[0].outputs[0].token_ids == alone
    for result, (_, expected) in zip(results[1:], FORMS.values(), strict=True):
        output = result.outputs[0]
        assert (bool(re.fullmatch(expected, output.text)), output.finish_reason) == (True, "stop")


def test_a_request_whose_grammar_fails_ends_alone(folder: Path, monkeypatch) -> None:
    llm = make(folder)
    engine, outputs = llm.engine, {}
    params = SamplingParams(structured_outputs={"regex": "a{5}"}, max_tokens=9)
    monkeypatch.setattr(RequestMatcher, "take", lambda self, _: self._on_fail("too hard", False))
    groups = llm._requests.groups(
        [[5], [5]], [params, SamplingParams(max_tokens=3)], ["", ""], ["", ""]
    )
    for group in groups:
        engine.add(group.requests[0])
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert outputs["0-0"][-1].error == "structured_outputs: too hard"
    assert outputs["1-0"][-1].finish == "length"
    with pytest.raises(RequestError, match="too hard"):
        llm.generate([[5]], params)


def test_other_requests_run_while_the_vocabulary_is_built(folder: Path, monkeypatch) -> None:
    llm, go = make(folder), threading.Event()
    opener = lambda: go.wait(HANG_GUARD_S) and TOKENIZER  # noqa: E731
    monkeypatch.setattr(backend_of(llm), "_open_tokenizer", opener)
    engine, ended = llm.engine, []
    form = SamplingParams(structured_outputs={"regex": "a{3}"}, max_tokens=9)
    free = SamplingParams(max_tokens=3, ignore_eos=True)
    for name, params in (("form", form), ("gone", form), ("free", free)):
        engine.add(NewRequest(name, [5], params))
    engine.abort("gone")
    while not ended:
        ended += [output.request_id for output in engine.step() if output.finish]
    assert ended == ["free"]
    assert engine.has_work
    go.set()
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish == "stop"]
    assert ended == ["free", "form"]


def test_a_failed_vocabulary_fails_only_requests_with_grammars(folder: Path, monkeypatch) -> None:
    def broken() -> ByteTokenizer:
        raise OSError("no such file")

    llm = make(folder)
    form = SamplingParams(structured_outputs={"regex": "a{3}"}, max_tokens=9)
    monkeypatch.setattr(backend_of(llm), "_open_tokenizer", broken)
    with pytest.raises(EngineError, match="cannot be made: OSError: no such file"):
        llm.generate([[5]], form)
    monkeypatch.setattr(backend_of(llm), "_open_tokenizer", lambda: TOKENIZER)
    assert llm.generate([[5]], form)[0].outputs[0].text == "aaa"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"json": "{"}, "not JSON"),
        ({"json": False}, "nothing satisfies"),
        ({"choice": "red"}, "choice must be a list"),
        ({"choice": ["red", ""]}, "choice must be a list"),
        ({"xml": "a"}, "xml"),
    ],
)
def test_invalid_structured_outputs_are_rejected(form: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=form)


def test_large_or_deep_schemas_are_rejected_before_compilation() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested too deeply"):
        StructuredOutputs(json=deep)
    with pytest.raises(RequestError, match="nested too deeply"):
        StructuredOutputs(json='{"items":' * 5000 + "{}" + "}" * 5000)
    with pytest.raises(RequestError, match="at most 65,536"):
        StructuredOutputs(regex="a" * 70_000)
    with pytest.raises(RequestError, match="at most 65,536"):
        StructuredOutputs(choice=["a" * 1000] * 70)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"json": {"$ref": "#"}}, "no text satisfies it"),
        ({"json": ENDLESS}, "more than 1 s of CPU time"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, "too many expressions"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"grammar": 'root ::= "a" ( "b"'}, "."),
    ],
)
def test_a_grammar_that_does_not_compile_fails_only_its_request(
    quick: LLM, form: dict[str, Any], message: str
) -> None:
    params = SamplingParams(structured_outputs=form, max_tokens=9)
    for _ in range(2):
        with pytest.raises(RequestError, match=message):
            quick.generate([[5]], params)
    assert not quick.engine.has_work


@pytest.fixture(scope="module")
def quick(folder: Path) -> LLM:
    return make(folder, grammar_compile_timeout=1.0)


def test_other_requests_run_while_an_endless_grammar_compiles(folder: Path) -> None:
    llm = make(folder, grammar_compile_timeout=600.0)
    engine = llm.engine
    endless = SamplingParams(structured_outputs={"json": ENDLESS}, max_tokens=9)
    harmless = SamplingParams(structured_outputs={"regex": "a{3}"}, max_tokens=9)
    free = SamplingParams(max_tokens=50, ignore_eos=True)
    for name, params in (("endless", endless), ("harmless", harmless), ("free", free)):
        engine.add(NewRequest(name, [5], params))
    ended: list[str] = []
    while len(ended) < 2:
        ended += [output.request_id for output in engine.step() if output.finish]
    assert sorted(ended) == ["free", "harmless"]
    assert engine.stats().grammars.num_waiting == 1
    engine.abort("endless")
    assert not engine.has_work
    assert engine.stats().grammars.num_waiting == 0


def test_structured_outputs_need_an_eos_token(tmp_path: Path) -> None:
    config = {**CONFIG, "head_dim": 16, "vocab_size": VOCAB}
    config.pop("eos_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="needs a token that ends an output"):
        make(tmp_path).generate([[5]], SamplingParams(structured_outputs={"regex": "a"}))
