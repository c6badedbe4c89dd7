"""What Medusa and EAGLE have in common: a head that was trained for one model, and guesses on its device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.config import ModelConfig
from windlass.core.types import SlotId, StepPlan
from windlass.errors import CheckpointError, ConfigError
from windlass.models.card import open_checkpoint
from windlass.models.checkpoint import Checkpoint, SafetensorsCheckpoint, StoredTensor
from windlass.models.fingerprint import fingerprint
from windlass.models.json_file import read_json
from windlass.models.source import resolve
from windlass.spec.base import Draft, Proposer, Seen, Site

if TYPE_CHECKING:
    import torch

    from windlass.runner.assemble import Assembled
    from windlass.runner.drafter import Drafter
    from windlass.runner.runner import Runner


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head's config and tensors."""

    config: Mapping[str, Any]
    tensors: Checkpoint
    source: str  # the config's path, for errors


def open_head(site: Site, renamed: Mapping[str, str], ignored: Collection[str]) -> HeadFiles:
    """Find a head's files, and refuse one that was trained for another model."""
    wish = site.config.speculation.spec_model
    assert wish is not None  # SpecConfig asks for it
    files = resolve(ModelConfig(model=wish, download_dir=site.config.model.download_dir))
    if files.kind != "folder":
        raise ConfigError(f"--spec-model {wish}: a head is a folder, not a GGUF file.")
    source = files.path / "config.json"
    config = read_json(source)
    tensors = _Names(SafetensorsCheckpoint(files.weights, files.index), renamed, ignored)
    _check(site, config, str(source))
    return HeadFiles(config, tensors, str(source))


def _check(site: Site, config: Mapping[str, Any], source: str) -> None:
    spec = site.spec
    for name, size in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        if config.get(name, size) != size:
            raise CheckpointError(
                f"{source}: the head is for a model with {name} {config[name]}, but "
                f"{site.files.name} has {size}. Take a head that was trained for this model."
            )
    trained_for = config.get("windlass", {}).get("target_fingerprint")
    if trained_for is None or site.config.model.load_format == "dummy":
        return
    own = fingerprint(spec, open_checkpoint(site.files, site.config.model))
    if trained_for != own:
        name = config["windlass"].get("target", "another model")
        raise CheckpointError(
            f"{source}: the head was trained for {name} (fingerprint {trained_for}), not for "
            f"{site.files.name} ({own}). Its guesses would seldom be right. Train one with "
            "windlass train-draft."
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

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._drafts: dict[SlotId, tuple[int, ...]] = {}

    def begin(self, plan: StepPlan, wanted: int) -> None:
        del plan
        self._runner.drafting = wanted

    def take_in(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            self._drafts[each.slot] = each.drafts

    def propose(self, slots: Sequence[SlotId]) -> list[Draft]:
        begun = self._runner.is_ahead
        return [Draft(self._drafts[slot], begun=begun) for slot in slots]


def attach(made: Assembled, drafter: Drafter) -> Proposer:
    """Let the runner guess with this from now on."""
    made.runner.attach(drafter)
    return HeadProposer(made.runner)


def at_most(asked: int | None, most: int, what: str) -> int:
    """How many guesses: as asked, if the head can make so many."""
    if asked is not None and asked > most:
        raise ConfigError(f"--spec-tokens {asked}: the head has {most} {what}, one for each guess.")
    return asked or most
