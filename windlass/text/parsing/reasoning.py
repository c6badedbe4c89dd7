"""Reasoning between tags at the beginning of an output: <think>…</think>."""

from __future__ import annotations

from dataclasses import dataclass

from windlass.text.parsing.output import OutputSink
from windlass.text.parsing.reader import Reader, Steps


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags of a family of models.

    start: "": every output begins inside of reasoning. closing: what to write to end the reasoning early;
    "": `end`. answer_ends: what else may stand for `end`. other_ends: what else ends it, where calls are possible.
    """

    name: str
    start: str
    end: str
    closing: str = ""
    answer_ends: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()
    special_tokens: bool = (
        False  # the tags are special tokens, which are not part of the text otherwise
    )

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends inside of reasoning, as templates write it for models that always reason."""
        return prompt.rstrip().endswith(self.start) and not prompt.endswith(self.end)

    def closed_by(self, prompt: str) -> bool:
        """Whether the prompt ends behind the reasoning, as templates write it for an answer without any."""
        return prompt.rstrip().endswith(self.end)

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
        ReasoningTags("mistral", "[THINK]", "[/THINK]", special_tokens=True),
        ReasoningTags("seed", "<seed:think>", "</seed:think>"),
    )
}
