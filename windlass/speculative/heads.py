"""Common parts of Medusa and EAGLE: a head trained for one model that drafts on its device."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.config import EngineConfig, ModelConfig
from windlass.core.types import Draft, SlotId, SlotInit
from windlass.errors import CheckpointError, ConfigError
from windlass.models.card import open_checkpoint
from windlass.models.checkpoint import Checkpoint, SafetensorsCheckpoint, StoredTensor
from windlass.models.fields import Fields
from windlass.models.file_digest import file_digest
from windlass.models.fingerprint import fingerprint
from windlass.models.hparams import HParams
from windlass.models.json_file import read_json
from windlass.models.source import ModelFiles, resolve
from windlass.quant.shard import Region
from windlass.speculative.auto import detect_method
from windlass.speculative.base import Proposer, SlotUpdate, SpeculationContext
from windlass.speculative.speculators import NORMS, flatten_config, verifier_of

if TYPE_CHECKING:
    import torch

    from windlass.kernels.storages import Held
    from windlass.runner.assemble import Assembled
    from windlass.runner.drafter import Drafter

# Tensors to ignore: copies of the network's own, or derivable from d2t.
IGNORED_TENSORS = ("t2d", "embed_tokens.weight")
# Config fields that change a head's computation without changing a tensor's shape.
_COST_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head's config, in the native layout of its kind, and its tensors."""

    config: Mapping[str, Any]
    tensors: Checkpoint
    source: str  # the config's path, for errors
    files: ModelFiles

    @property
    def digest(self) -> str:
        """A hash of the head's config and tensors."""
        return file_digest(self.files, ModelConfig(model=str(self.files.path)))


def check(config: EngineConfig, files: ModelFiles, hparams: HParams) -> None:
    """Refuse a head that was trained for another model, before any weight is read."""
    head = _open(config, {}, ())
    fields = Fields(head.config, head.source)
    verifier = verifier_of(head.config, head.source) or "a model"
    for name, size in (("hidden_size", hparams.hidden_size), ("vocab_size", hparams.vocab_size)):
        if fields.positive_int(name, size) != size:
            raise CheckpointError(
                f"{head.source}: the head is for {verifier} with {name} {head.config[name]}, but "
                f"{files.name} has {size}. Use a head that was trained for this model."
            )
    own = Fields(fields.mapping("windlass"), head.source)
    trained_for = own.text("target_fingerprint", None)
    if trained_for is None or config.model.load_format == "dummy":
        return
    here = fingerprint(hparams, open_checkpoint(files, config.model))
    if trained_for != here:
        raise CheckpointError(
            f"{head.source}: the head was trained for {own.text('target', 'another model')} "
            f"(fingerprint {trained_for}), not for {files.name} ({here}). The target would reject "
            "most of its draft tokens. Train a head with windlass train-draft."
        )


def cost_key(config: EngineConfig, hparams: HParams) -> object:
    """Everything that the speed of a head depends on: its tensors' shapes and their use."""
    del hparams
    head = _open(config, {}, IGNORED_TENSORS)
    shapes = sorted(head.tensors.stored(name).shape for name in head.tensors.names())
    flags = [name for name in NORMS if head.config.get(name)]
    return shapes, [head.config.get(name) for name in _COST_FIELDS], flags


def open_head(
    context: SpeculationContext, renamed: Mapping[str, str], ignored: Collection[str]
) -> HeadFiles:
    """Open a head's files after `check`. `renamed`: prefixes of tensor names, file to Windlass."""
    return _open(context.config, renamed, ignored)


def _open(config: EngineConfig, renamed: Mapping[str, str], ignored: Collection[str]) -> HeadFiles:
    options, model = config.speculation, config.model
    assert options.spec_model is not None  # SpecConfig requires it
    try:
        files = resolve(
            ModelConfig(
                model=options.spec_model, download_dir=model.download_dir, hf_token=model.hf_token
            )
        )
        method = detect_method(files)
        if files.kind != "folder":
            raise ConfigError(
                f"--spec-model {options.spec_model}: a head is a folder, not a GGUF file."
            )
        if method not in ("draft", options.spec):
            raise ConfigError(
                f"--spec-model {files.path}: is a head of another kind. Use --spec {method}, or "
                "--spec auto."
            )
        source = files.path / "config.json"
        whole = SafetensorsCheckpoint(files.weights, files.index)
    except CheckpointError as error:
        raise CheckpointError(f"--spec-model: {error}") from error
    config_of = flatten_config(read_json(source), str(source))
    tensors = _RenamedCheckpoint(whole, renamed, ignored)
    return HeadFiles(config_of, tensors, source=str(source), files=files)


def draft_vocab(files: HeadFiles, vocab_size: int) -> int | None:
    """The size of a head's draft vocabulary, if its config has one."""
    size = files.config.get("draft_vocab_size")
    if size is None:
        return None
    if not isinstance(size, int) or not 1 <= size <= vocab_size:
        raise CheckpointError(
            f"{files.source}: draft_vocab_size is {size!r}, and must be from 1 to the model's "
            f"{vocab_size} tokens. Use a head that was trained for this model."
        )
    return size


def check_d2t(d2t: torch.Tensor, files: HeadFiles, vocab_size: int) -> None:
    """Refuse a draft-to-target map with ids outside the model's vocabulary."""
    import torch

    tokens = d2t + torch.arange(len(d2t), device=d2t.device)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"{files.source}: d2t maps to the tokens {low} to {high}, but the model has 0 to "
            f"{vocab_size - 1}. Use a head that was trained for this model."
        )


class _RenamedCheckpoint:
    """A checkpoint under Windlass's tensor names."""

    def __init__(
        self, whole: Checkpoint, renamed: Mapping[str, str], ignored: Collection[str]
    ) -> None:
        """`renamed`: prefixes of tensor names, from the file's to Windlass's."""
        self._whole = whole
        self._names: dict[str, str] = {}
        for name in whole.names():
            if name not in ignored:
                self._names[_rename(name, renamed)] = name

    def names(self) -> Collection[str]:
        return self._names.keys()

    def stored(self, name: str) -> StoredTensor:
        return self._whole.stored(self._names.get(name, name))

    def read(
        self, name: str, shape: tuple[int, ...], region: Region = (), *, raw: bool = False
    ) -> torch.Tensor:
        return self._whole.read(self._names.get(name, name), shape, region, raw=raw)


def _rename(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


class HeadProposer:
    """Returns the drafts of the runner's drafter."""

    free = False
    in_step = True

    def __init__(self) -> None:
        self._drafts: dict[SlotId, tuple[int, ...]] = {}

    def storages(self) -> Iterator[Held]:
        """No tensors: the runner holds the drafter."""
        return iter(())

    def admit(self, new: SlotInit) -> None:
        """Do nothing: the runner admits the slot."""

    def forget(self, slot: SlotId) -> None:
        self._drafts.pop(slot, None)

    def update(self, updates: Sequence[SlotUpdate]) -> None:
        for each in updates:
            self._drafts[each.slot] = each.drafts

    def backlog(self, slot: SlotId) -> int:
        del slot
        return 0

    def propose(self, slots: Sequence[SlotId], draft_length: int) -> list[Draft]:
        del draft_length  # the step has made the drafts
        return [Draft(self._drafts[slot]) for slot in slots]


def attach(made: Assembled, drafter: Drafter) -> Proposer:
    """Attach a drafter to the runner."""
    made.runner.attach(drafter)
    return HeadProposer()
