"""Outputs of a given form: every token that breaks it is ruled out, and nothing else."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runner.test_deterministic import CONFIG
from windlass import LLM, SamplingParams, StructuredOutputs
from windlass.core.types import Admission, NewRequest, SlotId
from windlass.errors import EngineError, RequestError
from windlass.models.dummy import ByteTokenizer
from windlass.runner.grammar import Grammar, Grammars
from windlass.runner.sampler import Sampler

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


def grammars() -> Grammars:
    return Grammars(lambda: TOKENIZER, VOCAB + 4)


def admission(form: dict[str, Any], tokens: bytes = b"", **wishes: Any) -> Admission:
    wish = SamplingParams(structured_outputs=form, **wishes)
    return Admission("a", SlotId(0), [1, 2, *tokens], 2, wish, frozenset({EOS}), 7)


def write(new: Admission, most: int = 200) -> str:
    """What a model writes that finds all tokens equally likely."""
    sampler = Sampler(VOCAB + 4, torch.device("cpu"))
    sampler.grammars = grammars()
    sampler.admit(new)
    out = bytearray(new.tokens[2:])
    for _ in range(most):
        (token,), _ = sampler.sample(torch.zeros(1, VOCAB + 4), [0])
        if token == EOS:
            assert not sampler.grammars.failed
            return out.decode()
        out.append(token)
    raise AssertionError(f"no end: {bytes(out)!r}")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FORMS)
def test_outputs_have_the_form_that_was_asked_for(name: str, seed: int) -> None:
    form, expected = FORMS[name]
    text = write(admission(form, seed=seed))
    assert re.fullmatch(expected, text), text
    if name == "json":
        json.loads(text)


def test_any_object_is_json() -> None:
    texts = []
    for seed in range(40):
        try:
            texts.append(write(admission({"json_object": True}, seed=seed), most=60))
        except AssertionError:  # a random writer may go on for long
            continue
    assert texts
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_a_preempted_request_goes_on_where_it_was() -> None:
    assert write(admission(FORMS["gbnf"][0], b"a1")) in {"a1z", *(f"a1{i}z" for i in range(10))}


@pytest.mark.parametrize(
    "wishes",
    [
        {"allowed_token_ids": [ord("q")]},
        {"min_tokens": 9, "max_tokens": 20},
        {"bad_token_ids": ((ord("y"),), (ord("n"),))},
    ],
)
def test_the_form_counts_more_than_other_wishes(wishes: dict[str, Any]) -> None:
    assert write(admission(FORMS["lark"][0], **wishes)) in {"yes", "no", "no indeed"}


def test_other_wishes_choose_among_what_the_form_allows() -> None:
    for seed in range(5):
        wishes = {"logit_bias": {ord("y"): -100.0}, "seed": seed}
        assert write(admission(FORMS["lark"][0], **wishes)).startswith("no")


def test_forms_are_prepared_once_and_states_are_apart() -> None:
    made = grammars()
    first, second = (made.open(admission(FORMS["gbnf"][0])) for _ in range(2))
    assert first is not None
    assert second is not None
    assert len(made._ready) == 1
    first.take(ord("a"))
    scores = torch.zeros(VOCAB + 4)
    assert first.rule_out(scores, scores).isfinite().nonzero().flatten().tolist() == list(
        range(ord("0"), ord("9") + 1)
    )
    assert second.rule_out(scores, scores).isfinite().nonzero().flatten().tolist() == [ord("a")]
    for number in range(100):
        made.open(admission({"regex": f"a{number}"}))
    assert len(made._ready) == 64


def test_a_form_that_can_be_followed_no_further_is_told_of() -> None:
    made = grammars()
    grammar = made.open(admission(FORMS["gbnf"][0]))
    assert grammar is not None
    grammar.take(ord("q"))
    assert "doesn't satisfy the grammar" in made.failed["a"]
    assert "\n" not in made.failed["a"]
    scores = torch.zeros(VOCAB + 4)
    assert grammar.rule_out(scores, scores).equal(scores)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = {"head_dim": 16, "intermediate_size": 224, "vocab_size": VOCAB, "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps(CONFIG | sizes))
    return path


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), load_format="dummy", device="cpu", num_blocks=100, **options)


@pytest.mark.parametrize("options", [{}, {"plain_kernels": True}, {"enforce_eager": True}])
def test_requests_with_and_without_a_form_run_together(folder: Path, options: Any) -> None:
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


def test_a_request_whose_form_breaks_ends_alone(folder: Path, monkeypatch) -> None:
    llm = make(folder)
    engine, outputs = llm.engine, {}
    wish = SamplingParams(structured_outputs={"regex": "a{5}"}, max_tokens=9)
    monkeypatch.setattr(Grammar, "take", lambda self, _: self._broke("too hard"))
    jobs = [llm._front.job([5], wish), llm._front.job([5], SamplingParams(max_tokens=3))]
    for job in jobs:
        engine.add(job.requests[0])
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert outputs["0-0"][-1].error == "too hard"
    assert outputs["1-0"][-1].finish == "length"
    with pytest.raises(EngineError, match="too hard"):
        llm.generate([[5]], wish)


def test_others_go_on_while_the_vocabulary_is_made(folder: Path, monkeypatch) -> None:
    llm, go = make(folder), threading.Event()
    monkeypatch.setattr(llm.engine._forms, "_open_tokenizer", lambda: go.wait(60) and TOKENIZER)
    engine, ended = llm.engine, []
    form = SamplingParams(structured_outputs={"regex": "a{3}"}, max_tokens=9)
    free = SamplingParams(max_tokens=3, ignore_eos=True)
    for name, wish in (("form", form), ("gone", form), ("free", free)):
        engine.add(NewRequest(name, [5], wish))
    engine.abort("gone")
    while not ended:
        ended += [output.request_id for output in engine.step() if output.finish]
    assert ended == ["free"]
    assert engine.has_work
    go.set()
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish == "stop"]
    assert ended == ["free", "form"]


def test_a_vocabulary_that_cannot_be_made_is_an_error_of_its_requests(
    folder: Path, monkeypatch
) -> None:
    def broken() -> ByteTokenizer:
        raise OSError("no such file")

    llm = make(folder)
    form = SamplingParams(structured_outputs={"regex": "a{3}"}, max_tokens=9)
    monkeypatch.setattr(llm.engine._forms, "_open_tokenizer", broken)
    with pytest.raises(EngineError, match="cannot be made: OSError: no such file"):
        llm.generate([[5]], form)
    monkeypatch.setattr(llm.engine._forms, "_open_tokenizer", lambda: TOKENIZER)
    assert llm.generate([[5]], form)[0].outputs[0].text == "aaa"


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"regex": ""}, "regex must be a text"),
        ({"json": "{"}, "no JSON"),
        ({"json": False}, "nothing satisfies"),
        ({"choice": "red"}, "choice must be a list"),
        ({"choice": ["red", ""]}, "choice must be a list"),
        ({"xml": "a"}, "xml"),
    ],
)
def test_what_is_no_form_is_refused(form: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        SamplingParams(structured_outputs=form)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"json": {"type": "objekt"}}, "Invalid type: objekt"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"regex": "(a"}, "unclosed group"),
        ({"grammar": "start: nobody"}, "unknown name"),
        ({"grammar": 'root ::= "a" ( "b"'}, "."),
        ({"regex": "a" * 70_000}, "at most 65,536"),
    ],
)
def test_what_cannot_be_followed_is_refused(form: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        StructuredOutputs(**form).check()


def test_a_model_without_an_end_cannot_write_forms(tmp_path: Path) -> None:
    config = {**CONFIG, "head_dim": 16, "vocab_size": VOCAB}
    config.pop("eos_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="needs a token that ends an output"):
        make(tmp_path).generate([[5]], SamplingParams(structured_outputs={"regex": "a"}))
