"""The sandbox compiles harmless grammars; a refusal names the limit that was exceeded."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from windlass.config import GrammarConfig
from windlass.core.structured import StructuredOutputs
from windlass.errors import EngineError
from windlass.models.dummy import ByteTokenizer
from windlass.text.grammar.sandbox import Cancellation, Sandbox, Verdict
from windlass.text.grammar.vocabulary import Vocabulary

pytest.importorskip("llguidance")

VOCABULARY = Vocabulary.of(ByteTokenizer(300, (256,)), 300)
ENDLESS = {"json": {"type": "integer", "multipleOf": 99999937}}  # takes hours and gigabytes
# Endless grammars reach these limits at once; harmless ones take milliseconds.
CONFIG = GrammarConfig(grammar_compile_timeout=1.0, grammar_memory_bytes=128 * 2**20)


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


def chain(length: int) -> str:
    rules = "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(length))
    return f'start: a0\n{rules}\na{length}: "x"'


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(VOCABULARY, CONFIG)
    yield made
    made.close()


def check(sandbox: Sandbox, fields: dict[str, Any]) -> Verdict:
    return sandbox.check(StructuredOutputs(**fields), Cancellation())


HARMLESS = {
    "schema": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    "true": {"json": True},
    "object": {"json_object": True},
    "regex": {"regex": r"\d{3}"},
    "choices": {"choice": [f"choice {i}" for i in range(3000)]},
    "lark": {"grammar": 'start: "yes" | "no"'},
    "gbnf": {"grammar": 'root ::= "a" [0-9]'},
    "deep": {"json": nested(50)},
    "long": {"json": {"type": "string", "minLength": 5000, "maxLength": 60000}},
    "properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(400)}}
    },
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_grammars_compile(sandbox: Sandbox, name: str) -> None:
    verdict = check(sandbox, HARMLESS[name])
    assert verdict.refused == ""
    assert verdict.grammar
    assert 0 < verdict.num_bytes < CONFIG.grammar_memory_bytes


REFUSED = {
    # Which limit is met first depends on the machine.
    "endless": (
        ENDLESS,
        r"more than (1 s of CPU time \(--grammar-compile-timeout|128 MiB of memory)",
    ),
    "unsatisfiable": ({"json": {"$ref": "#"}}, "no text satisfies it"),
    "contradiction": (
        {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        "Unsatisfiable",
    ),
    "wrong type": ({"json": {"type": "objekt"}}, "Invalid type: objekt"),
    "unclosed": ({"regex": "(a"}, "unclosed group"),
    "unknown rule": ({"grammar": "start: missing"}, "unknown name"),
    "repeats": ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, "too many expressions"),
    "groups": (
        {"regex": "(" * 10_000 + "a" + ")" * 10_000},
        "maximum number of nested parentheses",
    ),
    "deep schema": ({"json": nested(300)}, "nested too deeply"),
    "deep gbnf": ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested too deeply"),
    "long chain": ({"grammar": chain(3000)}, "nested too deeply"),
    "bad gbnf": ({"grammar": 'root ::= "a" ( "b"'}, "."),
    "properties": (
        {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}},
        "items",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_grammars_are_refused_with_the_reason(sandbox: Sandbox, name: str) -> None:
    fields, reason = REFUSED[name]
    verdict = check(sandbox, fields)
    assert verdict.refused
    assert len(verdict.refused) <= 800
    assert re.search(reason, verdict.refused, re.DOTALL), verdict.refused
    assert verdict.final


def test_memory_is_limited() -> None:
    config = GrammarConfig(grammar_compile_timeout=60.0, grammar_memory_bytes=16 * 2**20)
    sandbox = Sandbox(VOCABULARY, config)
    verdict = check(sandbox, {"json": {"type": "integer", "multipleOf": 999_983}})
    sandbox.close()
    assert "more than 16 MiB of memory (--grammar-memory)" in verdict.refused


def test_a_compilation_can_be_cancelled() -> None:
    patient = Sandbox(VOCABULARY, GrammarConfig(grammar_compile_timeout=600.0))
    patient.start()
    cancellation, ended = Cancellation(), []

    def wait() -> None:
        try:
            patient.check(StructuredOutputs(**ENDLESS), cancellation)
        except EngineError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    assert check(patient, HARMLESS["regex"]).refused == "", "other grammars compile meanwhile"
    cancellation.cancel()
    thread.join(60)
    patient.close()
    assert ended == ["no request waits for this grammar any longer."]


def test_a_process_that_died_is_replaced() -> None:
    sandbox = Sandbox(VOCABULARY, CONFIG)
    assert check(sandbox, HARMLESS["regex"]).refused == ""
    first = sandbox.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert check(sandbox, HARMLESS["regex"]).refused == ""
    assert sandbox.pid not in (None, first)
    sandbox.close()
    assert sandbox.pid is None


def test_the_process_imports_no_torch() -> None:
    program = "import sys, windlass.text.grammar.worker, llguidance; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert {"torch", "numpy", "msgspec", "zmq"} & set(result.stdout.split()) == set()
