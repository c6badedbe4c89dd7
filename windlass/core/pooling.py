"""Pooling params: how a prompt's hidden states become one vector, and what a model supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.config import PoolingType as PoolingType
from windlass.errors import RequestError

PoolingTask = Literal["embed", "classify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How the vector of one request is made. Names follow vLLM."""

    pooling_type: PoolingType = "last"
    dimensions: int | None = None  # length to cut the vector to (Matryoshka)
    # The last operation: unit length of an embedding, the activation function of a classifier.
    use_activation: bool = True

    @property
    def reads_all(self) -> bool:
        """Whether pooling reads the hidden states of all positions, so no prefix may come from the cache."""
        return self.pooling_type == "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPooling:
    """What a model's files and the config say about its vectors, with the reason."""

    task: PoolingTask = "embed"
    pooling_type: PoolingType = "last"
    normalize: bool = True  # embeddings have unit length
    size: int = 0  # numbers of a vector
    matryoshka: bool = False  # a vector may be cut
    matryoshka_dimensions: tuple[int, ...] = ()  # to these sizes only; empty: to any
    generates: bool = True  # the model has an LM head, and generating is allowed
    why_not: str = ""  # why no vectors are served; empty: they are
    reason: str = ""  # where the choice comes from

    def params(
        self, dimensions: int | None = None, use_activation: bool | None = None
    ) -> PoolingParams:
        """The params of a request. Raises if the model does not allow its `dimensions`."""
        self._check_dimensions(dimensions)
        default = self.normalize if self.task == "embed" else True
        return PoolingParams(
            pooling_type=self.pooling_type,
            dimensions=dimensions,
            use_activation=default if use_activation is None else use_activation,
        )

    def check(self, task: PoolingTask) -> None:
        """Raise if the model has no vectors for `task`."""
        if self.why_not:
            raise RequestError(self.why_not)
        if self.task != task:
            has = "a classification head: use /v1/score or /v1/rerank"
            raise RequestError(f"this model has no embeddings, but {has}.", "model")

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None or dimensions == self.size:
            return
        if not self.matryoshka:
            raise RequestError(
                f"dimensions is {dimensions}, and this model's embeddings have {self.size}: its files do "
                "not say that they can be cut. An operator who knows that they were trained for it "
                "(Matryoshka) can start the server with --hf-overrides '{\"is_matryoshka\": true}'.",
                "dimensions",
            )
        allowed = self.matryoshka_dimensions
        if (allowed and dimensions not in allowed) or not 1 <= dimensions <= self.size:
            known = ", ".join(map(str, allowed)) if allowed else f"1 to {self.size}"
            raise RequestError(
                f"dimensions must be one of this model's: {known}; got {dimensions}.", "dimensions"
            )
