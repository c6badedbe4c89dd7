"""The responses of the Responses API, of Anthropic's and Ollama's endpoints, of files and of batches as
types, for /openapi.json.

The modules named *_format.py and batch/ write the responses themselves; tests compare both. Fields that
are there only in some responses have a default.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from windlass.serve.batch.store import Status
from windlass.serve.response_types import PromptTokensDetails

Json = dict[str, Any]


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")


# ---- OpenAI's Responses API ----------------------------------------------------------------------


class OutputText(_Response):
    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[Json]


class ReasoningPart(_Response):
    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(_Response):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(_Response):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Json]
    content: list[ReasoningPart]


class OutputCall(_Response):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class IncompleteDetails(_Response):
    reason: Literal["max_output_tokens"]


class OutputTokensDetails(_Response):
    reasoning_tokens: int


class ResponseUsage(_Response):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReasoning(_Response):
    effort: str | None
    summary: None


class ResponseText(_Response):
    format: Json


class ResponseObject(_Response):
    """The response of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: float
    status: ItemStatus
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    previous_response_id: str | None
    temperature: float | None
    top_p: float | None
    parallel_tool_calls: bool
    reasoning: ResponseReasoning
    store: bool
    text: ResponseText
    tool_choice: str | Json
    tools: list[Json]
    truncation: Literal["auto", "disabled"]
    metadata: dict[str, Any]


class DeletedResponse(_Response):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


# ---- Anthropic -----------------------------------------------------------------------------------


class TextBlock(_Response):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Response):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(_Response):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


class AnthropicUsage(_Response):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class CreatedMessage(_Response):
    """The response of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(_Response):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int


# ---- Ollama --------------------------------------------------------------------------------------


class OllamaFunction(_Response):
    name: str
    arguments: Json


class OllamaToolCall(_Response):
    function: OllamaFunction


class OllamaMessage(_Response):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class _OllamaEnd(_Response):
    model: str
    created_at: str
    done: Literal[True]
    done_reason: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class OllamaChat(_OllamaEnd):
    """The response of /api/chat that is not streamed, and the last line of a stream."""

    message: OllamaMessage


class OllamaText(_OllamaEnd):
    """The response of /api/generate that is not streamed, and the last line of a stream."""

    response: str
    thinking: str | None = None


class OllamaVectors(_Response):
    """The response of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVector(_Response):
    """The response of /api/embeddings."""

    embedding: list[float]


class OllamaDetails(_Response):
    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(_Response):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(_Response):
    """The response of /api/tags."""

    models: list[OllamaModel]


class OllamaShown(_Response):
    """The response of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class ServerVersion(_Response):
    """The response of /version and /api/version."""

    version: str


# ---- files and batches ---------------------------------------------------------------------------


class StoredFile(_Response):
    """A file of /v1/files."""

    id: str
    object: Literal["file"]
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None
    status: Literal["processed"]
    status_details: None


class DeletedFile(_Response):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class _Page(_Response):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page):
    data: list[StoredFile]


class BatchLineError(_Response):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(_Response):
    object: Literal["list"]
    data: list[BatchLineError]


class BatchRequestCounts(_Response):
    total: int
    completed: int
    failed: int


class BatchObject(_Response):
    """A batch of /v1/batches. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    status: Status
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None
    errors: BatchErrors | None
    output_file_id: str | None
    error_file_id: str | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    usage: ResponseUsage | None


class BatchList(_Page):
    data: list[BatchObject]
