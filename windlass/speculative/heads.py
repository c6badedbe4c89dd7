"""What Medusa and EAGLE have in common: a head that was trained for one model, and guesses on its device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.config import EngineConfig, ModelConfig
from windlass.core.types import SlotId, SlotInit
from windlass.errors import CheckpointError, ConfigError
from windlass.models.card import open_checkpoint
from windlass.models.checkpoint import Checkpoint, SafetensorsCheckpoint, StoredTensor
from windlass.models.fields import Fields
from windlass.models.fingerprint import fingerprint
from windlass.models.hparams import HParams
from windlass.models.json_file import read_json
from windlass.models.source import ModelFiles, resolve
from windlass.speculative.base import Draft, Proposer, Seen, SpeculationContext
from windlass.speculative.speculators import NORMS, flat, verifier_of
from windlass.speculative.which import kind_of

if TYPE_CHECKING:
    import torch

    from windlass.runner.assemble import Assembled
    from windlass.runner.drafter import Drafter
    from windlass.runner.runner import Runner

# Tensors that some heads carry and none needs: they are the network's, or follow from d2t.
UNREAD = ("t2d", "embed_tokens.weight")
# Fields of a head's config that change its steps, and no shape of a tensor.
_SHAPING = ("num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head's config, in its kind's own layout, and tensors."""

    config: Mapping[str, Any]
    tensors: Checkpoint
    source: str  # the config's path, for errors


def check(config: EngineConfig, files: ModelFiles, hparams: HParams) -> None:
    """Refuse a head that was made for another model, before any weight is read."""
    head = _find(config, {}, ())
    fields = Fields(head.config, head.source)
    verifier = verifier_of(head.config, head.source) or "a model"
    for name, size in (("hidden_size", hparams.hidden_size), ("vocab_size", hparams.vocab_size)):
        if fields.positive_int(name, size) != size:
            raise CheckpointError(
                f"{head.source}: the head is for {verifier} with {name} {head.config[name]}, but "
                f"{files.name} has {size}. Take a head that was trained for this model."
            )
    own = Fields(fields.mapping("windlass"), head.source)
    trained_for = own.text("target_fingerprint", None)
    if trained_for is None or config.model.load_format == "dummy":
        return
    here = fingerprint(hparams, open_checkpoint(files, config.model))
    if trained_for != here:
        raise CheckpointError(
            f"{head.source}: the head was trained for {own.text('target', 'another model')} "
            f"(fingerprint {trained_for}), not for {files.name} ({here}). Its guesses would seldom "
            "be right. Train one with windlass train-draft."
        )


def outline(config: EngineConfig, hparams: HParams) -> object:
    """What decides how long a head takes: its tensors' shapes, and how they are used."""
    del hparams
    head = _find(config, {}, UNREAD)
    shapes = sorted(head.tensors.stored(name).shape for name in head.tensors.names())
    flags = [name for name in NORMS if head.config.get(name)]
    return shapes, [head.config.get(name) for name in _SHAPING], flags


def open_head(
    context: SpeculationContext, renamed: Mapping[str, str], ignored: Collection[str]
) -> HeadFiles:
    """A head's files, which `check` has seen."""
    return _find(context.config, renamed, ignored)


def _find(config: EngineConfig, renamed: Mapping[str, str], ignored: Collection[str]) -> HeadFiles:
    wish, model = config.speculation, config.model
    assert wish.spec_model is not None  # SpecConfig asks for it
    try:
        files = resolve(
            ModelConfig(
                model=wish.spec_model, download_dir=model.download_dir, hf_token=model.hf_token
            )
        )
        kind = kind_of(files)
        if files.kind != "folder":
            raise ConfigError(
                f"--spec-model {wish.spec_model}: a head is a folder, not a GGUF file."
            )
        if kind not in ("draft", wish.spec):
            raise ConfigError(
                f"--spec-model {files.path}: is a head of another kind. Use --spec {kind}, or "
                "--spec auto."
            )
        source = files.path / "config.json"
        whole = SafetensorsCheckpoint(files.weights, files.index)
    except CheckpointError as error:
        raise CheckpointError(f"--spec-model: {error}") from error
    config_of = flat(read_json(source), str(source))
    return HeadFiles(config_of, _Names(whole, renamed, ignored), str(source))


def draft_vocab(files: HeadFiles, vocab_size: int) -> int | None:
    """How many of the model's tokens a head guesses among, where its config says so."""
    size = files.config.get("draft_vocab_size")
    if size is None:
        return None
    if not isinstance(size, int) or not 1 <= size <= vocab_size:
        raise CheckpointError(
            f"{files.source}: draft_vocab_size is {size!r}, and must be from 1 to the model's "
            f"{vocab_size} tokens. Take a head that was trained for this model."
        )
    return size


def check_map(d2t: torch.Tensor, files: HeadFiles, vocab_size: int) -> None:
    """Refuse a map of a head's ids to the model's that leads to no token."""
    import torch

    tokens = d2t + torch.arange(len(d2t), device=d2t.device)
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"{files.source}: d2t leads to the tokens {low} to {high}, but the model has 0 to "
            f"{vocab_size - 1}. Take a head that was trained for this model."
        )


class _Names:
    """A checkpoint under the names that are used here."""

    def __init__(
        self, whole: Checkpoint, renamed: Mapping[str, str], ignored: Collection[str]
    ) -> None:
        """`renamed`: beginnings of names, from what a file has to what is used here."""
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
        self, name: str, shape: tuple[int, ...], rows: slice | None = None, *, raw: bool = False
    ) -> torch.Tensor:
        return self._whole.read(self._names.get(name, name), shape, rows, raw=raw)


def _rename(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


class HeadProposer:
    """Hands on what the runner's drafter guessed, and tells it how much to guess."""

    free = False
    in_step = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._drafts: dict[SlotId, tuple[int, ...]] = {}

    def admit(self, new: SlotInit) -> None:
        """The runner knows."""

    def forget(self, slot: SlotId) -> None:
        self._drafts.pop(slot, None)

    def begin(self, wanted: int) -> None:
        self._runner.drafting = wanted

    def take_in(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            self._drafts[each.slot] = each.drafts

    def backlog(self, slot: SlotId, num_tokens: int) -> int:
        del slot, num_tokens
        return 0

    def propose(self, slots: Sequence[SlotId]) -> list[Draft]:
        begun = self._runner.is_prelaunched
        return [Draft(self._drafts[slot], begun=begun) for slot in slots]


def attach(made: Assembled, drafter: Drafter) -> Proposer:
    """Let the runner guess with this from now on."""
    made.runner.attach(drafter)
    return HeadProposer(made.runner)


def at_most(asked: int | None, most: int, what: str) -> int:
    """How many guesses: as asked, if the head can make so many."""
    if asked is not None and asked > most:
        raise ConfigError(
            f"--spec-tokens {asked}: the head has {most} {what}, one for each guess. Give at most "
            f"{most}, or leave it out."
        )
    return asked or most
