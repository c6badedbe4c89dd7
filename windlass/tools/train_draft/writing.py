"""The training text: the engine invents prompts where there are none, and answers them all.

Every answer has its own seed, and every second one is greedy; those that are held out for the report
all are. What was written is in ledgers, so that a run that was killed goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.engine import Engine
from windlass.errors import ConfigError, EngineError
from windlass.tools.train_draft.ledger import Ledger
from windlass.tools.train_draft.prompts import Inventor

HELD_OUT = 0.05
TEMPERATURE = 0.7
# Requests that are in the engine at once. When half of them have ended they are filled up again, many
# together: on CUDA a step that lets nobody in is a recorded one, and takes a fraction of another.
WINDOW = 1024
_MOST_TRIES = 4  # per invented prompt
_FLUSH_EVERY = 64

Advance = Callable[[str, int, int], None]  # what is being written, how many are done, of how many


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the model's answer as one row of tokens; `start` is where the answer begins."""

    tokens: list[int]
    start: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is trained on, and what never is."""

    train: list[Text]
    held_out: list[Text]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.train)

    @property
    def num_answered(self) -> int:
        return sum(len(text.tokens) - text.start for text in self.train)


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    prompt: list[int]
    sampling: SamplingParams


def invent(
    engine: Callable[[], Engine], inventor: Inventor, count: int, ledger: Ledger, advance: Advance
) -> list[list[int]]:
    """`count` prompts of the model's own, or as many as it finds in four tries each."""
    prompts: list[list[int]] = []
    tried = 0
    while len(prompts) < count and tried < _MOST_TRIES * count:
        first, tried = tried, tried + max(count - len(prompts), 32)
        jobs = [
            _Job(number, inventor.opening, inventor.sampling(number))
            for number in range(first, tried)
        ]
        _complete(engine, jobs, ledger, partial(advance, "prompts"), tried)
        prompts = inventor.prompts(ledger.found[number] for number in range(tried))
    if len(prompts) < 2:
        raise ConfigError(
            f"the model invented {len(prompts)} usable prompts in {tried} tries. Give some with "
            "--data FILE.jsonl."
        )
    return prompts[:count]


def answer(
    engine: Callable[[], Engine],
    prompts: list[list[int]],
    ledger: Ledger,
    max_tokens: int,
    context: int,
    seed: int,
    advance: Advance,
) -> Corpus:
    """Every prompt's answer, and which of them are held out."""
    held = _held_out(len(prompts), seed)
    jobs = []
    for number, prompt in enumerate(prompts):
        greedy = number in held or number % 2 == 0
        room = min(max_tokens, context - len(prompt))
        sampling = SamplingParams(
            temperature=0.0 if greedy else TEMPERATURE,
            max_tokens=room,
            seed=seed * 1_000_003 + number,
        )
        jobs.append(_Job(number, prompt, sampling))
    _complete(engine, jobs, ledger, partial(advance, "answers"), len(prompts))
    texts = [
        Text([*prompt, *ledger.found[number]], len(prompt)) for number, prompt in enumerate(prompts)
    ]
    train = [text for number, text in enumerate(texts) if number not in held]
    return Corpus(train, [texts[number] for number in sorted(held)])


def _held_out(count: int, seed: int) -> set[int]:
    share = max(1, round(count * HELD_OUT))
    return set(random.Random(seed).sample(range(count), share))


def _complete(
    engine: Callable[[], Engine],
    jobs: Iterable[_Job],
    ledger: Ledger,
    advance: Callable[[int, int], None],
    total: int,
) -> None:
    """Run what the ledger does not hold yet; the engine is made when there is any."""
    left = [job for job in jobs if job.number not in ledger.found]
    advance(len(ledger.found), total)
    if not left:
        return
    running = engine()
    left.reverse()
    written: dict[str, list[int]] = {}
    numbers: dict[str, int] = {}
    try:
        while left or written:
            room = WINDOW if len(written) <= WINDOW // 2 else 0
            while left and len(written) < room:
                job = left.pop()
                name = str(job.number)
                running.add(NewRequest(name, job.prompt, job.sampling))
                written[name], numbers[name] = [], job.number
            for output in running.step():
                if output.error is not None:
                    raise EngineError(f"a text could not be written: {output.error}")
                written[output.request_id] += output.tokens
                if output.finish is not None:
                    name = output.request_id
                    ledger.add(numbers.pop(name), written.pop(name))
                    if len(ledger.found) % _FLUSH_EVERY == 0:
                        ledger.flush()
                        advance(len(ledger.found), total)
    finally:
        for name in written:
            running.abort(name)
    ledger.flush()
    advance(len(ledger.found), total)
