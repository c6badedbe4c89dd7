"""How answers look: the JSON of chat and text completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from windlass.core.text import Tokenizer
from windlass.core.types import TokenLogprob
from windlass.serve.completion import Completion, Delta
from windlass.serve.prepare import Prepared
from windlass.serve.protocol import ChatRequest, CompletionRequest

Json = dict[str, Any]

_NO_CHANCE = -9999.0  # JSON has no infinity


def _finite(logprob: float) -> float:
    return max(logprob, _NO_CHANCE)


class Shape(Protocol):
    """One of the two kinds of answer."""

    whole_object: str
    chunk_object: str

    def whole(self, delta: Delta, completion: Completion) -> Json:
        """A finished choice."""
        ...

    def chunks(self, delta: Delta, completion: Completion) -> list[Json]:
        """The choices that tell a stream of `delta`, each for a chunk of its own."""
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

    def whole(self, delta: Delta, completion: Completion) -> Json:  # noqa: ARG002
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            **_ending(delta),
            **_token_ids(delta, self._body.return_token_ids),
        }

    def chunks(self, delta: Delta, completion: Completion) -> list[Json]:
        made = []
        if delta.first:
            opening = self._chunk(delta.index, {"role": "assistant", "content": ""})
            if self._body.return_token_ids:
                opening["prompt_token_ids"] = completion.request.prompt
            made.append(opening)
        if delta.text or delta.logprobs or (self._body.return_token_ids and delta.tokens):
            chunk = self._chunk(delta.index, {"content": delta.text})
            chunk["logprobs"] = self._logprobs(delta)
            made.append(chunk | _token_ids(delta, self._body.return_token_ids))
        if delta.finish_reason is not None:
            made.append(self._chunk(delta.index, {}) | _ending(delta))
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

    def _logprobs(self, delta: Delta) -> Json | None:
        if self._body.num_logprobs is None:
            return None
        content = [self._entry(logprob) for logprob in delta.logprobs]
        return {"content": content, "refusal": None}

    def _entry(self, logprob: TokenLogprob) -> Json:
        top = logprob.top if self._body.top_logprobs else []
        return {
            **self._token(logprob.token, logprob.logprob),
            "top_logprobs": [self._token(token, value) for token, value in top],
        }

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

    def whole(self, delta: Delta, completion: Completion) -> Json:
        choice = self._choice(delta, completion) | _ending(delta)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(completion, self._tokenizer)
        return choice

    def chunks(self, delta: Delta, completion: Completion) -> list[Json]:
        silent = not (delta.text or delta.logprobs or delta.first or self._body.return_token_ids)
        if silent and delta.finish_reason is None:
            return []
        return [self._choice(delta, completion) | _ending(delta)]

    def extra(self, completions: Sequence[Completion]) -> Json:  # noqa: ARG002
        return {}

    def _choice(self, delta: Delta, completion: Completion) -> Json:
        echo = self._echo(completion) if self._body.echo and delta.first else ""
        choice = {
            "index": delta.index,
            "text": echo + delta.text,
            "logprobs": self._logprobs(delta, completion),
            **_token_ids(delta, self._body.return_token_ids),
        }
        if self._body.return_token_ids and delta.first:
            choice["prompt_token_ids"] = completion.request.prompt
        return choice

    def _echo(self, completion: Completion) -> str:
        prompt = self._prepared.prompts[completion.index // self._prepared.sampling.n]
        if prompt.text is not None and self._body.truncate_prompt_tokens is None:
            return prompt.text
        skip = self._prepared.sampling.skip_special_tokens
        return self._tokenizer.decode(prompt.tokens, skip)

    def _logprobs(self, delta: Delta, completion: Completion) -> Json | None:
        if self._body.logprobs is None:
            return None
        made: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._body.echo and delta.first:
            self._append(made, delta.index, completion.request.prompt[0], None)
            for logprob in completion.prompt_logprobs:
                self._append(made, delta.index, logprob.token, logprob)
        for logprob in delta.logprobs:
            self._append(made, delta.index, logprob.token, logprob)
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
        made["top_logprobs"].append({**entries, text: _finite(logprob.logprob)})


def _ending(delta: Delta) -> Json:
    return {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _token_ids(delta: Delta, wanted: bool | None) -> Json:
    return {"token_ids": delta.tokens} if wanted else {}


def prompt_logprobs(completion: Completion, tokenizer: Tokenizer) -> list[Json | None]:
    """Per prompt token its own and the likeliest ones' log probability; the first has none."""
    made: list[Json | None] = [None]
    for logprob in completion.prompt_logprobs:
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(logprob.top, 1)]
        ranked.append((logprob.token, logprob.logprob, logprob.rank))
        made.append(
            {
                str(token): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(token),
                }
                for token, value, rank in ranked
            }
        )
    return made


def usage(prepared: Prepared, completions: Sequence[Completion]) -> Json:
    """A prompt counts once, however many completions it has."""
    num_prompt = sum(len(prompt.tokens) for prompt in prepared.prompts)
    num_output = sum(completion.num_tokens for completion in completions)
    cached = sum(completion.num_cached for completion in completions[:: prepared.sampling.n])
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
