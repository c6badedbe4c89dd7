"""Scores pairs of texts: a query and a document.

A classification head reads both texts in one prompt. Other models embed each text, and the score is the
cosine similarity of both embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from windlass.core.card import ModelCard
from windlass.core.pooling import ModelPooling
from windlass.errors import ConfigError, RequestError
from windlass.text.chat_template import compile_template
from windlass.text.request_builder import EncodedPrompt, RequestBuilder

Pair = tuple[str, str]


class ScoreTemplate:
    """A Jinja template of the operator that writes a query and a document into one prompt.

    Its variable `messages` has a message of role `query` and one of role `document`.
    """

    def __init__(self, path: str) -> None:
        self._template = compile_template(Path(path).read_text(encoding="utf-8"))
        probe = self.render(("probe query", "probe document"))
        if "probe query" not in probe or "probe document" not in probe:
            raise ConfigError(
                f"--score-template {path}: its output lacks the query or the document. It gets both in "
                "`messages`, with the roles query and document."
            )

    def render(self, pair: Pair) -> str:
        roles = zip(("query", "document"), pair, strict=True)
        return self._template.render(
            messages=[{"role": role, "content": text} for role, text in roles]
        )


class Scoring:
    """Makes the prompts of pairs for one model, and the scores of their vectors."""

    def __init__(self, card: ModelCard, template: ScoreTemplate | None = None) -> None:
        self._pooling: ModelPooling = card.pooling
        self._template = template
        if template is not None and not self.reads_pairs:
            raise ConfigError(
                "--score-template: this model has no classification head; it embeds each text alone."
            )

    @property
    def reads_pairs(self) -> bool:
        return self._pooling.task == "classify"

    def check(self) -> None:
        """Raise if the model gives no scores."""
        self._pooling.check(self._pooling.task)
        if self.reads_pairs and self._pooling.size != 1:
            raise RequestError(
                f"this model's classification head has {self._pooling.size} labels; a score needs a "
                "head with one.",
                "model",
            )

    def prompts(self, pairs: Sequence[Pair], builder: RequestBuilder) -> list[EncodedPrompt]:
        """The prompts to pool: one per pair, or one per different text."""
        if not self.reads_pairs:
            return builder.encode_prompts(_texts(pairs))
        if self._template is None:
            return [EncodedPrompt(tokens) for tokens in builder.encode_pairs(pairs)]
        texts = [self._template.render(pair) for pair in pairs]
        return [EncodedPrompt(tokens) for tokens in builder.encode_rendered(texts)]

    def scores(self, pairs: Sequence[Pair], vectors: Sequence[bytes]) -> list[float]:
        """The score of each pair, from the vectors of its prompts in their order."""
        found = np.array([np.frombuffer(vector, dtype=np.float32) for vector in vectors])
        if self.reads_pairs:
            return [float(score) for score in found[:, 0]]
        unit = found.astype(np.float64)
        unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
        index = {text: i for i, text in enumerate(_texts(pairs))}
        queries, documents = ([index[text] for text in texts] for texts in zip(*pairs, strict=True))
        cosines = (unit[queries] * unit[documents]).sum(axis=1)
        return [float(score) for score in cosines.clip(-1.0, 1.0)]


def _texts(pairs: Sequence[Pair]) -> list[str]:
    """The different texts, in order."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def as_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[Pair]:
    """Pair one query with each document, or as many queries with their documents."""
    first = [queries] if isinstance(queries, str) else list(queries)
    second = [documents] if isinstance(documents, str) else list(documents)
    if not first or not second:
        empty = "text_2" if first else "text_1"
        raise RequestError("there is nothing to score: both sides need a text.", empty)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise RequestError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: send one text_1, or as many as "
            "text_2.",
            "text_1",
        )
    return list(zip(first, second, strict=True))
