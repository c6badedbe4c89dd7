"""From a checked HTTP body to engine requests.

Maps fields of the body to sampling params and options, and checks the limits of one HTTP request.
text/request_builder.py does the work that does not depend on HTTP. This code runs on the event
loop: sizes are checked before the work that depends on them, and work of more than some
milliseconds runs in threads.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from windlass.core.card import EngineReport, ModelCard
from windlass.core.sampling import SamplingParams
from windlass.core.types import NewRequest
from windlass.errors import RequestError
from windlass.serve import body_limits
from windlass.serve.abbreviate import abbreviate
from windlass.serve.live_config import LiveConfig
from windlass.serve.problems import ModelNotFound
from windlass.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    ConversationRequest,
    GenerationRequest,
)
from windlass.serve.quarantine import hash_content
from windlass.serve.structured import structured_of
from windlass.serve.tenants import NO_TENANT, Tenant
from windlass.serve.workers import Workers
from windlass.text.chat_output import chat_output
from windlass.text.grammar.schema import unsupported_keywords
from windlass.text.parsing.parser import ParsingOptions
from windlass.text.parsing.registry import AUTO, OutputFormat, choose_format
from windlass.text.request_builder import EncodedPrompt, Prompt, RequestBuilder, RequestOptions
from windlass.text.template_process import Renderer
from windlass.text.template_worker import RenderJob

T = TypeVar("T")

CHAT_ID_PREFIX = "chatcmpl-"
_INLINE_CHARS = 1_000  # encoded on the event loop: takes about as long as handing over to a thread

# Fields with the same name and meaning in SamplingParams.
_SAMPLING_FIELDS = (
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
class Prepared:
    """The engine requests of one HTTP request. Request i belongs to prompt i // sampling.n."""

    response_id: str
    prompts: list[EncodedPrompt]  # `text` is set where the client sent text or asks for an echo
    sampling: SamplingParams
    requests: tuple[NewRequest, ...]
    max_total_tokens: int  # of the prompts and all completions
    num_choices: int = 1  # per prompt; the best of `sampling.n` completions
    parsing: ParsingOptions = field(default_factory=ParsingOptions)
    relaxed: tuple[str, ...] = ()  # keywords of its JSON schema that are not enforced

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens for the engine: a prompt counts once per completion."""
        return sum(len(request.prompt) for request in self.requests)

    def with_content(self, content: bytes) -> Prepared:
        """The same with fingerprints of this content, which requests to other models have, too."""
        requests = (
            replace(request, fingerprint=hash_content(b"%d %s" % (index, content)))
            for index, request in enumerate(self.requests)
        )
        return replace(self, requests=tuple(requests))

    def with_id_prefix(self, prefix: str) -> Prepared:
        """The same with the beginning that ids have in another API: `msg_` instead of `chatcmpl-`."""
        return replace(self, response_id=prefix + self.response_id.removeprefix(CHAT_ID_PREFIX))

    def due_at(self, deadline: float) -> Prepared:
        """The same with a deadline, in seconds of the monotonic clock."""
        requests = (replace(request, deadline=deadline) for request in self.requests)
        return replace(self, requests=tuple(requests))


class Preparer:
    """Prepares requests for one model. Holds no state of requests."""

    def __init__(
        self,
        card: ModelCard,
        config: LiveConfig,
        template: Renderer | None,
        workers: Workers,
        *,
        output_format: OutputFormat | None = None,
        adapters: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`adapters` returns the names of the adapters that requests may use now.

        `output_format`: how the model writes tool calls and reasoning; None: no template says it.
        """
        self._card = card
        self._workers = workers
        self._adapters = adapters
        self._tokenizer = card.tokenizer
        self._template = template
        self._output_format = output_format or choose_format("", AUTO, AUTO)
        self._config = config
        self._last_builder: tuple[EngineReport, RequestBuilder] | None = None  # of which report
        self._trusts_templates = config.value.trust_request_chat_template
        _ = card.tokenizer.max_token_chars  # reads the whole vocabulary: now, not in a request
        SamplingParams(**card.default_sampling)  # bad defaults are found at start

    def _builder(self, report: EngineReport) -> RequestBuilder:
        last = self._last_builder
        if last is None or last[0] is not report:
            last = self._last_builder = report, RequestBuilder(self._card, report)
        return last[1]

    def adapter_of(self, name: str | None, tenant: Tenant = NO_TENANT) -> str:
        """The adapter that a request's `model` names; "" for the base model.

        A model that the tenant may not use does not exist for it.
        """
        names = (self._card.name, *self._card.aliases)
        if name is None or name in names:
            if tenant.may_use("", names if name is None else (name,)):
                return ""
        elif name in self._adapters() and tenant.may_use(name, ()):
            return name
        usable = [each for each in names if tenant.may_use("", (each,))][:1]
        adapters = [each for each in self._adapters() if tenant.may_use(each, ())]
        others = [f"{len(adapters)} adapters (GET /v1/models)"] if adapters else []
        found = " and ".join([*map(repr, usable), *others]) or "no model for this key"
        raise ModelNotFound(
            f"the model {abbreviate(name or names[0])} does not exist here. This server has {found}.",
            "model",
        )

    async def chat(
        self,
        body: ChatRequest,
        report: EngineReport,
        tenant: Tenant = NO_TENANT,
        mark: Callable[[str], None] = lambda _phase: None,
    ) -> Prepared:
        """`mark` is called when the chat template was rendered."""
        self.adapter_of(body.model, tenant)
        text, builder = await self.render(body, report), self._builder(report)
        mark("template")
        (tokens,) = await self._encode_off_loop(
            len(text), builder.encode_rendered, [text], bool(body.add_special_tokens)
        )
        return await self._off_loop(body, self._chat, body, text, tokens, report, tenant)

    def _chat(
        self,
        body: ChatRequest,
        text: str,
        tokens: list[int],
        report: EngineReport,
        tenant: Tenant,
    ) -> Prepared:
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens
        sampling = self._sampling(body, max_tokens, None, report)
        use = body.tool_use
        output = chat_output(
            self._output_format,
            None if use is None else use.tool_set,
            sampling,
            prompt=text,
            tokenizer=self._tokenizer,
        )
        sampling, parsing = output.sampling, output.parsing
        if parsing.special_tokens and body.skip_special_tokens is None:
            sampling = replace(sampling, skip_special_tokens=False)
        sampling = self._builder(report).resolve(sampling)
        prompts = [EncodedPrompt(tokens)]
        prepared = self._prepared(CHAT_ID_PREFIX, body, prompts, sampling, report, tenant)
        return replace(prepared, parsing=parsing)

    async def completion(
        self, body: CompletionRequest, report: EngineReport, tenant: Tenant = NO_TENANT
    ) -> Prepared:
        self.adapter_of(body.model, tenant)
        prompts, builder, infill = as_prompts(body.prompt), self._builder(report), body.infill
        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        add_special = body.add_special_tokens is not False
        if infill is None:
            encoded = await self._encode_off_loop(
                num_chars, builder.encode_prompts, prompts, add_special
            )
        else:
            num_chars += infill.num_chars
            encoded = await self._encode_off_loop(
                num_chars, builder.encode_infill, prompts, infill, add_special
            )
        return await self._off_loop(body, self._completion, body, encoded, report, tenant)

    def _completion(
        self,
        body: CompletionRequest,
        prompts: list[EncodedPrompt],
        report: EngineReport,
        tenant: Tenant,
    ) -> Prepared:
        sampling = self._sampling(body, body.max_tokens, body.default_max_tokens, report)
        sampling = self._builder(report).resolve(sampling)
        if body.echo and body.logprobs is not None and sampling.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        if body.infill is not None and self._card.fim is not None:
            stops = (*sampling.stop_token_ids, *self._card.fim.stop)
            sampling = replace(sampling, stop_token_ids=stops)
        prepared = self._prepared("cmpl-", body, prompts, sampling, report, tenant)
        if body.echo:
            self._decode_prompts(prepared, always=body.truncate_prompt_tokens is not None)
        return prepared

    async def _off_loop(self, body: GenerationRequest, work: Callable[..., T], *args: Any) -> T:
        """Run `work`, in a thread where the body is large."""
        if body.num_bytes <= body_limits.INLINE_BYTES and not body.bad_words:
            return work(*args)
        return await self._workers.releasing_gil(work, *args)

    async def _encode_off_loop(self, num_chars: int, encode: Callable[..., T], *args: Any) -> T:
        """Run `encode`, in a thread where the text is long."""
        if num_chars <= _INLINE_CHARS:
            return encode(*args)
        return await self._workers.releasing_gil(encode, *args)

    # ---- text --------------------------------------------------------------------------------

    async def render(self, body: ConversationRequest, report: EngineReport) -> str:
        """Render a conversation with the chat template."""
        if self._template is None:
            raise RequestError(
                f"the model {self._card.name!r} has no chat template. Start the server with "
                "--chat-template FILE, or use /v1/completions.",
                "messages",
            )
        if body.chat_template is not None and not self._trusts_templates:
            raise RequestError(
                "chat_template: this server renders its own template only. Its operator can allow "
                "others with --trust-request-chat-template.",
                "chat_template",
            )
        use = body.tool_use
        return await self._template.render(
            RenderJob(
                messages=[message.for_template() for message in body.messages],
                max_chars=self._builder(report).max_chars,
                tools=[] if use is None else use.for_template(),
                options=body.template_options,
                template=body.chat_template,
                add_generation_prompt=body.add_generation_prompt,
                continue_final=body.continue_final_message,
            )
        )

    async def encode(self, text: str, add_special: bool, report: EngineReport) -> list[int]:
        """Encode one text."""
        encode = self._builder(report).encode
        return (await self._encode_off_loop(len(text), encode, [text], add_special))[0]

    def _decode_prompts(self, prepared: Prepared, always: bool) -> None:
        """Decode prompts that came as token ids, or that were truncated (`always`), for `echo`."""
        skip = prepared.sampling.skip_special_tokens
        for i, prompt in enumerate(prepared.prompts):
            if always or prompt.text is None:
                text = self._tokenizer.decode(prompt.tokens, skip)
                prepared.prompts[i] = replace(prompt, text=text)

    # ---- sampling params and requests --------------------------------------------------------

    def _sampling(
        self,
        body: GenerationRequest,
        max_tokens: int | None,
        default_max_tokens: int | None,
        report: EngineReport,
    ) -> SamplingParams:
        """The request's fields, then the model's defaults, then the engine's; not resolved yet."""
        fields = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None
        }
        fields["logprobs"] = body.num_logprobs
        if body.is_best_of and not body.use_beam_search:
            # The log probabilities of the tokens decide which completions are best.
            fields |= {"n": body.best_of, "logprobs": body.num_logprobs or 0}
        fields["structured_outputs"] = structured_of(body)
        if max_tokens is not None:
            fields["max_tokens"] = max_tokens
        if isinstance(body, ChatRequest):
            fields["thinking_token_budget"] = body.max_thinking_tokens
        sampling = self._builder(report).sampling(fields, default_max_tokens)
        self._check_logprobs("logprobs", sampling.logprobs)
        self._check_logprobs("prompt_logprobs", sampling.prompt_logprobs)
        return sampling

    def _check_logprobs(self, name: str, requested: int | None) -> None:
        limit = self._config.value.max_logprobs
        if requested is not None and limit != -1 and (requested > limit or requested == -1):
            raise RequestError(
                f"{name} must be at most {limit}, got {requested}. "
                "The server's limit is --max-logprobs.",
                name,
            )

    def _prepared(
        self,
        prefix: str,
        body: GenerationRequest,
        prompts: list[EncodedPrompt],
        sampling: SamplingParams,
        report: EngineReport,
        tenant: Tenant,
    ) -> Prepared:
        if not prompts:
            raise RequestError("prompt is empty; send at least one.", "prompt")
        unique = uuid.uuid4().hex
        response_id = f"{prefix}{body.request_id or unique}"
        # A client may use its id twice; in the engine, ids are unique.
        engine_id = f"{response_id}-{unique}" if body.request_id else response_id
        builder = self._builder(report)
        expected = body.prediction.content if body.prediction is not None else None
        (prediction,) = builder.encode_predictions([expected or ""])
        options = RequestOptions(
            adapter=self.adapter_of(body.model, tenant),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            prediction=prediction,
            tenant=tenant.name,
            weight=tenant.weight,
        )
        fitted = [builder.fit(prompt, sampling, body.truncate_prompt_tokens) for prompt in prompts]
        num_prompts = [len(prompt.tokens) for prompt in fitted]
        num_outputs = sum(builder.max_new_tokens(count, sampling) for count in num_prompts)
        _check_total(num_prompts, sampling, report)
        _check_total_logprobs(sum(num_prompts), num_outputs, sampling, report)
        requests = builder.requests(engine_id, fitted, sampling, options)
        return Prepared(
            response_id=response_id,
            prompts=fitted,
            sampling=sampling,
            requests=tuple(requests),
            max_total_tokens=sum(num_prompts) + sampling.n * num_outputs,
            num_choices=body.n or 1,
            relaxed=unsupported_keywords(sampling.structured_outputs),
        )


def as_prompts(prompt: Any) -> Sequence[Prompt]:
    """The prompts of a body: a string or a list of token ids is one prompt."""
    is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    return [prompt] if is_one else prompt


def _check_total(
    num_prompt_tokens: Sequence[int], sampling: SamplingParams, report: EngineReport
) -> None:
    """Refuse requests that are too large for one message: each completion carries its prompt."""
    num_completions = len(num_prompt_tokens) * sampling.n
    total = sampling.n * sum(num_prompt_tokens)
    limit = max(body_limits.MAX_TOTAL_PROMPT_TOKENS, report.max_model_len)
    if total > limit:
        raise RequestError(
            f"the request has {total:,} prompt tokens over its {num_completions:,} completions; "
            f"at most {limit:,} are accepted. Send fewer prompts, or a smaller n.",
            "n" if sampling.n > 1 else "prompt",
        )
    if num_completions == 1:
        return
    num_bytes = num_completions * len(msgspec.msgpack.encode(sampling))
    if num_bytes > body_limits.MAX_TOTAL_PARAMS_BYTES:
        raise RequestError(
            f"the sampling parameters take {num_bytes:,} bytes over {num_completions:,} "
            f"completions; at most {body_limits.MAX_TOTAL_PARAMS_BYTES:,} are accepted. Send fewer "
            "prompts, a smaller n, or shorter logit_bias, allowed_token_ids, bad_words or "
            "structured outputs.",
            "n" if sampling.n > 1 else "prompt",
        )


def _check_total_logprobs(
    num_prompt_tokens: int, num_outputs: int, sampling: SamplingParams, report: EngineReport
) -> None:
    """Refuse requests for more log probabilities than an answer may hold."""
    counts = {
        "logprobs": (sampling.logprobs, num_outputs, "max_tokens"),
        "prompt_logprobs": (sampling.prompt_logprobs, num_prompt_tokens, "prompts"),
    }
    for name, (requested, num_tokens, cause) in counts.items():
        if requested is None:
            continue
        per_token = 1 + (report.vocab_size if requested == -1 else requested)
        total = per_token * num_tokens * sampling.n
        if total > body_limits.MAX_TOTAL_LOGPROBS:
            raise RequestError(
                f"{name} could be {total:,} numbers in one answer: {per_token:,} for each of "
                f"{num_tokens * sampling.n:,} tokens; at most {body_limits.MAX_TOTAL_LOGPROBS:,} "
                f"are sent. Lower {name}, n or {cause}.",
                name,
            )
