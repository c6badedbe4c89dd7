"""Loads as an engine gets them: texts made or read, templates applied, in token ids with their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.core.card import ModelCard
from windlass.errors import ConfigError
from windlass.serve.chat import ChatTemplate
from windlass.tools.load.arrivals import Arrivals
from windlass.tools.load.asks import Ask
from windlass.tools.load.files import read_load, refuse_problems
from windlass.tools.load.texts import Writer, measure_scale
from windlass.tools.load.workloads import LOADS, Sizes, make_load
from windlass.tools.plan.replay import Job

_ALL = 1_000_000  # requests of a trace, where nobody said how many

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Load:
    """Which requests, and when: a load by name, or a trace."""

    name: str = "chat"
    trace: Path | None = None
    num_prompts: int | None = None  # None: all of a trace, else 64
    input_len: int | None = None
    output_len: int | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    max_concurrency: int | None = None
    skip_bad_lines: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace is None and self.name not in LOADS:
            raise ConfigError(
                f"--workload {self.name!r} is not known. Known: {', '.join(LOADS)}; or a file of "
                "requests with --trace."
            )
        if self.trace is not None and self.input_len is not None:
            raise ConfigError("--input-len means nothing for --trace, which has its own.")
        if self.trace is None and self.skip_bad_lines:
            raise ConfigError("--skip-bad-lines means nothing without --trace.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}.")
        self.sizes  # noqa: B018 - refuses numbers below 1 now

    @property
    def sizes(self) -> Sizes:
        count = self.num_prompts or (_ALL if self.trace is not None else Sizes().num_prompts)
        if self.num_prompts is not None and self.num_prompts < 1:
            raise ConfigError(f"--num-prompts must be at least 1, got {self.num_prompts}.")
        return Sizes(count, self.input_len, self.output_len)

    @property
    def title(self) -> str:
        return self.name if self.trace is None else self.trace.name

    def jobs(self, card: ModelCard, say: Say = lambda _: None, draw: int = 0) -> list[Job]:
        """The requests in token ids; another `draw` has other texts, if they are not from a file."""
        scale = measure_scale(lambda text: len(card.tokenizer.encode(text)))
        asks = self._asks(Writer(scale), say, draw)
        asks = self.arrivals.set(asks, f"{self.seed} 0")
        speller = _Speller(card)
        return [Job(speller.tokens(ask), ask.max_tokens, ask.at, ask.follows) for ask in asks]

    def _asks(self, writer: Writer, say: Say, draw: int) -> list[Ask]:
        if self.trace is None:
            return make_load(self.name, self.sizes, writer, f"{self.seed} {draw}")
        try:
            made = read_load("timed_trace", self.trace, self.sizes, writer, str(self.seed))
        except ConfigError as error:
            raise ConfigError(str(error).replace("--dataset-path", "--trace")) from error
        if not self.skip_bad_lines:
            refuse_problems(self.trace, made.problems)
        for problem in made.problems:
            say(f"{self.trace}: left out: {problem}")
        if not made.asks:
            raise ConfigError(f"--trace {self.trace} has no line that can be used.")
        return made.asks


class _Speller:
    """Asks to token ids, as the server does it."""

    def __init__(self, card: ModelCard) -> None:
        self._tokenizer = card.tokenizer
        self._template = None
        if card.chat_template is not None:
            self._template = ChatTemplate(card.chat_template, card.special_tokens)

    def tokens(self, ask: Ask) -> list[int]:
        prompt = ask.as_prompt()
        if isinstance(prompt, list):
            return prompt
        if self._template is None:
            return self._tokenizer.encode(prompt)
        return self._tokenizer.encode(self._template.render(ask.as_messages()), add_special=False)


def longest(jobs: Sequence[Job]) -> int:
    """Tokens of the longest request, its answer included."""
    return max(len(job.prompt) + job.num_output for job in jobs)
