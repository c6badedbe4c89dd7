"""The request bodies of llama-server's own API, and their conversion to completions."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from windlass.errors import RequestError
from windlass.serve import body_limits as limits
from windlass.serve.abbreviate import abbreviate
from windlass.serve.protocol import Body, CompletionRequest, DeadlineField, StopStrings
from windlass.text.request_builder import Infill

Json = dict[str, Any]
Encode = Callable[[str, bool], list[int]]  # a text, and whether it begins with BOS

# llama-server's sampling defaults, for fields that neither the request nor the model sets.
DEFAULTS: Json = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
SAMPLERS = ("penalties", "top_k", "top_p", "min_p", "temperature")

# Fields with another name here.
_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
    "ignore_eos": "ignore_eos",
    "stream": "stream",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
}
# Fields of samplers and features that this server does not have, with the values that disable them.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "dynatemp_range": (0,),
    "typical_p": (1,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "min_keep": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (0,),
    "post_sampling_probs": (False,),
    "return_progress": (False,),
    "lora": ([],),
    "image_data": ([],),
}
# Settings of samplers that are off, and of slots and caches that manage themselves here.
_NO_EFFECT = frozenset(
    {
        "dynatemp_exponent",
        "dry_allowed_length",
        "dry_base",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "id_slot",
        "mirostat_eta",
        "mirostat_tau",
        "n_cache_reuse",
        "n_discard",
        "n_keep",
        "sse_ping_interval",
        "xtc_threshold",
    }
)
_RANDOM_SEEDS = (-1, 2**32 - 1)


class LlamaCompletion(CompletionRequest):
    """A completion without a limit of its tokens."""

    default_max_tokens = None


class InfillCompletion(LlamaCompletion):
    """A completion between a prefix, which is the prompt, and a suffix."""

    files: list[tuple[str, str]] = Field(default_factory=list)
    start: str = ""

    @property
    def infill(self) -> Infill:
        return Infill(suffix=self.suffix or "", files=self.files, start=self.start)


class ExtraFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    filename: str = ""
    text: str


class LlamaRequest(Body, DeadlineField):
    """Fields of /completion and /infill."""

    n_predict: int | None = None
    max_tokens: int | None = None
    n_cmpl: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: StopStrings | None = None
    ignore_eos: bool | None = None
    logit_bias: list[Any] | Json | None = None
    grammar: str | None = None
    json_schema: Json | str | None = None
    n_probs: Annotated[int, Field(ge=0)] = 0
    samplers: list[str] | None = None
    cache_prompt: bool = True
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: Annotated[list[str], Field(max_length=limits.MAX_CHOICES)] | None = None
    stream: bool = False

    @classmethod
    def of(cls, fields: Json, num_bytes: int) -> Self:
        """Check the fields that have no effect, and validate the others."""
        for name, off in _OFF.items():
            value = fields.get(name)
            if value is not None and value not in off:
                raise RequestError(
                    f"{name} is not supported by this server; got {abbreviate(value)}. Leave it out.",
                    name,
                )
        unused = _NO_EFFECT | _OFF.keys()
        return super().of({k: v for k, v in fields.items() if k not in unused}, num_bytes)

    @property
    def unknown_fields(self) -> list[RequestError]:
        """Also fields that are obeyed in part only: --unknown-fields decides about them, too."""
        partly = []
        if self.repeat_last_n not in (None, 0, -1) and self._has_penalties:
            text = (
                f"repeat_last_n ({self.repeat_last_n}): penalties count all tokens here; send -1."
            )
            partly.append(RequestError(text, "repeat_last_n"))
        order = [name for name in self.samplers or () if name in SAMPLERS]
        if order != sorted(order, key=SAMPLERS.index):
            text = f"samplers: the order here is always {', '.join(SAMPLERS)}."
            partly.append(RequestError(text, "samplers"))
        return [*self._unknown, *partly]

    @property
    def _has_penalties(self) -> bool:
        return self.repeat_penalty not in (None, 1) or bool(
            self.presence_penalty or self.frequency_penalty
        )

    def common(self, defaults: Mapping[str, Any], encode: Encode) -> Json:
        """The fields of the converted request; `defaults`: of the model, under our names."""
        given = {ours: getattr(self, name) for name, ours in _NAMES.items()}
        fields = {k: v for k, v in given.items() if v is not None and v != ""}
        for name, value in DEFAULTS.items():
            if name not in defaults:
                fields.setdefault(name, value)
        fields["temperature"] = max(
            0.0, fields.get("temperature", defaults.get("temperature", 0.0))
        )
        num_tokens = self.max_tokens if self.n_predict is None else self.n_predict
        unlimited = num_tokens is None or num_tokens < 0
        fields |= {"model": self.model, "n": self.n_cmpl}
        fields["max_tokens"] = None if unlimited else num_tokens
        if self.n_probs:
            fields["logprobs"] = self.n_probs
        if self.seed is not None and self.seed not in _RANDOM_SEEDS:
            fields["seed"] = self.seed
        if self.logit_bias:
            fields["logit_bias"] = _biases(self.logit_bias, encode)
        if not self.cache_prompt:
            fields["cache_salt"] = uuid.uuid4().hex
        return fields | self._without_samplers()

    def _without_samplers(self) -> Json:
        """Values that disable the samplers that `samplers` leaves out."""
        if self.samplers is None:
            return {}
        off: Json = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
        found = {name: value for name, value in off.items() if name not in self.samplers}
        if "penalties" not in self.samplers or self.repeat_last_n == 0:
            found |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return found


class LlamaCompletionRequest(LlamaRequest):
    """POST /completion"""

    prompt: Any

    def request(self, defaults: Mapping[str, Any], encode: Encode) -> CompletionRequest:
        fields = {"prompt": _prompts(self.prompt, encode), **self.common(defaults, encode)}
        return LlamaCompletion.of(fields, self.num_bytes)

    @property
    def is_many(self) -> bool:
        """Whether the response is an array."""
        has_prompts = isinstance(self.prompt, list) and not _has_ids(self.prompt)
        return has_prompts or (self.n_cmpl or 1) > 1


class LlamaInfillRequest(LlamaRequest):
    """POST /infill"""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=limits.MAX_MESSAGES)] | None = None
    prompt: str = ""

    @property
    def is_many(self) -> bool:
        return (self.n_cmpl or 1) > 1

    def request(self, defaults: Mapping[str, Any], encode: Encode) -> CompletionRequest:
        fields = {
            "prompt": self.input_prefix,
            "suffix": self.input_suffix,
            "files": [(each.filename, each.text) for each in self.input_extra or ()],
            "start": self.prompt,
            **self.common(defaults, encode),
        }
        return InfillCompletion.of(fields, self.num_bytes)


class LlamaTokenizeRequest(Body):
    """POST /tokenize with `content`"""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    def model_post_init(self, _context: Any) -> None:
        if not self.parse_special:
            raise RequestError(
                "parse_special: false is not supported; special tokens in a text are always read as "
                "tokens. Leave it out.",
                "parse_special",
            )


def _prompts(prompt: Any, encode: Encode) -> Any:
    """One prompt or several, each a text or token ids; several of different kinds as token ids."""
    if not isinstance(prompt, list) or _has_ids(prompt):
        return _prompt(prompt, encode)
    found = [_prompt(each, encode) for each in prompt]
    if all(isinstance(each, str) for each in found):
        return found
    return [encode(each, True) if isinstance(each, str) else each for each in found]


def _prompt(prompt: Any, encode: Encode) -> Any:
    """One prompt without an object around it; a list of texts and token ids as token ids."""
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise RequestError("multimodal_data is not supported.", "prompt")
        return prompt.get("prompt_string")
    if not isinstance(prompt, list) or not any(isinstance(each, str) for each in prompt):
        return prompt
    ids: list[Any] = []
    for i, part in enumerate(prompt):
        ids += encode(part, i == 0) if isinstance(part, str) else [part]
    return ids


def _has_ids(prompt: list[Any]) -> bool:
    """Whether a list is one prompt with token ids, not several prompts."""
    return any(isinstance(each, int) for each in prompt)


def _biases(given: list[Any] | Json, encode: Encode) -> dict[int, float]:
    """logit_bias as pairs or as an object: token ids or texts, and a number or false."""
    pairs = list(given.items()) if isinstance(given, dict) else given
    if len(pairs) > limits.MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(pairs):,} items; at most {limits.MAX_LOGIT_BIAS:,} are accepted.",
            "logit_bias",
        )
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RequestError(
                "each item of logit_bias must be a pair [token, bias].", "logit_bias"
            )
        token, bias = pair
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, (int, float))):
            raise RequestError(
                f"a bias must be a number or false, got {abbreviate(bias)}.", "logit_bias"
            )
        if isinstance(token, bool) or not isinstance(token, (int, str)):
            raise RequestError(
                f"a token of logit_bias must be an id or a text, got {abbreviate(token)}.",
                "logit_bias",
            )
        is_text = isinstance(token, str) and not token.isdecimal()
        ids = encode(str(token)[: limits.MAX_BAD_WORD_CHARS], False) if is_text else [int(token)]
        found |= dict.fromkeys(ids, -100.0 if bias is False else float(bias))
    return found
