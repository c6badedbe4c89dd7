"""What a model's files say about pooling: sentence-transformers' modules, classification heads.

A checkpoint without an LM head is computed as its family's causal model, whose head is the embedding
table: it samples a token that is not used. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from windlass.config import ModelConfig
from windlass.core.pooling import ModelPooling, PoolingType
from windlass.core.tokenizer import Tokenizer
from windlass.errors import CheckpointError, ConfigError, UnsupportedError
from windlass.models.fields import Fields
from windlass.models.json_file import path_inside, read_json, read_value
from windlass.models.tensor_rules import Rule

T = TypeVar("T")
# normalize: unit length
FinalActivation = Literal["normalize", "sigmoid", "softmax", "none"]
DenseActivation = Literal["none", "tanh", "relu", "gelu", "sigmoid"]

_CAUSAL = "ForCausalLM"
_CLASSIFIER = "ForSequenceClassification"
_MODEL = "Model"
_POOLING_TYPES: dict[str, PoolingType] = {"lasttoken": "last", "mean_tokens": "mean"}
_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A linear layer behind the pooling."""

    name: str  # of its module in the file
    file: str = ""  # safetensors; empty: the model's checkpoint
    num_in: int
    num_out: int
    bias: bool = False
    activation: DenseActivation = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingHead:
    """The layers that make a vector of pooled hidden states."""

    layers: tuple[DenseSpec, ...] = ()
    final: FinalActivation = "normalize"
    # Tokens (no, yes) of the LM head: the one layer is the difference of their rows.
    tokens: tuple[int, int] | None = None


def causal_config(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any] | None:
    """The config of the causal model that has the layers of one without an LM head.

    None: it has an LM head, or no family in `known` has its layers.
    """
    name = _architecture(config)
    base = name.removesuffix(_CLASSIFIER).removesuffix(_MODEL)
    if base == name or base + _CAUSAL not in known:
        return None
    return {**config, "architectures": [base + _CAUSAL], "tie_word_embeddings": True}


def file_rules(names: Collection[str]) -> list[Rule]:
    """Rules for tensors of models without an LM head: names without `model.`, and their own head."""
    rules = [Rule(pattern=r"score\.weight", name="")] if "score.weight" in names else []
    if "embed_tokens.weight" in names:
        rules.append(Rule(pattern=r"((?:embed_tokens|layers|norm)\..+)", name=r"model.\1"))
    return rules


def _architecture(config: Mapping[str, Any]) -> str:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, (list, tuple)) and listed else ""


def read_pooling(
    values: Mapping[str, Any],
    *,
    generates: bool,
    folder: Path | None,
    hidden_size: int,
    tokenizer: Tokenizer,
    config: ModelConfig,
) -> tuple[PoolingHead, ModelPooling]:
    """Read the head and what it offers.

    `values`: of config.json. `generates`: it has an LM head. `folder`: None for a GGUF file.
    """
    source = str(folder / "config.json") if folder is not None else config.model
    fields, name = Fields(values, source), _architecture(values)
    if not fields.flag("is_causal", True) or fields.flag("use_bidirectional_attention", False):
        raise UnsupportedError(
            f"{source}: its attention looks in both directions, and Windlass computes causal attention."
        )
    task = config.task
    if task == "generate" and not generates:
        raise ConfigError(f"--task generate: {name} has no LM head. Omit the flag.")
    reader = _HeadReader(fields, folder, hidden_size, config)
    if not generates and name.endswith(_CLASSIFIER):
        head, found = reader.classifier()
    elif "classifier_from_token" in fields:
        head, found = reader.token_classifier(tokenizer)
    else:
        head, found = reader.embeddings()
    if task == "score" and found.task != "classify":
        raise ConfigError(
            "--task score: the model has no classification head (an architecture "
            f"...{_CLASSIFIER}, or classifier_from_token in its config). With --task embed, /v1/score "
            "compares embeddings."
        )
    if task == "embed" and found.task != "embed":
        raise ConfigError(f"--task embed: {name} has a classification head. Use --task score.")
    why_not = ""
    if task == "generate":
        why_not = "this server generates text only: it was started with --task generate."
    return head, ModelPooling(
        task=found.task,
        pooling_type=found.pooling_type,
        normalize=found.normalize,
        size=head.layers[-1].num_out if head.layers else hidden_size,
        matryoshka=found.matryoshka,
        matryoshka_dimensions=found.matryoshka_dimensions,
        generates=generates and task in ("auto", "generate"),
        why_not=why_not,
        reason=found.reason,
    )


class _HeadReader:
    """Reads the head of one model, and the facts that depend on its kind."""

    def __init__(
        self, fields: Fields, folder: Path | None, hidden_size: int, config: ModelConfig
    ) -> None:
        self._fields = fields
        self._folder = folder
        self._hidden_size = hidden_size
        self._config = config

    def classifier(self) -> tuple[PoolingHead, ModelPooling]:
        """The head `score` of transformers' sequence classification, which reads the last position."""
        self._refuse_mean()
        labels = self._fields.mapping("id2label")
        count = len(labels) or self._fields.positive_int("num_labels", 2)
        layer = DenseSpec(name="score", num_in=self._hidden_size, num_out=count)
        final: FinalActivation = "sigmoid" if count == 1 else "softmax"
        nested = self._fields.mapping("sentence_transformers").get("activation_fn")
        stated = nested or self._fields.text("sbert_ce_default_activation_function", None)
        if stated is not None:
            finals: dict[str, FinalActivation] = {"Identity": "none", "Sigmoid": "sigmoid"}
            final = _lookup(finals, str(stated).rpartition(".")[2], self._fields.source)
        reason = f"a classification head of {count} labels"
        return PoolingHead(layers=(layer,), final=final), ModelPooling(
            task="classify", reason=reason
        )

    def token_classifier(self, tokenizer: Tokenizer) -> tuple[PoolingHead, ModelPooling]:
        """The probability of one of two tokens, as of rerankers that answer yes or no."""
        self._refuse_mean()
        texts = self._fields.sequence("classifier_from_token") or ()
        ids = [tokenizer.encode(str(text), add_special=False) for text in texts]
        if len(ids) != 2 or any(len(each) != 1 for each in ids):
            raise ConfigError(
                f"classifier_from_token is {list(texts)!r}: expected two texts of one token each, that "
                'of "no" first.'
            )
        head = PoolingHead(
            layers=(DenseSpec(name="", num_in=self._hidden_size, num_out=1),),
            final="sigmoid",
            tokens=(ids[0][0], ids[1][0]),
        )
        reason = f"classifier_from_token: {texts[1]!r} against {texts[0]!r}"
        return head, ModelPooling(task="classify", reason=reason)

    def _refuse_mean(self) -> None:
        if self._config.pooling_type not in (None, "last"):
            raise ConfigError(
                f"--pooling-type {self._config.pooling_type}: a classification head reads the last "
                "position. Omit the flag."
            )

    def embeddings(self) -> tuple[PoolingHead, ModelPooling]:
        """The modules of sentence-transformers, or the plain hidden states."""
        modules = self._modules()
        stated: PoolingType = "last"
        reason, normalize = "the model's files do not say", not modules
        layers: list[DenseSpec] = []
        for kind, path in modules:
            if kind == "Pooling":
                stated, reason = self._pooling_type(path), str(path / "config.json")
            elif kind == "Dense":
                layers.append(_dense(path))
            elif kind == "Normalize":
                normalize = True
            elif kind != "Transformer":
                raise UnsupportedError(
                    f"{path.parent}/modules.json: module {kind} is not supported."
                )
        chosen = self._config.pooling_type
        if chosen is not None:
            reason = "--pooling-type"
        sizes = self._fields.sequence("matryoshka_dimensions") or ()
        return PoolingHead(layers=tuple(layers)), ModelPooling(
            pooling_type=chosen or stated,
            normalize=normalize,
            matryoshka=bool(sizes) or self._fields.flag("is_matryoshka", False),
            matryoshka_dimensions=tuple(int(size) for size in sizes),
            reason=reason,
        )

    def _modules(self) -> Sequence[tuple[str, Path]]:
        """The kinds and folders of sentence-transformers' modules; empty: the model has none."""
        if self._folder is None or not (self._folder / "modules.json").is_file():
            return ()
        path = self._folder / "modules.json"
        try:
            listed = [(str(each["type"]), str(each["path"])) for each in read_value(path)]
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: is not a list of modules: {error!r}.") from error
        return [
            # The network itself has the path "".
            (kind.rpartition(".")[2], path_inside(self._folder, name or ".", path))
            for kind, name in listed
        ]

    def _pooling_type(self, folder: Path) -> PoolingType:
        """The pooling of 1_Pooling/config.json; --pooling-type replaces one that is not supported."""
        values = read_json(folder / "config.json")
        modes = [
            key.removeprefix("pooling_mode_")
            for key, value in values.items()
            if key.startswith("pooling_mode_") and value is True
        ]
        if len(modes) == 1 and modes[0] in _POOLING_TYPES:
            return _POOLING_TYPES[modes[0]]
        if self._config.pooling_type is not None:
            return self._config.pooling_type
        raise UnsupportedError(
            f"{folder}/config.json: pooling {' + '.join(modes) or 'none'} is not supported. Supported: "
            f"{', '.join(_POOLING_TYPES)}. --pooling-type chooses another."
        )


def _dense(folder: Path) -> DenseSpec:
    fields = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    activation = fields.text("activation_function", "torch.nn.modules.linear.Identity")
    return DenseSpec(
        name="linear",
        file=str(folder / "model.safetensors"),
        num_in=fields.positive_int("in_features"),
        num_out=fields.positive_int("out_features"),
        bias=fields.flag("bias", True),
        activation=_lookup(_ACTIVATIONS, activation.rpartition(".")[2], fields.source),
    )


def _lookup(known: Mapping[str, T], name: str, source: str) -> T:
    if name not in known:
        raise UnsupportedError(
            f"{source}: activation {name} is not supported. Supported: {', '.join(known)}."
        )
    return known[name]
