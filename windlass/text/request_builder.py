"""Builds engine requests from prompts and sampling params, for `LLM` and for the server.

Everything that depends on the model or the engine is decided here: encoding, defaults, token ids of
bad words, length limits, one request per completion. Nothing here waits or knows HTTP. The server
calls the slow methods in threads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.core.card import EngineReport, ModelCard
from windlass.core.limits import SchedulerLimits
from windlass.core.pooling import PoolingParams
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.errors import CapacityError, RequestError

Prompt = str | Sequence[int]  # text, or token ids

_DEFAULT_MAX_TOKENS = SamplingParams().max_tokens
# A pooling request samples one token beside its vector, in the cheapest way.
_POOLING_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
_POOLING_ENDPOINTS = "Use /v1/embeddings, /v1/score or /v1/rerank."


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids."""

    tokens: list[int]
    text: str | None = None  # None: the prompt came as token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Infill:
    """The text around a completion whose prompt is the text before it."""

    suffix: str
    files: Sequence[tuple[str, str]] = ()  # names and texts of other files
    start: str = ""  # the start of the completion

    @property
    def num_chars(self) -> int:
        texts = [text for pair in self.files for text in pair]
        return sum(map(len, (self.suffix, self.start, *texts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request beside its sampling params."""

    adapter: str = ""
    priority: int = 0
    cache_salt: str = ""
    prediction: tuple[int, ...] = ()
    tenant: str = ""
    weight: float = 1.0


class RequestBuilder:
    """Builds requests for one model and one engine. Cheap to make; holds no state of requests."""

    def __init__(self, card: ModelCard, report: EngineReport) -> None:
        self._card = card
        self._tokenizer = card.tokenizer
        self._vocab_size = report.vocab_size
        self._limits = scheduler_limits(report)

    # ---- text to tokens ----------------------------------------------------------------------

    @property
    def max_chars(self) -> int:
        """A text with more characters has more tokens than the context."""
        return self._limits.max_model_len * self._tokenizer.max_token_chars

    def encode(self, texts: Sequence[str], add_special: bool = True) -> list[list[int]]:
        """Encode texts in one batch. A text that cannot fit the context raises before that."""
        self._check_chars(texts)
        return self._tokenizer.encode_all(texts, add_special)

    def encode_prompts(
        self, prompts: Sequence[Prompt], add_special: bool = True
    ) -> list[EncodedPrompt]:
        """Encode the texts among `prompts` in one batch, and copy the token ids of the others."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(self.encode(texts, add_special))
        return [
            EncodedPrompt(next(encoded), prompt)
            if isinstance(prompt, str)
            else EncodedPrompt(list(prompt))
            for prompt in prompts
        ]

    def encode_infill(
        self, prompts: Sequence[Prompt], infill: Infill, add_special: bool = True
    ) -> list[EncodedPrompt]:
        """Encode prompts as texts with a gap, with the model's FIM tokens: prefix, suffix, middle."""
        fim = self._card.fim
        if fim is None:
            raise RequestError(
                f"suffix needs a model that was trained to fill in the middle; the tokenizer of "
                f"{self._card.name!r} has no FIM tokens. Leave it out.",
                "suffix",
            )
        around: list[int | str] = []
        if infill.files and fim.repo is not None:
            around += [fim.repo, "myproject\n"]
        for name, text in infill.files:
            start = ["\n\n--- snippet ---\n\n"] if fim.file is None else [fim.file, f"{name}\n"]
            around += [*start, text]
        if infill.files and fim.file is not None:
            around += [fim.file, "filename\n"]
        before = self._encode_start() if add_special else []
        before += self._encode_parts(around)
        after = self._encode_parts([fim.suffix, infill.suffix, fim.middle, infill.start])
        return [
            EncodedPrompt([*before, fim.prefix, *prompt.tokens, *after], prompt.text)
            for prompt in self.encode_prompts(prompts, add_special=False)
        ]

    def _encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        """Encode the texts among `parts`, and keep the token ids."""
        encoded = iter(self.encode([part for part in parts if isinstance(part, str)], False))
        ids = [next(encoded) if isinstance(part, str) else [part] for part in parts]
        return [token for part in ids for token in part]

    def _encode_start(self) -> list[int]:
        """The tokens that every text begins with: BOS or none."""
        with_special = self._tokenizer.encode("a")
        return with_special[: with_special.index(self._tokenizer.encode("a", False)[0])]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Encode pairs of texts, each as one prompt."""
        self._check_chars([text for pair in pairs for text in pair])
        return self._tokenizer.encode_pairs(pairs)

    def encode_predictions(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode texts that outputs are expected to repeat; "": none."""
        longest = max(map(len, texts), default=0)
        if longest == 0:
            return [()] * len(texts)
        if longest > self.max_chars:
            raise RequestError(
                f"prediction has {longest:,} characters; the model's context holds at most "
                f"{self.max_chars:,}. Send the part that the answer repeats.",
                "prediction",
            )
        if self._limits.layout.has_state:
            raise RequestError(
                f"prediction is not possible with {self._card.name!r}: it has recurrent states, "
                "which cannot be rolled back when draft tokens are rejected. Leave it out.",
                "prediction",
            )
        return [tuple(ids) for ids in self._tokenizer.encode_all(texts, add_special=False)]

    def encode_rendered(self, texts: Sequence[str], add_special: bool = False) -> list[list[int]]:
        """Encode rendered chat templates. Templates write BOS themselves; it is never doubled."""
        bos = self._card.special_tokens.get("bos_token")
        if not add_special or not bos:
            return self.encode(texts, add_special)
        return [self.encode([text], not text.startswith(bos))[0] for text in texts]

    def last_chars(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Cut texts that cannot fit to as many of their last characters as the context can hold."""
        return [
            prompt[-self.max_chars :]
            if isinstance(prompt, str) and len(prompt) > self._limits.max_model_len
            else prompt
            for prompt in prompts
        ]

    def _check_chars(self, texts: Sequence[str]) -> None:
        num_chars = max(map(len, texts), default=0)
        if num_chars <= self._limits.max_model_len:
            return  # fits with one character per token; max_token_chars reads the whole vocabulary
        if num_chars > self.max_chars:
            raise CapacityError(
                f"the prompt has {num_chars:,} characters. The model's context holds "
                f"{self._limits.max_model_len:,} tokens of at most "
                f"{self._tokenizer.max_token_chars} characters each, {self.max_chars:,} in all. "
                "Shorten the prompt.",
                "prompt",
            )

    # ---- sampling params ---------------------------------------------------------------------

    def sampling(
        self, fields: Mapping[str, Any], max_tokens: int | None = _DEFAULT_MAX_TOKENS
    ) -> SamplingParams:
        """Make sampling params of the given fields, then the model's defaults, then `max_tokens`."""
        return SamplingParams(**{"max_tokens": max_tokens, **self._card.default_sampling, **fields})

    def resolve(self, sampling: SamplingParams) -> SamplingParams:
        """Check sampling params against the model, and encode bad_words into bad_token_ids."""
        if not self._card.pooling.generates:
            raise RequestError(
                f"the model {self._card.name!r} generates no text here: it has no LM head, or was "
                f"started with --task embed or score. {_POOLING_ENDPOINTS}",
                "model",
            )
        if sampling.structured_outputs is not None and not self._tokenizer.eos_ids:
            raise RequestError(
                "structured_outputs needs a token that ends an output, and this model has none.",
                "structured_outputs",
            )
        if sampling.thinking_token_budget is not None:
            raise RequestError(
                "thinking_token_budget needs a chat: only its template says where reasoning ends.",
                "thinking_token_budget",
            )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            self._check_ids(name, getattr(sampling, name) or ())
        if not sampling.bad_words:
            return sampling
        # A word has other tokens at the start of a text than after a space.
        variants = [text for word in sampling.bad_words for text in (word, f" {word.lstrip()}")]
        encoded = self._tokenizer.encode_all(variants, add_special=False)
        unique = dict.fromkeys(tuple(ids) for ids in encoded if ids)
        return replace(sampling, bad_token_ids=tuple(unique))

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            bad = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"{name} has the token id {bad}; this model's ids go from 0 to "
                f"{self._vocab_size - 1}.",
                name,
            )

    # ---- requests ----------------------------------------------------------------------------

    def fit(
        self, prompt: EncodedPrompt, sampling: SamplingParams, truncate: int | None = None
    ) -> EncodedPrompt:
        """Return a prompt that the engine will accept, or raise.

        `truncate` keeps the last tokens of the prompt: that many, or with -1 as many as leave room
        for the output.
        """
        tokens = prompt.tokens
        if truncate is not None:
            num_kept = truncate
            if truncate == -1:
                num_kept = max(1, self._limits.max_model_len - (sampling.max_tokens or 1))
            tokens = tokens[-num_kept:] if num_kept else []
        if not tokens:
            raise RequestError("the prompt is empty: it has no tokens.", "prompt")
        self._check_ids("prompt", tokens)
        self.max_new_tokens(len(tokens), sampling)
        return replace(prompt, tokens=tokens)

    def max_new_tokens(self, num_prompt: int, sampling: SamplingParams) -> int:
        """How many tokens one completion may have; raises when the request can never fit."""
        return self._limits.fit(num_prompt, sampling.max_tokens)

    def requests(
        self,
        request_id: str,
        prompts: Sequence[EncodedPrompt],
        sampling: SamplingParams,
        options: RequestOptions,
    ) -> list[NewRequest]:
        """Make `n` requests for each prompt, in order: completion i belongs to prompt i // n.

        `prompts` and `sampling` have passed `fit` and `resolve`.
        """
        children = [sampling.child(i) for i in range(sampling.n)]
        pairs = [(prompt, child) for prompt in prompts for child in children]
        return [
            NewRequest(
                request_id=f"{request_id}-{i}",
                prompt=prompt.tokens,
                sampling=child,
                priority=options.priority,
                cache_salt=options.cache_salt,
                adapter=options.adapter,
                prediction=options.prediction,
                tenant=options.tenant,
                weight=options.weight,
            )
            for i, (prompt, child) in enumerate(pairs)
        ]

    def fit_pooled(self, prompt: EncodedPrompt, truncate: int | None = None) -> EncodedPrompt:
        """Return a prompt to pool that the engine will accept, or raise.

        `truncate` keeps the last tokens: that many, or with -1 as many as fit.
        """
        num_kept = self._limits.longest if truncate == -1 else truncate
        tokens = prompt.tokens
        if num_kept is not None:
            tokens = tokens[-num_kept:] if num_kept else []
        if not tokens:
            raise RequestError("the input is empty: it has no tokens.", "input")
        self._check_ids("input", tokens)
        self._limits.fit_pooled(len(tokens))
        return replace(prompt, tokens=tokens)

    def pooling_requests(
        self,
        request_id: str,
        prompts: Sequence[EncodedPrompt],
        params: PoolingParams,
        options: RequestOptions,
    ) -> list[NewRequest]:
        """Make one request for each prompt, which has passed `fit_pooled`."""
        return [
            NewRequest(
                request_id=f"{request_id}-{i}",
                prompt=prompt.tokens,
                sampling=_POOLING_SAMPLING,
                priority=options.priority,
                cache_salt=options.cache_salt,
                adapter=options.adapter,
                pooling=params,
                tenant=options.tenant,
                weight=options.weight,
            )
            for i, prompt in enumerate(prompts)
        ]


def scheduler_limits(report: EngineReport) -> SchedulerLimits:
    """The engine's limits: a request is refused before it is sent, with the scheduler's error."""
    return SchedulerLimits(
        max_num_seqs=report.max_num_seqs,
        max_num_batched_tokens=report.max_num_batched_tokens,
        max_model_len=report.max_model_len,
        layout=report.capacity.layout,
        num_blocks=report.capacity.num_blocks,
    )
