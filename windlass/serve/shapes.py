"""How answers look: the JSON of chat and text completions, whole and in chunks.

Log probabilities are encoded token by token: encoding all of an answer in one call would hold the
GIL for as long as that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from windlass.core.tokenizer import Tokenizer
from windlass.core.types import TokenLogprob
from windlass.serve.completion import Portion, Served
from windlass.serve.cost import Cost, cost_json
from windlass.serve.prepare import Prepared
from windlass.serve.protocol import ChatRequest, CompletionRequest
from windlass.text.completion import Completion

Json = dict[str, Any]

_NO_CHANCE = -9999.0  # JSON has no infinity


def _finite(logprob: float) -> float:
    return max(logprob, _NO_CHANCE)


class Shape(Protocol):
    """One of the two kinds of answer."""

    whole_object: str
    chunk_object: str
    is_plain: bool  # the chunks in mid-stream tell nothing but text

    def whole(self, portion: Portion, completion: Completion) -> Json:
        """A finished choice."""
        ...

    def chunks(self, portion: Portion, completion: Completion) -> list[Json]:
        """The choices that tell a stream of `portion`, each for a chunk of its own."""
        ...

    def extra(self, completions: Sequence[Completion]) -> Json:
        """Fields of the answer beside its choices."""
        ...


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self.is_plain = body.num_logprobs is None and not body.return_token_ids

    def whole(self, portion: Portion, completion: Completion) -> Json:  # noqa: ARG002
        message = {"role": "assistant", "content": portion.text, "refusal": None}
        return {
            "index": portion.index,
            "message": message,
            "logprobs": self._logprobs(portion),
            **_ending(portion),
            **_token_ids(portion, self._body.return_token_ids),
        }

    def chunks(self, portion: Portion, completion: Completion) -> list[Json]:
        made = []
        if portion.first:
            opening = self._chunk(portion.index, {"role": "assistant", "content": ""})
            if self._body.return_token_ids:
                opening["prompt_token_ids"] = completion.request.prompt
            made.append(opening)
        if portion.text or portion.logprobs or (self._body.return_token_ids and portion.tokens):
            chunk = self._chunk(portion.index, {"content": portion.text})
            chunk["logprobs"] = self._logprobs(portion)
            made.append(chunk | _token_ids(portion, self._body.return_token_ids))
        if portion.finish_reason is not None:
            made.append(self._chunk(portion.index, {}) | _ending(portion))
        return made

    def extra(self, completions: Sequence[Completion]) -> Json:
        made: Json = {}
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(completions[0], self._tokenizer)
        if self._body.return_token_ids:
            made["prompt_token_ids"] = completions[0].request.prompt
        return made

    def _chunk(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, portion: Portion) -> Json | None:
        if self._body.num_logprobs is None:
            return None
        content = [self._entry(logprob) for logprob in portion.logprobs]
        return {"content": content, "refusal": None}

    def _entry(self, logprob: TokenLogprob) -> msgspec.Raw:
        top = logprob.top if self._body.top_logprobs else []
        return _encoded(
            {
                **self._token(logprob.token, logprob.logprob),
                "top_logprobs": [self._token(token, value) for token, value in top],
            }
        )

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class CompletionShape:
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionRequest, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._body = body
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._offsets = [0] * len(prepared.requests)  # in each choice's text, of its next token
        self.is_plain = body.logprobs is None and not body.return_token_ids

    def whole(self, portion: Portion, completion: Completion) -> Json:
        choice = self._choice(portion, completion) | _ending(portion)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(completion, self._tokenizer)
        return choice

    def chunks(self, portion: Portion, completion: Completion) -> list[Json]:
        news = portion.text or portion.logprobs or portion.first or portion.finish_reason
        if not news and not self._body.return_token_ids:
            return []
        return [self._choice(portion, completion) | _ending(portion)]

    def extra(self, completions: Sequence[Completion]) -> Json:  # noqa: ARG002
        return {}

    def _choice(self, portion: Portion, completion: Completion) -> Json:
        echo = self._prompt_text(completion) if self._body.echo and portion.first else ""
        choice = {
            "index": portion.index,
            "text": echo + portion.text,
            "logprobs": self._logprobs(portion, completion),
            **_token_ids(portion, self._body.return_token_ids),
        }
        if self._body.return_token_ids and portion.first:
            choice["prompt_token_ids"] = completion.request.prompt
        return choice

    def _prompt_text(self, completion: Completion) -> str:
        prompt = self._prepared.prompts[completion.index // self._prepared.sampling.n]
        assert prompt.text is not None, "prepare.py spells prompts for echo"
        return prompt.text

    def _logprobs(self, portion: Portion, completion: Completion) -> Json | None:
        if self._body.logprobs is None:
            return None
        made: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._body.echo and portion.first:
            self._append(made, portion.index, completion.request.prompt[0], None)
            for logprob in completion.prompt_logprobs:
                self._append(made, portion.index, logprob.token, logprob)
        for logprob in portion.logprobs:
            self._append(made, portion.index, logprob.token, logprob)
        return made

    def _append(self, made: Json, index: int, token: int, logprob: TokenLogprob | None) -> None:
        text = self._tokenizer.token_text(token)
        made["tokens"].append(text)
        made["text_offset"].append(self._offsets[index])
        self._offsets[index] += len(text)
        if logprob is None:
            made["token_logprobs"].append(None)
            made["top_logprobs"].append(None)
            return
        made["token_logprobs"].append(_finite(logprob.logprob))
        top = logprob.top if self._body.logprobs else []
        entries = {self._tokenizer.token_text(other): _finite(value) for other, value in top}
        made["top_logprobs"].append(_encoded({**entries, text: _finite(logprob.logprob)}))


def _ending(portion: Portion) -> Json:
    return {"finish_reason": portion.finish_reason, "stop_reason": portion.stop_reason}


def _token_ids(portion: Portion, wanted: bool | None) -> Json:
    return {"token_ids": portion.tokens} if wanted else {}


def prompt_logprobs(completion: Completion, tokenizer: Tokenizer) -> list[msgspec.Raw | None]:
    """Per prompt token its own and the likeliest ones' log probability; the first has none."""
    made: list[msgspec.Raw | None] = [None]
    for logprob in completion.prompt_logprobs:
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(logprob.top, 1)]
        ranked.append((logprob.token, logprob.logprob, logprob.rank))
        entries = {
            str(token): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token),
            }
            for token, value, rank in ranked
        }
        made.append(_encoded(entries))
    return made


def _encoded(value: Json) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def usage(prepared: Prepared, served: Sequence[Served], cost: Cost | None = None) -> Json:
    """A prompt counts once, however many completions it has. Guesses show where there were any."""
    num_prompt = sum(len(prompt.tokens) for prompt in prepared.prompts)
    num_output = sum(each.num_tokens for each in served)
    cached = sum(each.num_cached for each in served[:: prepared.sampling.n])
    numbers: Json = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    drafted = sum(each.num_drafted for each in served)
    if drafted:
        accepted = sum(each.num_accepted for each in served)
        numbers["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    if cost is not None:
        numbers |= {"cost": cost.total, "cost_details": cost_json(cost)}
    return numbers
