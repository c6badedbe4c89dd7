"""Prompts to train on: from a JSONL file, checked line by line, or invented by the model itself."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from windlass.core.card import ModelCard
from windlass.core.sampling import SamplingParams
from windlass.errors import ConfigError, RequestError
from windlass.text.chat_template import ChatTemplate
from windlass.tools.common.jsonl import Messages, check_messages, parse_lines, parse_object

_FIELDS = ("prompt", "messages", "text")
_INVENTED_TOKENS = 96
_MARK = "Here the words of the user begin."


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as tokens, each once, and what there is to say about them."""

    tokens: list[list[int]]
    sha256: str  # of the file
    notes: tuple[str, ...]


class Renderer:
    """Prompts to tokens, as a server would do it."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self._template: ChatTemplate | None = None
        if card.chat_template is not None:
            self._template = ChatTemplate(card.chat_template, card.special_tokens)

    def conversation(self, messages: Messages) -> list[int]:
        """The user's last words and all before; what an assistant answered to them is left out."""
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise RequestError("only the assistant speaks")
        if self._template is None:
            raise RequestError("a conversation, but the model has no chat template")
        text = self._template.render(messages)
        return self.card.tokenizer.encode(text, add_special=False)

    def text(self, text: str) -> list[int]:
        """The first half of a text: the model writes the rest."""
        tokens = self.card.tokenizer.encode(text)
        return tokens[: (len(tokens) + 1) // 2]

    def opening(self) -> tuple[list[int], str] | None:
        """What stands before a user's first words, and after them; None: there is no template."""
        if self._template is None:
            return None
        text = self._template.render([{"role": "user", "content": _MARK}])
        before, mark, after = text.partition(_MARK)
        if not mark:
            return None
        return self.card.tokenizer.encode(before, add_special=False), after.strip()


def read_prompts(path: Path, renderer: Renderer, longest: int, skip_broken: bool) -> Prompts:
    """Read, check, tokenise; those of more than `longest` tokens and repetitions are left out."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--data {path}: {error.strerror or error}.") from error
    found, wrong = parse_lines(raw, lambda line: _tokens(line, renderer))
    broken = [f"line {number}: {why}" for number, why in wrong]
    reasons = Counter(why for _, why in wrong)
    if broken and not skip_broken and found:
        raise ConfigError(
            f"--data {path}: {len(broken)} of {len(broken) + len(found)} lines cannot be used. "
            f"{'; '.join(broken[:3])}. Correct them, or use --skip-broken-lines."
        )
    short = [tokens for tokens in found if 0 < len(tokens) <= longest]
    if len(short) < len(found):
        reasons[f"empty, or of more than {longest} tokens (--context)"] += len(found) - len(short)
    kept = unique(short)
    if len(kept) < len(short):
        reasons["repetitions"] += len(short) - len(kept)
    if len(kept) < 2:
        what = ", ".join(f"{count} lines: {why}" for why, count in reasons.most_common(4))
        raise ConfigError(
            f"--data {path}: {len(kept)} usable prompts, and training needs 2 at least. Beside "
            f"them: {what or 'nothing'}. Give lines such as "
            '{"prompt": "..."}, {"messages": [...]} or {"text": "..."}.'
        )
    notes = [f"{count} lines left out: {why}" for why, count in reasons.most_common(4)]
    return Prompts(kept, hashlib.sha256(raw).hexdigest(), tuple(notes))


def _tokens(line: bytes, renderer: Renderer) -> list[int]:
    """One line's prompt; RequestError says what is wrong with it, without its number."""
    value = parse_object(line, '{"prompt": "..."}')
    names = [name for name in _FIELDS if name in value]
    if len(names) != 1:
        raise RequestError("needs one of prompt, messages and text")
    (name,) = names
    if name == "messages":
        return renderer.conversation(check_messages(value[name]))
    if not isinstance(value[name], str) or not value[name].strip():
        raise RequestError(f"{name} must be a string that is not empty")
    if name == "text":
        return renderer.text(value[name])
    return renderer.card.tokenizer.encode(value[name])


def unique(prompts: Iterable[list[int]]) -> list[list[int]]:
    """Each once, in the order in which they come."""
    return [list(tokens) for tokens in dict.fromkeys(map(tuple, prompts))]


@dataclass(frozen=True, slots=True)
class Inventor:
    """Samples prompts from the model: it continues from where the user's words begin."""

    renderer: Renderer
    opening: list[int]
    closing: str  # what the template writes after the user's words; empty: there is no template
    longest: int
    seed: int

    @classmethod
    def of(cls, renderer: Renderer, bos_id: int | None, longest: int, seed: int) -> Inventor:
        found = renderer.opening()
        if found is not None and found[0]:
            return cls(renderer, *found, longest, seed)
        if bos_id is None:
            raise ConfigError(
                f"{renderer.card.name} has neither a chat template nor a token that begins a text, "
                "so it cannot invent prompts. Give some with --data FILE.jsonl."
            )
        return cls(renderer, [bos_id], "", longest, seed)

    def sampling(self, number: int) -> SamplingParams:
        tokens = max(1, min(_INVENTED_TOKENS, self.longest - len(self.opening)))
        return SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=tokens, seed=self.seed * 1_000_003 + number
        )

    def prompts(self, invented: Iterable[list[int]]) -> list[list[int]]:
        """Usable prompts of what the model wrote: words that ended, none twice."""
        tokenizer = self.renderer.card.tokenizer
        found = []
        for tokens in invented:
            if not self.closing:
                found.append([*self.opening, *tokens[: max(1, len(tokens) // 2)]])
                continue
            text, closed, _ = tokenizer.decode(tokens, skip_special=False).partition(self.closing)
            if not closed:
                text = tokenizer.decode(tokens) if tokens[-1] in tokenizer.eos_ids else ""
            if text.strip():
                message = {"role": "user", "content": text.strip()}
                found.append(self.renderer.conversation([message]))
        return unique(tokens for tokens in found if len(tokens) <= self.longest)
