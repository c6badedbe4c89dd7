"""The responses of OpenAI's endpoints as types, for /openapi.json.

formatters.py, pooling.py and routes.py write the responses themselves; tests compare both. Fields that
are there only if a request asks for them have a default.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Response):
    cached_tokens: int


class CompletionTokensDetails(_Response):
    """Only where there are such tokens."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0


class CostDetails(_Response):
    usd: float
    prefill_usd: float
    decode_usd: float
    saved_usd: float


class Usage(_Response):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None
    cost: float | None = None
    cost_details: CostDetails | None = None


class TopLogprob(_Response):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Response):
    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(_Response):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(_Response):
    name: str
    arguments: str


class ToolCall(_Response):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Response):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Response):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(_Response):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(_Response):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Response):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletion(_Response):
    """The response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class _Pooled(_Response):
    id: str
    created: int
    model: str
    usage: Usage


class Embedding(_Response):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 if the request asks for it


class EmbeddingList(_Pooled):
    """The response of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]


class Score(_Response):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(_Pooled):
    """The response of /v1/score."""

    object: Literal["list"]
    data: list[Score]


class RankedDocument(_Response):
    text: str


class Ranked(_Response):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(_Pooled):
    """The response of /v1/rerank."""

    results: list[Ranked]


class Model(_Response):
    """The model or an adapter, whose `parent` is the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: str | None


class ModelList(_Response):
    """The response of /v1/models."""

    object: Literal["list"]
    data: list[Model]
