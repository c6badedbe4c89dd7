"""A model that counts, with faults on demand: real scheduler, real engine, no torch.

Words in a prompt trigger a behaviour: SLOW, EOS, DRAFT, CRASH, HANG, DIE. SAY(…)YAS makes the model say
what is between.
"""

from __future__ import annotations

import math
import os
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.core.schedulers import make_scheduler
from windlass.config import GrammarConfig, SchemaStrictness
from windlass.core.blocks import BlockPool
from windlass.core.card import Capacity, EngineReport, MemoryPart, MemoryReport, ModelCard
from windlass.core.kv_layout import KVLayout
from windlass.core.limits import SchedulerLimits
from windlass.core.types import Row, RowResult, SlotInit, StepPlan, StepResult, TokenLogprob
from windlass.engine import Engine
from windlass.errors import CheckpointError
from windlass.serve.loop import Build
from windlass.text.grammar.backend import GrammarBackend
from windlass.text.grammar.compiler import GrammarCompiler

BOS, EOS, VOCAB = 256, 257, 258

TEMPLATE = """{%- for message in messages %}
{%- if message['role'] == 'system' and not loop.first %}
{{ raise_exception('System message must come first.') }}
{%- endif %}
{{- '<' + message['role'] + '>' + message['content'] + '</>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


class Bytes:
    """A tokenizer with one token per UTF-8 byte."""

    vocab_size = VOCAB
    eos_ids = (EOS,)
    max_token_chars = 4
    special_ids = (BOS, EOS)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def encode_all(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special) for text in texts]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        return [self.encode(first + second) for first, second in pairs]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if skip_special:
            return bytes(i for i in ids if i < 256).decode(errors="replace")
        return "".join(self.token_text(i) for i in ids)

    def token_text(self, token: int) -> str:
        return {BOS: "<s>", EOS: "</s>"}.get(token) or bytes([token]).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.token_text(token).encode()

    def byte_pieces(self, skip_special: bool) -> None:  # noqa: ARG002
        return None


CARD = ModelCard(
    name="counter",
    path="/models/counter",
    architecture="Counter",
    max_positions=4096,
    tokenizer=Bytes(),
    chat_template=TEMPLATE,
    special_tokens={},
)


class CountingRunner:
    """The token at position p is the letter number p modulo 26: "abc…zabc…"."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._rows: dict[int, SlotInit] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admitted:
            self._rows[admission.slot] = admission
        texts = [bytes(t for t in self._rows[r.slot].tokens if t < 256) for r in plan.rows]
        self._inject_fault(b" ".join(texts))
        rows = zip(plan.rows, texts, strict=True)
        return StepResult([self._row(row, text) for row, text in rows])

    def _inject_fault(self, text: bytes) -> None:
        if b"DIE" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if b"HANG" in text:
            time.sleep(60)
        if b"CRASH" in text:
            raise ValueError("the counter is broken")
        time.sleep(0.01 if b"SLOW" in text else self._step_s)

    def _row(self, row: Row, text: bytes) -> RowResult:
        admission = self._rows[row.slot]
        end = row.start + row.num_tokens
        scores = None
        if admission.sampling.prompt_logprobs is not None:
            last = min(end, admission.num_prompt - 1)
            scores = [self._score(admission.tokens[p]) for p in range(row.start + 1, last + 1)]
        if not row.sample:
            return RowResult([], prompt_logprobs=scores)
        if b"DRAFT" in text:
            return self._verify(row)
        token = ord("a") + end % 26
        if admission.pooling is not None:
            return RowResult([token], pooled=struct.pack("<2f", len(text), token))
        if b"EOS" in text and end - admission.num_prompt >= 3:
            token = EOS
        if b"SAY(" in text:
            said = text.rpartition(b"SAY(")[2].partition(b")YAS")[0]
            at = end - admission.num_prompt
            token = said[at] if at < len(said) else EOS
        logprobs = [self._score(token)] if admission.sampling.logprobs is not None else None
        return RowResult([token], logprobs, scores)

    def _verify(self, row: Row) -> RowResult:
        """Propose two draft tokens after every step, of which the first is accepted."""
        count = 1 + min(row.num_drafts, 1)
        end = row.start + row.num_tokens - row.num_drafts
        tokens = [ord("a") + (end + i) % 26 for i in range(count)]
        return RowResult(tokens, drafts=(ord("a") + (end + count) % 26, ord("!")))

    def _score(self, token: int) -> TokenLogprob:
        return TokenLogprob(token, logprob=-0.5, rank=1, top=[(token, -0.5), (ord("!"), -math.inf)])


class SleepingMemory:
    """Memory that can be released; `file` exists while the engine sleeps."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)

    def held(self) -> MemoryReport:
        resident = 0 if self._file.exists() else 900
        parts = {"weights": MemoryPart(1000, resident)}
        return MemoryReport("cpu", parts, total=5000 + resident, files=4000)

    def sleep(self) -> None:
        self._file.touch()

    def wake(self) -> None:
        self._file.unlink()


@dataclass(frozen=True)
class Options:
    max_num_seqs: int = 64
    max_model_len: int = 2048
    num_blocks: int = 4096
    step_s: float = 0.0
    sleep_file: str | None = None  # None: the engine cannot release memory
    grammar_compile_timeout: float = 1.0
    schema_strictness: SchemaStrictness = "relaxed"
    default_tpot_ms: float | None = None


def build_engine(options: Options) -> tuple[Engine, EngineReport]:
    layout = KVLayout.unsized(16)
    limits = SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=4096,
        max_model_len=options.max_model_len,
        layout=layout,
        num_blocks=options.num_blocks,
    )
    # Grammars are compiled, but the runner ignores them.
    grammar = GrammarConfig(
        grammar_compile_timeout=options.grammar_compile_timeout,
        schema_strictness=options.schema_strictness,
    )
    grammars = GrammarCompiler(GrammarBackend(Bytes, VOCAB, grammar), grammar)
    pool = BlockPool(options.num_blocks)
    scheduler = make_scheduler(limits, pool, eos_ids=(EOS,), grammars=grammars)
    report = EngineReport(
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        vocab_size=VOCAB,
        capacity=Capacity(
            num_blocks=options.num_blocks,
            layout=layout,
            bytes_per_block=1024,
            reason="set by the test",
        ),
        default_tpot_ms=options.default_tpot_ms,
    )
    memory = SleepingMemory(options.sleep_file) if options.sleep_file is not None else None
    return Engine(scheduler, CountingRunner(options.step_s), memory=memory), report


def counting(options: Options | None = None) -> Build:
    return partial(build_engine, options or Options())


def broken_build() -> tuple[Engine, EngineReport]:
    raise CheckpointError("model.safetensors is cut short: 5 bytes of 80.")


def dying_build() -> tuple[Engine, EngineReport]:
    os._exit(7)


def endless_build() -> tuple[Engine, EngineReport]:
    time.sleep(60)
    raise AssertionError


def build_once(flag: str) -> tuple[Engine, EngineReport]:
    """Build successfully once; later builds fail because the model's files are gone."""
    if os.path.exists(flag):
        raise CheckpointError("the model's folder is gone.")
    with open(flag, "w"):
        pass
    return build_engine(Options())
