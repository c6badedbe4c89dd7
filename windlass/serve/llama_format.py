"""Responses in the format of llama-server's own API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.core.sampling import SamplingParams
from windlass.core.tokenizer import Tokenizer
from windlass.core.types import Timeline, TokenLogprob
from windlass.serve.formatters import Json, finite
from windlass.serve.llama_api import SAMPLERS, LlamaCompletionRequest, LlamaInfillRequest
from windlass.serve.media import EVENT_STREAM
from windlass.serve.openai_format import event
from windlass.serve.prepare import Prepared
from windlass.serve.problems import Problem
from windlass.text.completion import Completion, Delta

# Settings of samplers that this server does not have: off.
_OFF_SETTINGS: Json = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "typical_p": 1.0,
    "repeat_last_n": -1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "n_keep": 0,
    "n_discard": 0,
    "min_keep": 0,
    "post_sampling_probs": False,
    "lora": [],
}


def generation_settings(
    sampling: SamplingParams, *, stream: bool = False, grammar: str = ""
) -> Json:
    """Sampling params under llama-server's names."""
    num_tokens = -1 if sampling.max_tokens is None else sampling.max_tokens
    return {
        "seed": 2**32 - 1 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": max(0, sampling.top_k),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        **_OFF_SETTINGS,
        "stop": list(sampling.stop),
        "max_tokens": num_tokens,
        "n_predict": num_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stream": stream,
        "logit_bias": [
            {"token": token, "bias": bias} for token, bias in sampling.logit_bias.items()
        ],
        "n_probs": sampling.logprobs or 0,
        "grammar": grammar,
        "samplers": list(SAMPLERS),
        "timings_per_token": False,
    }


class LlamaFormat:
    """Formats the responses of /completion and /infill."""

    usage_in_events = False
    media_type = EVENT_STREAM

    def __init__(
        self,
        body: LlamaCompletionRequest | LlamaInfillRequest,
        prepared: Prepared,
        *,
        model: str,
        tokenizer: Tokenizer,
    ) -> None:
        self._body = body
        self._prepared = prepared
        self._model = model
        self._tokenizer = tokenizer

    def whole(
        self, deltas: Mapping[int, Delta], completions: Sequence[Completion], usage: Json
    ) -> Json | list[Json]:
        del usage
        found = []
        for completion in completions:
            delta = deltas[completion.index]
            tokens = delta.tokens if self._body.return_tokens else []
            found.append(self._final(delta, completion, content=delta.text, tokens=tokens))
        return found if self._body.is_many else found[0]

    def start(self, num_prompt: int) -> bytes:  # noqa: ARG002
        return b""

    def delta(self, delta: Delta, completion: Completion, usage: Json | None) -> bytes:  # noqa: ARG002
        events = b""
        if delta.text or delta.logprobs or (delta.tokens and delta.finish_reason is None):
            partial: Json = {
                "index": delta.index,
                "content": delta.text,
                "tokens": delta.tokens,
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": len(completion.tokens),
                "tokens_evaluated": len(completion.request.prompt),
                **self._probabilities(delta),
            }
            if self._body.timings_per_token and completion.timeline is not None:
                partial["timings"] = _timings(completion.timeline, len(completion.tokens))
            events = event(partial)
        if delta.finish_reason is None:
            return events
        return events + event(self._final(delta, completion, content="", tokens=[]))

    def end(self, usage: Json) -> bytes:  # noqa: ARG002
        return b""

    def error(self, problem: Problem) -> bytes:
        return event(problem.body())

    def _final(
        self, delta: Delta, completion: Completion, *, content: str, tokens: list[int]
    ) -> Json:
        request, timeline = completion.request, completion.timeline or Timeline()
        prompt = self._prepared.prompts[completion.index // self._prepared.num_choices]
        text = prompt.text
        if text is None:
            text = self._tokenizer.decode(prompt.tokens, skip_special=False)
        is_cut = delta.finish_reason == "length"
        word = delta.stop_reason if isinstance(delta.stop_reason, str) and not is_cut else ""
        stop_type = "limit" if is_cut else "word" if word else "eos"
        result: Json = {
            "index": delta.index,
            "content": content,
            "tokens": tokens,
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(completion.tokens),
            "tokens_evaluated": len(request.prompt),
            "generation_settings": generation_settings(
                request.sampling, stream=self._body.stream, grammar=self._body.grammar or ""
            ),
            "prompt": text,
            "has_new_line": "\n" in completion.text,
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": len(request.prompt) + max(0, len(completion.tokens) - 1),
            "timings": _timings(timeline, len(completion.tokens)),
        }
        if not self._body.stream:
            result |= self._probabilities(delta)
        return _selected(result, self._body.response_fields)

    def _probabilities(self, delta: Delta) -> Json:
        if not self._body.n_probs:
            return {}
        return {"completion_probabilities": [self._entry(each) for each in delta.logprobs]}

    def _entry(self, logprob: TokenLogprob) -> Json:
        top = [self._token(token, value) for token, value in logprob.top]
        return {**self._token(logprob.token, logprob.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        return {
            "id": token,
            "token": self._tokenizer.token_text(token),
            "bytes": list(self._tokenizer.token_bytes(token)),
            "logprob": finite(logprob),
        }


def _timings(timeline: Timeline, num_tokens: int) -> Json:
    """The engine's times of a request: until its first token, and from there on."""
    began = timeline.arrived if timeline.admitted is None else timeline.admitted
    first = began if timeline.first_token is None else timeline.first_token
    last = first if timeline.last_token is None else timeline.last_token
    num_prompt = timeline.num_prompt - timeline.num_cached
    return {
        "cache_n": timeline.num_cached,
        "prompt_n": num_prompt,
        **_speed("prompt", num_prompt, first - began),
        "predicted_n": num_tokens,
        # The first token is part of the prompt's time.
        **_speed("predicted", max(0, num_tokens - 1), last - first),
    }


def _speed(name: str, count: int, seconds: float) -> Json:
    return {
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }


def _selected(result: Json, fields: Sequence[str] | None) -> Json:
    """The requested fields of a result; a path such as "timings/prompt_n" becomes a name."""
    if not fields:
        return result
    found: Json = {}
    for path in fields:
        value: Any = result
        for part in path.split("/"):
            value = value.get(part, ...) if isinstance(value, dict) else ...
        if value is not ...:
            found[path] = value
    return found
