"""From a checked body to requests for the engine: text to tokens, fields to sampling parameters.

Everything a client can get wrong beyond types is refused here or by the engine's own limits, with
the numbers that would be right. Sizes are checked before the work that depends on them, and work
that takes more than some milliseconds is done in threads: this runs on the event loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from windlass.config import ServeConfig
from windlass.core.card import EngineReport, ModelCard
from windlass.core.limits import SchedulerLimits
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.errors import CapacityError, RequestError
from windlass.serve import body_limits
from windlass.serve.problems import ModelNotFound
from windlass.serve.protocol import ChatRequest, CompletionRequest, Generation, Templated
from windlass.serve.shown import shown
from windlass.serve.structured import structured_of
from windlass.serve.workers import Workers
from windlass.text.completion import check_ids, resolve_words
from windlass.text.template_process import Renderer
from windlass.text.template_worker import RenderJob

T = TypeVar("T")

_INLINE_CHARS = 1_000  # tokenised on the event loop: about as long as a thread takes to answer
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
    text: str | None = None  # when the client sent text, or wants an echo


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
        template: Renderer | None,
        workers: Workers,
        *,
        adapters: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`adapters` gives the names that requests may use now beside the model's."""
        self._card = card
        self._workers = workers
        self._max_token_chars = card.tokenizer.max_token_chars
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
            f"the model {shown(name)} does not exist here. This server has "
            f"{self._card.name!r}{others}.",
            "model",
        )

    async def chat(self, body: ChatRequest, report: EngineReport) -> Prepared:
        self.adapter_of(body.model)
        text = await self.render(body, report)
        special = self._wants_special(body.add_special_tokens, text)
        tokens = await self.encode(text, special, report)
        return await self._off_loop(body, self._chat, body, tokens, report)

    def _chat(self, body: ChatRequest, tokens: list[int], report: EngineReport) -> Prepared:
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens
        sampling = self._sampling(body, max_tokens, None, report)
        return self._prepared("chatcmpl", body, [Prompt(tokens)], sampling, report)

    async def completion(self, body: CompletionRequest, report: EngineReport) -> Prepared:
        self.adapter_of(body.model)
        prompts = await self._prompts(body.prompt, body.add_special_tokens is not False, report)
        return await self._off_loop(body, self._completion, body, prompts, report)

    def _completion(
        self, body: CompletionRequest, prompts: list[Prompt], report: EngineReport
    ) -> Prepared:
        sampling = self._sampling(body, body.max_tokens, _COMPLETION_MAX_TOKENS, report)
        if body.echo and body.logprobs is not None and sampling.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        prepared = self._prepared("cmpl", body, prompts, sampling, report)
        if body.echo:
            self._spell_prompts(prepared, always=body.truncate_prompt_tokens is not None)
        return prepared

    async def _off_loop(self, body: Generation, work: Callable[..., T], *args: Any) -> T:
        """The result of `work`, in a thread where it may take long."""
        if body.num_bytes <= body_limits.INLINE_BYTES and not body.bad_words:
            return work(*args)
        return await self._workers.releasing_gil(work, *args)

    # ---- text --------------------------------------------------------------------------------

    async def render(self, body: Templated, report: EngineReport) -> str:
        """The prompt text of a conversation."""
        if self._template is None:
            raise RequestError(
                f"the model {self._card.name!r} has no chat template. Start the server with "
                "--chat-template FILE, or use /v1/completions.",
                "messages",
            )
        return await self._template.render(
            RenderJob(
                messages=[message.for_template() for message in body.messages],
                max_chars=self._max_chars(report),
                options=body.chat_template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                continue_final=body.continue_final_message,
            )
        )

    def _max_chars(self, report: EngineReport) -> int:
        """A text with more characters than this has more tokens than the context."""
        return report.max_model_len * self._max_token_chars

    async def encode(self, text: str, add_special: bool, report: EngineReport) -> list[int]:
        return (await self._encode_all([text], add_special, report))[0]

    async def _encode_all(
        self, texts: Sequence[str], add_special: bool, report: EngineReport
    ) -> list[list[int]]:
        most = self._max_chars(report)
        longest = max(map(len, texts), default=0)
        if longest > most:
            raise CapacityError(
                f"the prompt has {longest:,} characters. The model's context holds "
                f"{report.max_model_len:,} tokens of at most {self._max_token_chars} characters "
                f"each, {most:,} in all. Shorten the prompt.",
                "prompt",
            )
        encode_all = self._tokenizer.encode_all
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return encode_all(texts, add_special)
        return await self._workers.releasing_gil(encode_all, texts, add_special)

    def _wants_special(self, asked: bool | None, rendered: str) -> bool:
        """Templates write the special tokens themselves, and a second BOS does harm."""
        bos = self._card.special_tokens.get("bos_token")
        return bool(asked) and not (bos and rendered.startswith(bos))

    async def _prompts(self, prompt: Any, add_special: bool, report: EngineReport) -> list[Prompt]:
        """The prompts of a body, all texts tokenised in one batch."""
        if isinstance(prompt, str):
            prompt = [prompt]
        if not prompt:
            return []
        if isinstance(prompt[0], str):
            encoded = await self._encode_all(prompt, add_special, report)
            return [Prompt(tokens, text) for tokens, text in zip(encoded, prompt, strict=True)]
        if isinstance(prompt[0], int):
            prompt = [prompt]
        return [Prompt(tokens) for tokens in prompt]

    def _spell_prompts(self, prepared: Prepared, always: bool) -> None:
        """Decode prompts that came as token ids, or that were truncated (`always`), for `echo`."""
        skip = prepared.sampling.skip_special_tokens
        for i, prompt in enumerate(prepared.prompts):
            if always or prompt.text is None:
                text = self._tokenizer.decode(prompt.tokens, skip)
                prepared.prompts[i] = replace(prompt, text=text)

    # ---- numbers -----------------------------------------------------------------------------

    def _sampling(
        self,
        body: Generation,
        max_tokens: int | None,
        default_max: int | None,
        report: EngineReport,
    ) -> SamplingParams:
        """The request's fields over the model's defaults over the engine's."""
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
        num_outputs = 0  # tokens that may be generated, of all prompts
        for i, prompt in enumerate(prompts):
            tokens = _truncated(prompt.tokens, cut, limits, sampling.max_tokens)
            if not tokens:
                raise RequestError("the prompt is empty.", "prompt")
            check_ids("prompt", tokens, report.vocab_size)
            num_outputs += limits.fit(len(tokens), sampling.max_tokens)
            prompts[i] = replace(prompt, tokens=tokens)
        _check_total(prompts, sampling, report)
        _check_logprobs_total(prompts, sampling, num_outputs, report)
        children = [sampling.child(j) for j in range(sampling.n)]
        requests = tuple(
            NewRequest(
                f"{engine_id}-{i * sampling.n + j}",
                prompt.tokens,
                child,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                adapter=adapter,
            )
            for i, prompt in enumerate(prompts)
            for j, child in enumerate(children)
        )
        return Prepared(answer_id, prompts, sampling, requests)


def _check_total(prompts: list[Prompt], sampling: SamplingParams, report: EngineReport) -> None:
    """Refuse what would be too much for one message: each completion carries its prompt."""
    num_completions = len(prompts) * sampling.n
    total = sampling.n * sum(len(prompt.tokens) for prompt in prompts)
    most = max(body_limits.MAX_TOTAL_PROMPT_TOKENS, report.max_model_len)
    if total > most:
        raise RequestError(
            f"the request has {total:,} prompt tokens over its {num_completions:,} completions; "
            f"at most {most:,} are taken. Send fewer prompts, or a smaller n.",
            "n" if sampling.n > 1 else "prompt",
        )
    if num_completions == 1:
        return
    num_bytes = num_completions * len(msgspec.msgpack.encode(sampling))
    if num_bytes > body_limits.MAX_TOTAL_PARAMS_BYTES:
        raise RequestError(
            f"the sampling parameters take {num_bytes:,} bytes over {num_completions:,} "
            f"completions; at most {body_limits.MAX_TOTAL_PARAMS_BYTES:,} are taken. Send fewer "
            "prompts, a smaller n, or a shorter logit_bias, allowed_token_ids, bad_words or form.",
            "n" if sampling.n > 1 else "prompt",
        )


def _check_logprobs_total(
    prompts: list[Prompt], sampling: SamplingParams, num_outputs: int, report: EngineReport
) -> None:
    """Refuse more log probabilities than an answer may hold."""
    num_prompt = sum(len(prompt.tokens) for prompt in prompts)
    counts = {
        "logprobs": (sampling.logprobs, num_outputs, "max_tokens"),
        "prompt_logprobs": (sampling.prompt_logprobs, num_prompt, "prompts"),
    }
    for name, (asked, num_tokens, what) in counts.items():
        if asked is None:
            continue
        per_token = 1 + (report.vocab_size if asked == -1 else asked)
        total = per_token * num_tokens * sampling.n
        if total > body_limits.MAX_TOTAL_LOGPROBS:
            raise RequestError(
                f"{name} could be {total:,} numbers in one answer: {per_token:,} for each of "
                f"{num_tokens * sampling.n:,} tokens; at most {body_limits.MAX_TOTAL_LOGPROBS:,} "
                f"are sent. Lower {name}, n or {what}.",
                name,
            )


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
