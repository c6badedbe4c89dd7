"""Reasoning between tags at the beginning of an output: <think>…</think>."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.text.parsing.output import OutputSink
from windlass.text.parsing.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags of a family of models."""

    name: str
    start: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends inside of reasoning, as templates write it for models that always reason."""
        return prompt.rstrip().endswith(self.start)

    def read(self, reader: Reader, out: OutputSink, *, is_open: bool) -> Steps[None]:
        """Read the reasoning and the whitespace after it, if the output begins with reasoning."""
        spaces = yield from reader.spaces()
        if not (yield from reader.skip(self.start)) and not is_open:
            out.content(spaces)
            return
        yield from reader.spaces()
        held = ""

        def sink(text: str) -> None:
            nonlocal held
            text = held + text
            kept = text.rstrip()
            held = text[len(kept) :]
            out.reasoning(kept)

        if (yield from reader.until(self.end, sink=sink)) is not None:
            yield from reader.spaces()


THINK = ReasoningTags("think", "<think>", "</think>")
TAGS = {
    tags.name: tags
    for tags in (
        THINK,
        ReasoningTags("mistral", "[THINK]", "[/THINK]"),
        ReasoningTags("seed", "<seed:think>", "</seed:think>"),
    )
}
