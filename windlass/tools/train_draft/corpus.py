"""The training corpus: the engine answers all prompts, and generates prompts if none are given.

Every answer has its own seed, and every second one is greedy; held-out answers are all greedy.
Results are kept in token logs, so that a killed run can resume.
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
from windlass.tools.train_draft.prompts import PromptGenerator
from windlass.tools.train_draft.token_log import TokenLog

HELD_OUT = 0.05  # share of the prompts
TEMPERATURE = 0.7
# Concurrent requests. They are refilled together when half of them have finished: on CUDA a step
# without admissions is a captured graph, and takes a fraction of the time of another step.
WINDOW = 1024
_MAX_ATTEMPTS = 4  # per generated prompt
_FLUSH_EVERY = 64

OnProgress = Callable[[str, int, int], None]  # phase, number done, total


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of a prompt and the model's answer; `start` is the first token of the answer."""

    tokens: list[int]
    start: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training texts and held-out texts."""

    train: list[Text]
    held_out: list[Text]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.train)

    @property
    def num_answered(self) -> int:
        return sum(len(text.tokens) - text.start for text in self.train)


def generate_prompts(
    engine: Callable[[], Engine],
    generator: PromptGenerator,
    count: int,
    *,
    log: TokenLog,
    on_progress: OnProgress,
) -> list[list[int]]:
    """Generate `count` prompts, or as many as four attempts per prompt give."""
    prompts: list[list[int]] = []
    attempts = 0
    while len(prompts) < count and attempts < _MAX_ATTEMPTS * count:
        first, attempts = attempts, attempts + max(count - len(prompts), 32)
        jobs = [
            NewRequest(str(number), generator.opening, generator.sampling(number))
            for number in range(first, attempts)
        ]
        progress = partial(on_progress, "prompts")
        _complete(engine, jobs, log=log, on_progress=progress, total=attempts)
        prompts = generator.prompts(log.found[number] for number in range(attempts))
    if len(prompts) < 2:
        raise ConfigError(
            f"the model generated {len(prompts)} usable prompts in {attempts} attempts. Give prompts "
            "with --data FILE.jsonl."
        )
    return prompts[:count]


def generate_answers(
    engine: Callable[[], Engine],
    prompts: list[list[int]],
    *,
    log: TokenLog,
    max_tokens: int,
    context: int,
    seed: int,
    on_progress: OnProgress,
) -> Corpus:
    """Generate the answers of all prompts, and choose the held-out ones."""
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
        jobs.append(NewRequest(str(number), prompt, sampling))
    progress = partial(on_progress, "answers")
    _complete(engine, jobs, log=log, on_progress=progress, total=len(prompts))
    texts = [
        Text([*prompt, *log.found[number]], len(prompt)) for number, prompt in enumerate(prompts)
    ]
    train = [text for number, text in enumerate(texts) if number not in held]
    return Corpus(train, [texts[number] for number in sorted(held)])


def _held_out(count: int, seed: int) -> set[int]:
    share = max(1, round(count * HELD_OUT))
    return set(random.Random(seed).sample(range(count), share))


def _complete(
    engine: Callable[[], Engine],
    jobs: Iterable[NewRequest],
    *,
    log: TokenLog,
    on_progress: Callable[[int, int], None],
    total: int,
) -> None:
    """Run the jobs that the log does not have yet; makes the engine only if there are any.

    A job's request id is its number in the log.
    """
    left = [job for job in jobs if int(job.request_id) not in log.found]
    on_progress(len(log.found), total)
    if not left:
        return
    running = engine()
    left.reverse()
    written: dict[str, list[int]] = {}
    try:
        while left or written:
            room = WINDOW if len(written) <= WINDOW // 2 else 0
            while left and len(written) < room:
                job = left.pop()
                running.add(job)
                written[job.request_id] = []
            for output in running.step():
                if output.error is not None:
                    raise EngineError(f"a text could not be generated: {output.error}")
                written[output.request_id] += output.tokens
                if output.finish is not None:
                    log.add(int(output.request_id), written.pop(output.request_id))
                    if len(log.found) % _FLUSH_EVERY == 0:
                        log.flush()
                        on_progress(len(log.found), total)
    finally:
        for name in written:
            running.abort(name)
    log.flush()
    on_progress(len(log.found), total)
