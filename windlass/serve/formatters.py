"""The JSON of chat and text completions, whole and in chunks, in OpenAI's format.

Log probabilities are encoded token by token: encoding all of a response in one call would hold the
GIL for the whole time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from windlass.core.tokenizer import Tokenizer
from windlass.core.types import TokenLogprob
from windlass.serve.cost import Cost, cost_json
from windlass.serve.prepare import Prepared
from windlass.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from windlass.serve.served_completion import ServedCompletion
from windlass.text.completion import Completion, Delta
from windlass.text.parsing.output import (
    CallArguments,
    CallStart,
    ContentText,
    Event,
    ParsedMessage,
    ReasoningText,
)
from windlass.text.parsing.parser import OutputParser

Json = dict[str, Any]

_MIN_LOGPROB = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    """A log probability that JSON can express."""
    return max(logprob, _MIN_LOGPROB)


class Formatter(Protocol):
    """Formats the responses of one endpoint."""

    whole_object: str
    chunk_object: str
    is_plain: bool  # chunks in mid-stream differ only in their text

    def whole(self, delta: Delta, completion: Completion) -> Json:
        """Format a finished choice."""
        ...

    def chunks(self, delta: Delta, completion: Completion) -> list[Json]:
        """Format the choices of `delta`, each for its own chunk."""
        ...

    def extra(self, completions: Sequence[Completion]) -> Json:
        """Fields of the response besides its choices."""
        ...

    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning in the output so far."""
        ...


class ChatFormatter:
    """Formats responses of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._body = body
        self._parsers = [OutputParser(prepared.parsing) for _ in prepared.requests]
        self._tokenizer = tokenizer
        self._hides_reasoning = body.hides_reasoning
        is_text = body.num_logprobs is None and not body.return_token_ids
        self.is_plain = is_text and prepared.parsing.is_plain

    def whole(self, delta: Delta, completion: Completion) -> Json:  # noqa: ARG002
        parsed = ParsedMessage()
        parsed.add(self._parsers[delta.index].feed(delta.text, last=True))
        message: Json = {"role": "assistant", "content": parsed.content, "refusal": None}
        if parsed.reasoning and not self._hides_reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ]
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            **_finish(delta, has_calls=bool(parsed.calls)),
            **_token_ids(delta, self._body.return_token_ids),
        }

    def chunks(self, delta: Delta, completion: Completion) -> list[Json]:
        chunks = []
        if delta.first:
            first = self._chunk(delta.index, {"role": "assistant", "content": ""})
            if self._body.return_token_ids:
                first["prompt_token_ids"] = completion.request.prompt
            chunks.append(first)
        parser = self._parsers[delta.index]
        events = parser.feed(delta.text, last=delta.finish_reason is not None)
        parts = [part for event in events if (part := self._part(event)) is not None]
        if not parts and (delta.logprobs or (self._body.return_token_ids and delta.tokens)):
            parts = [{"content": ""}]
        for i, part in enumerate(parts):
            chunk = self._chunk(delta.index, part)
            if i == 0:  # all tokens of the delta belong to its first chunk
                chunk["logprobs"] = self._logprobs(delta)
                chunk |= _token_ids(delta, self._body.return_token_ids)
            chunks.append(chunk)
        if delta.finish_reason is not None:
            finish = _finish(delta, has_calls=parser.num_calls > 0)
            chunks.append(self._chunk(delta.index, {}) | finish)
        return chunks

    def _part(self, event: Event) -> Json | None:
        """The `delta` of one event; None: it is not sent."""
        match event:
            case ContentText(text):
                return {"content": text}
            case ReasoningText(text):
                return None if self._hides_reasoning else {"reasoning_content": text}
            case CallStart(index, id_, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": id_, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def extra(self, completions: Sequence[Completion]) -> Json:
        fields: Json = {}
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(completions[0], self._tokenizer)
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = completions[0].request.prompt
        return fields

    def num_reasoning_tokens(self) -> int:
        return sum(num_reasoning_tokens(parser, self._tokenizer) for parser in self._parsers)

    def _chunk(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, delta: Delta) -> Json | None:
        if self._body.num_logprobs is None:
            return None
        content = [self._entry(logprob) for logprob in delta.logprobs]
        return {"content": content, "refusal": None}

    def _entry(self, logprob: TokenLogprob) -> msgspec.Raw:
        top = logprob.top if self._body.top_logprobs else []
        return _encode(
            {
                **self._token(logprob.token, logprob.logprob),
                "top_logprobs": [self._token(token, value) for token, value in top],
            }
        )

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "token": _token_text(token, self._body, self._tokenizer),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }


class CompletionFormatter:
    """Formats responses of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionRequest, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self._body = body
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._offsets = [0] * len(prepared.requests)  # per choice: text offset of its next token
        self.is_plain = body.logprobs is None and not body.return_token_ids

    def whole(self, delta: Delta, completion: Completion) -> Json:
        choice = self._choice(delta, completion) | _finish(delta)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(completion, self._tokenizer)
        return choice

    def chunks(self, delta: Delta, completion: Completion) -> list[Json]:
        has_content = delta.text or delta.logprobs or delta.first or delta.finish_reason
        if not has_content and not self._body.return_token_ids:
            return []
        return [self._choice(delta, completion) | _finish(delta)]

    def extra(self, completions: Sequence[Completion]) -> Json:  # noqa: ARG002
        return {}

    def num_reasoning_tokens(self) -> int:
        return 0

    def _choice(self, delta: Delta, completion: Completion) -> Json:
        echo = self._prompt_text(completion) if self._body.echo and delta.first else ""
        choice = {
            "index": delta.index,
            "text": echo + delta.text,
            "logprobs": self._logprobs(delta, completion),
            **_token_ids(delta, self._body.return_token_ids),
        }
        if self._body.return_token_ids and delta.first:
            choice["prompt_token_ids"] = completion.request.prompt
        return choice

    def _prompt_text(self, completion: Completion) -> str:
        prompt = self._prepared.prompts[completion.index // self._prepared.num_choices]
        assert prompt.text is not None, "prepare.py decodes prompts for echo"
        return prompt.text

    def _logprobs(self, delta: Delta, completion: Completion) -> Json | None:
        if self._body.logprobs is None:
            return None
        logprobs: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if self._body.echo and delta.first:
            self._append(logprobs, delta.index, completion.request.prompt[0])
            for logprob in completion.prompt_logprobs:
                self._append(logprobs, delta.index, logprob.token, logprob=logprob)
        for logprob in delta.logprobs:
            self._append(logprobs, delta.index, logprob.token, logprob=logprob)
        return logprobs

    def _append(
        self, logprobs: Json, index: int, token: int, *, logprob: TokenLogprob | None = None
    ) -> None:
        """Append one token; `logprob` None: the first token of the prompt has none."""
        text = self._tokenizer.token_text(token)
        logprobs["tokens"].append(_token_text(token, self._body, self._tokenizer))
        logprobs["text_offset"].append(self._offsets[index])
        self._offsets[index] += len(text)
        if logprob is None:
            logprobs["token_logprobs"].append(None)
            logprobs["top_logprobs"].append(None)
            return
        logprobs["token_logprobs"].append(finite(logprob.logprob))
        top = logprob.top if self._body.logprobs else []
        pairs = [*top, (token, logprob.logprob)]
        entries = {
            _token_text(other, self._body, self._tokenizer): finite(value) for other, value in pairs
        }
        logprobs["top_logprobs"].append(_encode(entries))


def _token_text(token: int, body: GenerationRequest, tokenizer: Tokenizer) -> str:
    return f"token_id:{token}" if body.return_tokens_as_token_ids else tokenizer.token_text(token)


def _finish(delta: Delta, *, has_calls: bool = False) -> Json:
    reason = delta.finish_reason
    if has_calls and reason == "stop":
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": delta.stop_reason}


def _token_ids(delta: Delta, requested: bool | None) -> Json:
    return {"token_ids": delta.tokens} if requested else {}


def prompt_logprobs(completion: Completion, tokenizer: Tokenizer) -> list[msgspec.Raw | None]:
    """Log probabilities of each prompt token and of the top tokens; the first token has none."""
    logprobs: list[msgspec.Raw | None] = [None]
    for logprob in completion.prompt_logprobs:
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(logprob.top, 1)]
        ranked.append((logprob.token, logprob.logprob, logprob.rank))
        entries = {
            str(token): {
                "logprob": finite(value),
                "rank": rank,
                "decoded_token": tokenizer.token_text(token),
            }
            for token, value, rank in ranked
        }
        logprobs.append(_encode(entries))
    return logprobs


def num_reasoning_tokens(parser: OutputParser, tokenizer: Tokenizer) -> int:
    """Tokens of an output's reasoning, counted by encoding its text."""
    return len(tokenizer.encode(parser.reasoning, False)) if parser.reasoning else 0


def _encode(value: Json) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def usage(prepared: Prepared, served: Sequence[ServedCompletion], cost: Cost | None = None) -> Json:
    """Count tokens. A prompt counts once for all its completions; draft tokens appear if there were any."""
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
    if drafted or prepared.requests[0].prediction:
        accepted = sum(each.num_accepted for each in served)
        numbers["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    if cost is not None:
        numbers |= {"cost": cost.total, "cost_details": cost_json(cost)}
    return numbers
