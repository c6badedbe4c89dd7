"""The schemas of request bodies: OpenAI's fields and the extensions of other engines.

A missing or null field has its default. Types are strict: "0.5" is not a number. prepare.py
converts the values for the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from windlass.core.sampling import MAX_N
from windlass.core.types import BATCH_PRIORITY, PROBE_PRIORITY
from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.abbreviate import abbreviate
from windlass.serve.fallback import FallbackMode
from windlass.serve.fields import check_extra, unknown_field, validation_error
from windlass.serve.json_body import decode_object
from windlass.serve.tools import Tool, ToolUse, check_calls, tool_use, with_decoded_calls
from windlass.text.request_builder import Infill

_MAX_TOKEN_ID = 2**32 - 1

INT64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
OutputLimit = Annotated[int, Field(ge=1, lt=2**63)]  # of APIs that always generate
TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]
TokenIds = Annotated[
    list[TokenId], Field(fail_fast=True)
]  # fail_fast: no error list for 200,000 wrong ids
TokenKey = Annotated[TokenId, Strict(False)]  # the keys of JSON objects are strings


Content = str | list[dict[str, Any]] | None
_PROMPT_SCHEMA = TypeAdapter(str | list[str] | list[int] | list[list[int]]).json_schema()


def _value_error(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


def _text_of(content: Any) -> str | None:
    """Convert a message's content to text: a string, or parts of type text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _value_error("must be a string or a list of parts")
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise _value_error(
            f"has {len(content):,} parts; at most {limits.MAX_CONTENT_PARTS:,} are accepted"
        )
    texts = []
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _value_error('each part must be an object such as {"type": "text", "text": "…"}')
        kind = part["type"]
        if kind not in ("text", "refusal"):
            raise _value_error(
                f"parts of type {abbreviate(kind)} are not supported; only 'text' is"
            )
        if not isinstance(part.get(kind), str):
            raise _value_error(f"a part of type {kind!r} needs a string in its field {kind!r}")
        texts.append(part[kind])
    return "\n".join(texts)


def _check_prompt(prompt: Any) -> Any:
    """Accept text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise _value_error(
            "must be a string, a list of strings, a list of token ids, or a list of those"
        )
    kinds = set(map(type, prompt))
    if len(kinds) > 1 or not kinds <= {str, int, list}:
        raise _value_error(
            "mixes kinds: its items must all be strings, all token ids, or all lists of ids"
        )
    for ids in [prompt] if kinds == {int} else prompt if kinds == {list} else []:
        if not set(map(type, ids)) <= {int}:
            raise _value_error("each inner list must contain token ids, which are integers")
        if ids and not 0 <= min(ids) <= max(ids) <= _MAX_TOKEN_ID:
            raise _value_error(f"has the invalid token id {min(ids) if min(ids) < 0 else max(ids)}")
    return prompt


TextsOrTokens = Annotated[Any, AfterValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]


def _strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(max_length=limits.MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString],
    BeforeValidator(_strings, json_schema_input_type=str | list[str]),
    Field(max_length=limits.MAX_STOP_STRINGS),
]
BadWord = Annotated[str, Field(max_length=limits.MAX_BAD_WORD_CHARS)]
BadWords = Annotated[
    list[BadWord],
    BeforeValidator(_strings, json_schema_input_type=str | list[str]),
    Field(max_length=limits.MAX_BAD_WORDS),
]


def _role(role: Any) -> Any:
    """The role `function` is the older name of `tool`."""
    return "tool" if role == "function" else role


class Message(BaseModel):
    """One message of a conversation; the chat template gets all its fields."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_role)
    ]
    content: Annotated[str | None, BeforeValidator(_text_of, json_schema_input_type=Content)] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=limits.MAX_TOOL_CALLS)] | None = (
        None
    )
    reasoning_content: str | None = None

    # What clients add to a message that is sent back, beside its text: no chat template renders it.
    _NOT_RENDERED: ClassVar = {
        "annotations",
        "cache_control",
        "id",
        "parsed",
        "provider_specific_fields",
        "reasoning_details",
        "thinking_blocks",
    }

    def model_post_init(self, _context: Any) -> None:
        extra = self.model_extra or {}
        call = extra.pop("function_call", None)
        if call is not None:  # the older form of tool_calls
            self.tool_calls = [*(self.tool_calls or ()), {"type": "function", "function": call}]
        self.content = self._other_name(extra, "refusal", self.content)
        self.reasoning_content = self._other_name(extra, "reasoning", self.reasoning_content)
        for name, value in extra.items():
            if name not in self._NOT_RENDERED and (name, value) != ("audio", None):
                raise unknown_field(name, type(self).model_fields, "messages")
        if self.content is None and self.role != "assistant":
            raise RequestError(f"a message of role {self.role!r} has no content.", "messages")
        if self.tool_calls and self.role != "assistant":
            raise RequestError(f"a message of role {self.role!r} has tool_calls.", "messages")
        check_calls(self.tool_calls or ())

    @staticmethod
    def _other_name(extra: dict[str, Any], name: str, given: str | None) -> str | None:
        """A text that is `given` under its usual name, or else under another one."""
        value = extra.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name} must be a string; got {abbreviate(value)}.", "messages")
        return given or value or given

    def for_template(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        kept = {name: value for name, value in fields.items() if value is not None}
        return {**with_decoded_calls(kept), "content": self.content or ""}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False, None] = None

    def model_post_init(self, _context: Any) -> None:
        for name in self.model_extra or {}:
            raise unknown_field(name, type(self).model_fields, "stream_options")


class Prediction(BaseModel):
    """Text that the client expects in the output."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["content"] = "content"
    content: Annotated[str | None, BeforeValidator(_text_of, json_schema_input_type=Content)]


class Body(BaseModel):
    """A request body. `fields.check_extra` checks undeclared fields."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None

    # Whether an unknown field is always an error: a misspelt one must not change the server.
    refuses_unknown: ClassVar[bool] = False

    _num_bytes: int = PrivateAttr(0)
    _unknown: list[RequestError] = PrivateAttr(default_factory=list)

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Parse and validate; any error is a RequestError that names the field."""
        return cls.of(decode_object(raw), len(raw))

    @classmethod
    def of(cls, fields: dict[str, Any], num_bytes: int) -> Self:
        """Validate fields that were parsed from `num_bytes` of JSON."""
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise validation_error(error) from None
        body._unknown = check_extra(body.model_extra or {}, cls.model_fields)
        if body._unknown and cls.refuses_unknown:
            raise body._unknown[0]
        body._num_bytes = num_bytes
        return body

    @property
    def unknown_fields(self) -> list[RequestError]:
        """The errors of fields that are not known; --unknown-fields decides about them."""
        return self._unknown

    def add_unknown(self, errors: Iterable[RequestError]) -> None:
        """Add unknown fields of the body that this one was made of."""
        self._unknown = [*self._unknown, *errors]

    @property
    def num_bytes(self) -> int:
        """The size of the JSON body, by which prepare.py decides whether to use a thread."""
        return self._num_bytes


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
ThinkingBudget = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: no limit


# Variables of chat templates that switch reasoning on and off.
_THINKING_VARIABLES = ("enable_thinking", "thinking")

MAX_DEADLINE_MS = 86_400_000.0
DeadlineMs = Annotated[float, Field(gt=0, le=MAX_DEADLINE_MS)]


class ReasoningOptions(BaseModel):
    """The field `reasoning` of a chat, as routers between providers send it."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingBudget | None = None
    enabled: bool | None = None
    exclude: bool | None = None

    def model_post_init(self, _context: Any) -> None:
        for name in self.model_extra or {}:
            raise unknown_field(name, type(self).model_fields, "reasoning")


class Thinking(BaseModel):
    """The field `thinking` of a chat, as hosted models have it."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: ThinkingBudget | None = None

    def model_post_init(self, _context: Any) -> None:
        for name in self.model_extra or {}:
            raise unknown_field(name, type(self).model_fields, "thinking")


class ConversationRequest(BaseModel):
    """Fields of a conversation that the chat template renders."""

    messages: Annotated[list[Message], Field(max_length=limits.MAX_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    verbosity: Verbosity | None = None
    chat_template: Annotated[str, Field(max_length=limits.MAX_TEMPLATE_CHARS)] | None = None

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the model may call; None: none."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def template_options(self) -> dict[str, Any] | None:
        """Variables of the chat template that the client sets."""
        options: dict[str, Any] = {}
        reasoning = self.reasoning or ReasoningOptions()
        effort = self.reasoning_effort or reasoning.effort
        if effort is not None:
            options["reasoning_effort"] = effort
        is_thinking = self._is_thinking
        if is_thinking is not None:
            options |= dict.fromkeys(_THINKING_VARIABLES, is_thinking)
        if self.verbosity is not None:
            options["verbosity"] = self.verbosity
        return (options | (self.chat_template_kwargs or {})) or None

    @property
    def _is_thinking(self) -> bool | None:
        """Whether the model should reason, by the most explicit field; None: as its template has it."""
        reasoning = self.reasoning or ReasoningOptions()
        effort = self.reasoning_effort or reasoning.effort
        by_type = {"enabled": True, "disabled": False}
        answers = (
            self.enable_thinking,
            None if self.thinking is None else by_type.get(self.thinking.type),
            reasoning.enabled,
            None if effort is None else effort != "none",
        )
        return next((answer for answer in answers if answer is not None), None)


class DeadlineField(BaseModel):
    """The deadline of a request and whether it may degrade, which the bodies of all APIs may have."""

    deadline_ms: DeadlineMs | None = None
    fallback: FallbackMode | None = None


class GenerationRequest(Body, DeadlineField):
    """Fields of both completion endpoints; None: the model's or the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: INT64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenKey, float], Field(max_length=limits.MAX_LOGIT_BIAS)] | None = (
        None
    )
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    seed: INT64 | None = None
    deterministic: bool | None = None
    max_tokens: INT64 | None = None
    min_tokens: INT64 | None = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: INT64 | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(gt=PROBE_PRIORITY, lt=BATCH_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None
    user: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: (
        Annotated[list[str], Field(max_length=limits.MAX_CHOICES, fail_fast=True)] | None
    ) = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    regex: str | None = None
    include_cost: bool | None = None
    prediction: Prediction | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    # Fields that say who asks and how the answer is sent, not what is computed.
    _NOT_CONTENT: ClassVar[frozenset[str]] = frozenset(
        {
            *("model", "user", "request_id", "priority", "cache_salt", "deadline_ms", "fallback"),
            *("stream", "stream_options", "include_cost"),
        }
    )

    def content(self) -> bytes:
        """What is computed for this body, by whichever model."""
        names = type(self).model_fields.keys() - self._NOT_CONTENT
        return self.model_dump_json(include=names, exclude_none=True).encode()

    @property
    def num_logprobs(self) -> int | None:
        """Requested top logprobs per token; None: no log probabilities."""
        return None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_completions(self) -> int:
        return self.num_prompts * (self.best_of or self.n or 1)

    @property
    def is_best_of(self) -> bool:
        """Whether more completions are generated than returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    def model_post_init(self, _context: Any) -> None:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise RequestError(
                f"best_of ({self.best_of}) is less than n ({self.n or 1}): best_of completions are "
                "generated, and the best n are returned.",
                "best_of",
            )
        if self.use_beam_search:
            self._check_beam_search()
        elif self.length_penalty not in (None, 1.0) or self.early_stopping:
            name = "early_stopping" if self.early_stopping else "length_penalty"
            raise RequestError(f"{name} needs use_beam_search: true.", name)
        if self.is_best_of and self.stream:
            raise RequestError(
                f"best_of ({self.best_of}) larger than n ({self.n or 1}) is not available with "
                "stream: true: the best completions are known at the end.",
                "best_of",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not available with stream: true.", "prompt_logprobs"
            )

    # Fields that beam search does not support, each with the values that have no effect.
    _NOT_WITH_BEAMS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "stream": (False,),
        "temperature": (0, 0.0),
        "top_p": (1.0,),
        "top_k": (0, -1),
        "min_p": (0.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
        "repetition_penalty": (1.0,),
        "logit_bias": ({},),
        "allowed_token_ids": (),
        "bad_words": ([],),
        "deterministic": (False,),
        "min_tokens": (0,),
        "stop": ([],),
        "prompt_logprobs": (),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "json_schema": ("",),
        "grammar": ("",),
        "ebnf": ("",),
        "regex": ("",),
        "prediction": (),
    }

    def _check_beam_search(self) -> None:
        for name, neutral in self._NOT_WITH_BEAMS.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise RequestError(
                    f"{name} ({abbreviate(value)}) is not available with use_beam_search: true. "
                    "Leave it out.",
                    name,
                )


class ChatRequest(GenerationRequest, ConversationRequest):
    """POST /v1/chat/completions"""

    logprobs: bool | None = None
    top_logprobs: INT64 | None = None
    max_completion_tokens: INT64 | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: ThinkingBudget | None = None
    thinking_budget: ThinkingBudget | None = None

    @property
    def hides_reasoning(self) -> bool:
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is False or bool(excluded)

    @property
    def max_thinking_tokens(self) -> int | None:
        """The token budget for reasoning, under any of its names; None: no limit."""
        given = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget": self.thinking_budget,
            "reasoning.max_tokens": None if self.reasoning is None else self.reasoning.max_tokens,
            "thinking.budget_tokens": None
            if self.thinking is None
            else self.thinking.budget_tokens,
            "chat_template_kwargs.thinking_budget": self._template_budget,
        }
        found = {name: value for name, value in given.items() if value is not None}
        if len(set(found.values())) > 1:
            listed = " and ".join(f"{name} ({value})" for name, value in found.items())
            raise RequestError(f"{listed} are aliases and differ. Send one.", "thinking_budget")
        budget = next(iter(found.values()), -1)
        return None if budget == -1 else budget

    @property
    def _template_budget(self) -> int | None:
        value = (self.chat_template_kwargs or {}).get("thinking_budget")
        return value if type(value) is int and value >= -1 else None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise RequestError(f"{name} must be a whole number >= 0, got {value}.", name)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true.", "top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise RequestError(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) are aliases "
                "and differ. Send one.",
                "max_completion_tokens",
            )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: TextsOrTokens
    logprobs: INT64 | None = None
    echo: bool | None = None
    suffix: str | None = None

    # OpenAI's; a chat may fill the context. None: so may the completion.
    default_max_tokens: ClassVar[int | None] = 16

    @property
    def infill(self) -> Infill | None:
        """The text around the completion; None: the prompt is continued."""
        return Infill(suffix=self.suffix) if self.suffix else None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompts(self) -> int:
        """A string or a list of token ids is one prompt; prepare.py refuses an empty list."""
        is_single = isinstance(self.prompt, str) or (
            self.prompt and isinstance(self.prompt[0], int)
        )
        return 1 if is_single else len(self.prompt)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise RequestError(f"{name} cannot be combined with suffix. Leave it out.", name)


class TokenizeRequest(Body):
    """POST /tokenize of a text"""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(Body, ConversationRequest):
    """POST /tokenize of a conversation, and POST /apply-template"""

    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize"""

    tokens: TokenIds


class AdapterRequest(Body):
    """Fields of the endpoints that load and unload adapters; `model` is not accepted."""

    refuses_unknown = True

    lora_name: str

    def model_post_init(self, _context: Any) -> None:
        if self.model is not None:
            raise RequestError("unknown field 'model': the adapter is lora_name.", "model")


class LoadAdapterRequest(AdapterRequest):
    """POST /v1/load_lora_adapter"""

    lora_path: str


class UnloadAdapterRequest(AdapterRequest):
    """POST /v1/unload_lora_adapter"""


class AdminRequest(Body):
    """Base of the admin requests; `model` is not accepted."""

    refuses_unknown = True

    def model_post_init(self, _context: Any) -> None:
        if self.model is not None:
            raise RequestError("unknown field 'model': the server has one engine.", "model")


class SleepRequest(AdminRequest):
    """POST /admin/sleep"""

    level: Literal[1, 2] = 1
    mode: Literal["wait", "refuse", "abort"] = "wait"
    timeout_s: Annotated[float, Field(ge=0, le=3600)] = 60.0


class WakeRequest(AdminRequest):
    """POST /admin/wake"""


PrefixName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]


class PrefixFields(Body):
    """Fields that a named prefix has beside its text."""

    refuses_unknown = True

    name: PrefixName
    tenant: str | None = None  # whose requests find it; default: the key's own
    cache_salt: str | None = None
    deterministic: bool | None = None
    pin: bool = True  # False: only KV tiers keep it


class SavePrefixRequest(PrefixFields):
    """POST /admin/kv/save of a text or of token ids"""

    prompt: str | TokenIds
    add_special_tokens: bool = True


class SaveChatPrefixRequest(PrefixFields, ConversationRequest):
    """POST /admin/kv/save of the beginning of a conversation"""

    add_generation_prompt: bool | None = False


class LoadPrefixRequest(AdminRequest):
    """POST /admin/kv/load"""

    name: PrefixName
