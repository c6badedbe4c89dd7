"""Builds a load (requests and arrival times) from a named workload or a trace, as text or token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.core.card import ModelCard
from windlass.errors import ConfigError
from windlass.settings import at_least
from windlass.text.chat_template import ChatTemplate
from windlass.tools.common.arrivals import Arrivals
from windlass.tools.common.jsonl import raise_problems
from windlass.tools.common.request_files import read_request_file
from windlass.tools.common.requests import Request, TextRequest
from windlass.tools.common.text_workload import TEXT_WORKLOADS, Sizes, make_requests
from windlass.tools.common.texts import Writer, measure_scale

_ALL = 1_000_000  # requests read from a trace when no number is given

Log = Callable[[str], None]


def writer_for(card: ModelCard) -> Writer:
    """A text writer whose lengths are in this model's tokens."""
    return Writer(measure_scale(lambda text: len(card.tokenizer.encode(text))))


def tokenize(
    requests: Sequence[TextRequest], card: ModelCard, template_prompts: bool = True
) -> list[Request]:
    """Tokenize as the server does. `template_prompts`: send a plain prompt as a user message."""
    template = None
    if card.chat_template is not None:
        template = ChatTemplate(card.chat_template, card.special_tokens)
    tokenized = []
    for request in requests:
        prompt = request.as_prompt()
        if isinstance(prompt, list):
            tokens = prompt
        elif template is not None and (request.messages or template_prompts):
            text = template.render(request.as_messages())
            tokens = card.tokenizer.encode(text, add_special=False)
        else:
            tokens = card.tokenizer.encode(prompt)
        tokenized.append(Request(tokens, request.max_tokens, request.at, request.follows))
    return tokenized


def text_requests(
    name: str,
    path: Path | None,
    sizes: Sizes,
    writer: Writer,
    *,
    seed: int,
    draw: int = 0,
    skip_bad_lines: bool = False,
    log: Log = lambda _: None,
) -> list[TextRequest]:
    """The requests of a named workload, or of a file if there is a path.

    Another `draw` of a workload gives other texts. Invalid lines of a file raise, or are skipped and
    logged.
    """
    if path is None:
        return make_requests(name, sizes, writer=writer, seed=f"{seed} {draw}")
    read = read_request_file(name, path, sizes=sizes, writer=writer, seed=str(seed))
    if not skip_bad_lines:
        raise_problems(path, read.problems)
    for problem in read.problems:
        log(f"{path}: skipped: {problem}")
    if not read.requests:
        raise ConfigError(f"{path} has no valid line.")
    return read.requests


@dataclass(frozen=True, slots=True)
class Load:
    """The load of `plan` and `tune`: a named workload or a trace."""

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
        if self.trace is None and self.name not in TEXT_WORKLOADS:
            raise ConfigError(
                f"--workload {self.name!r} is not known. Known: {', '.join(TEXT_WORKLOADS)}; or a file of "
                "requests with --trace."
            )
        if self.trace is not None and self.input_len is not None:
            raise ConfigError("--input-len has no effect with --trace, which sets the lengths.")
        if self.trace is None and self.skip_bad_lines:
            raise ConfigError("--skip-bad-lines has no effect without --trace.")
        at_least(self, 1, "num_prompts", "input_len", "output_len", "max_concurrency")

    @property
    def sizes(self) -> Sizes:
        count = self.num_prompts or (_ALL if self.trace is not None else Sizes().num_prompts)
        return Sizes(count, self.input_len, self.output_len)

    @property
    def title(self) -> str:
        return self.name if self.trace is None else self.trace.name

    def requests(self, card: ModelCard, log: Log = lambda _: None, draw: int = 0) -> list[Request]:
        """The requests in token ids. Another `draw` gives other texts, unless they are a trace's."""
        try:
            texts = text_requests(
                self.name if self.trace is None else "timed_trace",
                self.trace,
                sizes=self.sizes,
                writer=writer_for(card),
                seed=self.seed,
                draw=draw,
                skip_bad_lines=self.skip_bad_lines,
                log=log,
            )
        except ConfigError as error:
            raise ConfigError(str(error).replace("--dataset-path", "--trace")) from error
        return tokenize(self.arrivals.set(texts, f"{self.seed} 0"), card)
