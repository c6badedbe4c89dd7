"""From a checked body to requests for the engine: text to tokens, fields to sampling parameters.

Everything a client can get wrong beyond types is refused here or by the engine's own limits, with
the numbers that would be right.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from windlass.config import ServeConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.core.completion import check_ids, resolve_words
from windlass.core.limits import SchedulerLimits
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.errors import RequestError
from windlass.serve.chat import ChatTemplate
from windlass.serve.problems import ModelNotFound
from windlass.serve.protocol import ChatRequest, CompletionRequest, Generation, Templated
from windlass.serve.structured import structured_of

_LONG_TEXT = 20_000  # characters; tokenising more than this would stall other requests
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat may fill the context

# Fields that go into SamplingParams as they are.
_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "deterministic",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    text: str | None = None  # when the client sent text


@dataclass(frozen=True, slots=True)
class Prepared:
    """What goes to the engine for one HTTP request. Choice i answers prompt i // n."""

    answer_id: str
    prompts: list[Prompt]
    sampling: SamplingParams
    requests: tuple[NewRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Of the work that the engine gets: a prompt counts once per completion."""
        return sum(len(request.prompt) for request in self.requests)


class Preparer:
    """Makes engine requests for one model. Holds no state of requests."""

    def __init__(
        self,
        card: ModelCard,
        config: ServeConfig,
        template: ChatTemplate | None,
        adapters: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`adapters` gives the names that requests may use now beside the model's."""
        self._card = card
        self._adapters = adapters
        self._tokenizer = card.tokenizer
        self._template = template
        self._max_logprobs = config.max_logprobs
        SamplingParams(**card.default_sampling)  # bad defaults are found at start

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a request's `model` means; none: the model itself."""
        if name is None or name == self._card.name:
            return ""
        adapters = self._adapters()
        if name in adapters:
            return name
        others = f" and {len(adapters)} adapters (GET /v1/models)" if adapters else ""
        raise ModelNotFound(
            f"the model {name!r:.200} does not exist here. This server has "
            f"{self._card.name!r}{others}.",
            "model",
        )

    async def chat(self, body: ChatRequest, report: EngineReport) -> Prepared:
        self.adapter_of(body.model)
        text = self.render(body)
        tokens = await self.encode(text, self._wants_special(body.add_special_tokens, text))
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens
        sampling = self._sampling(body, max_tokens, None, report)
        return self._prepared("chatcmpl", body, [Prompt(tokens)], sampling, report)

    async def completion(self, body: CompletionRequest, report: EngineReport) -> Prepared:
        self.adapter_of(body.model)
        prompts = await self._prompts(body.prompt, body.add_special_tokens is not False)
        sampling = self._sampling(body, body.max_tokens, _COMPLETION_MAX_TOKENS, report)
        if body.echo and body.logprobs is not None and sampling.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        return self._prepared("cmpl", body, prompts, sampling, report)

    # ---- text --------------------------------------------------------------------------------

    def render(self, body: Templated) -> str:
        """The prompt text of a conversation."""
        if self._template is None:
            raise RequestError(
                f"the model {self._card.name!r} has no chat template. Start the server with "
                "--chat-template FILE, or use /v1/completions.",
                "messages",
            )
        return self._template.render(
            [message.for_template() for message in body.messages],
            body.chat_template_kwargs,
            body.add_generation_prompt,
            body.continue_final_message,
        )

    async def encode(self, text: str, add_special: bool) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self._tokenizer.encode(text, add_special)
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special)

    def _wants_special(self, asked: bool | None, rendered: str) -> bool:
        """Templates write the special tokens themselves, and a second BOS does harm."""
        bos = self._card.special_tokens.get("bos_token")
        return bool(asked) and not (bos and rendered.startswith(bos))

    async def _prompts(self, prompt: Any, add_special: bool) -> list[Prompt]:
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        made = []
        for item in prompt:
            if isinstance(item, str):
                made.append(Prompt(await self.encode(item, add_special), item))
            else:
                made.append(Prompt(item))
        return made

    # ---- numbers -----------------------------------------------------------------------------

    def _sampling(
        self,
        body: Generation,
        max_tokens: int | None,
        default_max: int | None,
        report: EngineReport,
    ) -> SamplingParams:
        """The request's wishes over the model's defaults over the engine's."""
        values: dict[str, Any] = {"max_tokens": default_max, **self._card.default_sampling}
        values |= {
            name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None
        }
        values["logprobs"] = body.num_logprobs
        values["structured_outputs"] = structured_of(body)
        if max_tokens is not None:
            values["max_tokens"] = max_tokens
        sampling = SamplingParams(**values)
        self._check_logprobs("logprobs", sampling.logprobs)
        self._check_logprobs("prompt_logprobs", sampling.prompt_logprobs)
        return resolve_words(sampling, self._tokenizer, report.vocab_size)

    def _check_logprobs(self, name: str, asked: int | None) -> None:
        most = self._max_logprobs
        if asked is not None and most != -1 and (asked > most or asked == -1):
            raise RequestError(
                f"{name} must be at most {most}, got {asked}. The server's limit is --max-logprobs.",
                name,
            )

    def _prepared(
        self,
        prefix: str,
        body: Generation,
        prompts: list[Prompt],
        sampling: SamplingParams,
        report: EngineReport,
    ) -> Prepared:
        if not prompts:
            raise RequestError("prompt is empty; send at least one.", "prompt")
        unique = uuid.uuid4().hex
        answer_id = f"{prefix}-{body.request_id or unique}"
        # A client may use its id twice; in the engine the outputs of the two must not mix.
        engine_id = f"{answer_id}-{unique}" if body.request_id else answer_id
        limits, adapter = limits_of(report), self.adapter_of(body.model)
        cut = body.truncate_prompt_tokens
        requests = []
        for i, prompt in enumerate(prompts):
            tokens = _truncated(prompt.tokens, cut, limits, sampling.max_tokens)
            if not tokens:
                raise RequestError("the prompt is empty.", "prompt")
            check_ids("prompt", tokens, report.vocab_size)
            limits.fit(len(tokens), sampling.max_tokens)
            prompts[i] = replace(prompt, tokens=tokens)
            for j in range(sampling.n):
                name = f"{engine_id}-{i * sampling.n + j}"
                requests.append(
                    NewRequest(
                        name,
                        tokens,
                        sampling.child(j),
                        priority=body.priority or 0,
                        cache_salt=body.cache_salt or "",
                        adapter=adapter,
                    )
                )
        return Prepared(answer_id, prompts, sampling, tuple(requests))


def limits_of(report: EngineReport) -> SchedulerLimits:
    """The engine's limits, so that a request is refused here with the words it would use."""
    return SchedulerLimits(
        max_num_seqs=report.max_num_seqs,
        max_num_batched_tokens=report.max_num_batched_tokens,
        max_model_len=report.max_model_len,
        block_size=report.capacity.block_size,
        num_blocks=report.capacity.num_blocks,
    )


def _truncated(
    tokens: list[int], cut: int | None, limits: SchedulerLimits, max_tokens: int | None
) -> list[int]:
    """The last `cut` tokens; -1: as many as leave room for the answer."""
    if cut is None:
        return tokens
    if cut == -1:
        cut = max(1, limits.max_model_len - (max_tokens or 1))
    return tokens[-cut:] if cut else []
