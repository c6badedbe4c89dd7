"""Cuts tokens into windows, and decides which positions are scored.

Perplexities are comparable only with the same definition. There are two:

    strided     every token is scored once, after the first window with at least context - stride
                tokens of context
    llama.cpp   disjoint windows, of which the second half is scored; an incomplete last window is
                left out, as in llama.cpp's perplexity tool
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from windlass.core.card import ModelCard
from windlass.errors import ConfigError, RequestError
from windlass.runner.scoring import Window
from windlass.text.chat_template import ChatTemplate
from windlass.tools.eval.data import Corpus, Document

Method = Literal["strided", "llama.cpp"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How text is cut into windows. `stride` None: half of the context."""

    method: Method = "strided"
    context: int = 1024
    stride: int | None = None
    max_windows: int | None = None

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            known = ", ".join(get_args(Method))
            raise ConfigError(f"--method must be one of {known}; got {self.method!r}.")
        if self.context < 2:
            raise ConfigError(f"--context must be at least 2, got {self.context}.")
        if self.stride is not None and self.method == "llama.cpp":
            raise ConfigError("--stride has no meaning with --method llama.cpp. Leave it out.")
        if self.stride is not None and not 1 <= self.stride <= self.context:
            raise ConfigError(
                f"--stride must be between 1 and --context ({self.context}), got {self.stride}."
            )
        if self.max_windows is not None and self.max_windows < 1:
            raise ConfigError(f"--max-windows must be at least 1, got {self.max_windows}.")

    @property
    def step(self) -> int:
        return self.stride or max(1, self.context // 2)

    def describe(self) -> str:
        if self.method == "llama.cpp":
            return (
                f"llama.cpp's definition: disjoint windows of {self.context} tokens; the second half of "
                "each is scored"
            )
        return (
            f"windows of {self.context} tokens every {self.step}; every token is scored once, with "
            f"at least {self.context - self.step} tokens of context after the first window"
        )


@dataclass(frozen=True, slots=True)
class LabelledWindow:
    label: str
    window: Window


def cut_corpus(corpus: Corpus, card: ModelCard, cut: Cut) -> list[LabelledWindow]:
    """Tokenize a corpus and cut it into windows. A document that is too short is an error."""
    if cut.method == "llama.cpp" and not corpus.running:
        raise ConfigError(
            "--method llama.cpp needs one running text, not documents. "
            "Use --method strided for JSONL."
        )
    template = None
    if any(document.messages is not None for document in corpus.documents):
        template = _template(card)
    windows: list[LabelledWindow] = []
    for document in corpus.documents:
        tokens = _tokens(document, card, template)
        for window in _windows(document, tokens, card, cut):
            windows.append(LabelledWindow(document.label, window))
            if len(windows) == cut.max_windows:
                return windows
    return windows


def _windows(document: Document, tokens: list[int], card: ModelCard, cut: Cut) -> Iterator[Window]:
    if cut.method == "llama.cpp":
        needed, found = cut.context, halves(tokens, cut.context, card.tokenizer.encode(""))
    else:
        needed, found = 2, strided(tokens, cut.context, cut.step)
    if len(tokens) < needed:
        raise ConfigError(
            f"{document.where}: has {len(tokens)} tokens; at least {needed} are needed."
        )
    return found


def strided(tokens: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Yield overlapping windows; each scores the tokens that earlier windows did not."""
    scored = 1  # the first token has no context
    for start in range(0, len(tokens), stride):
        part = tokens[start : start + context]
        first = max(0, scored - start - 1)
        if first < len(part) - 1:
            yield Window(part, first)
        scored = start + len(part)
        if scored >= len(tokens):
            return


def halves(tokens: Sequence[int], context: int, bos: Sequence[int]) -> Iterator[Window]:
    """Yield disjoint windows; each begins with the BOS token if the tokenizer adds one."""
    for start in range(0, len(tokens) - context + 1, context):
        part = [*bos, *tokens[start + len(bos) : start + context]]
        yield Window(part, context // 2)


def _tokens(document: Document, card: ModelCard, template: ChatTemplate | None) -> list[int]:
    if document.text is not None:
        return card.tokenizer.encode(document.text)
    assert template is not None
    assert document.messages is not None
    try:
        text = template.render(document.messages, add_generation_prompt=False)
    except RequestError as error:
        raise ConfigError(f"{document.where}: {error}") from error
    return card.tokenizer.encode(text, add_special=False)


def _template(card: ModelCard) -> ChatTemplate:
    if card.chat_template is None:
        raise ConfigError(
            f"the data has messages, but the model {card.name!r} has no chat template. "
            "Give the conversations as text."
        )
    return ChatTemplate(card.chat_template, card.special_tokens)
