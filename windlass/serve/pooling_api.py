"""The bodies of requests for embeddings, scores and reranking: OpenAI's, Jina's and vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from windlass.core.types import BATCH_PRIORITY, PROBE_PRIORITY
from windlass.serve import body_limits as limits
from windlass.serve.protocol import Body, TextsOrTokens


def _document(value: Any) -> Any:
    """The text of a document: a string, or an object with the field `text`."""
    if isinstance(value, dict):
        if not isinstance(value.get("text"), str):
            message = "a document must be a string, or an object with a string in its field 'text'"
            raise PydanticCustomError("wrong", "{message}", {"message": message})
        return value["text"]
    return value


Texts = Annotated[list[str], Field(max_length=limits.MAX_INPUTS, fail_fast=True)]


class PoolingRequest(Body):
    """Fields of all endpoints that pool."""

    priority: Annotated[int, Field(gt=PROBE_PRIORITY, lt=BATCH_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None
    user: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    use_activation: bool | None = None
    include_cost: bool | None = None


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings"""

    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    normalize: bool | None = None  # an older name of use_activation
    add_special_tokens: bool = True


class ScoreRequest(PoolingRequest):
    """POST /v1/score"""

    text_1: str | Texts
    text_2: str | Texts


class RerankRequest(PoolingRequest):
    """POST /v1/rerank"""

    query: str
    documents: Annotated[
        list[
            Annotated[str, BeforeValidator(_document, json_schema_input_type=str | dict[str, Any])]
        ],
        Field(max_length=limits.MAX_INPUTS, fail_fast=True),
    ]
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # 0: all
    return_documents: bool = True
