"""Puts speculation together: the proposer with its weights, what it costs here, the governor."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from windlass.config import EngineConfig, Limits
from windlass.core.card import Choice
from windlass.models.hparams import HParams
from windlass.models.source import ModelFiles
from windlass.speculative.base import Proposer, SpeculationContext
from windlass.speculative.governor import Governor
from windlass.speculative.measure import Costs, Room, measure, spot_check
from windlass.speculative.notes import load_of_machine, notes_for
from windlass.speculative.registry import RUN_AHEAD, WRITE_AHEAD, open_loader, outline
from windlass.speculative.speculation import Known, Speculation

if TYPE_CHECKING:
    from windlass.runner.assemble import Assembled, Loaded
    from windlass.runner.runner import Runner


_AGREE = 1.2  # factor between noted and observed costs at which they are measured anew


class Speculating:
    """A proposer whose weights are in place, before there are pages and a runner."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, hparams: HParams, loaded: Loaded
    ) -> None:
        self._config = config
        parts, guesser = loaded.parts, outline(config, hparams)
        where = (parts.device, "speculation", parts.ops.backend)
        self._notes = notes_for(config, files, hparams, *where, guesser)
        self._costs_name = f"costs at load {load_of_machine()}"
        self._loader = open_loader(SpeculationContext(config, files, hparams, loaded, self._notes))
        self.token_bytes = self._loader.token_bytes
        wish = config.speculation
        if loaded.parts.device.type == "cpu":
            self.lookahead = wish.max_draft_tokens if wish.spec in WRITE_AHEAD else 0
            self.lookahead_after_drafts = 0
        else:
            # A recorded decode step takes a new block for that of its own position, so that none
            # may come early; verifications take any, and those of heads run ahead.
            self.lookahead = 0
            self.lookahead_after_drafts = 1 + wish.max_draft_tokens if wish.spec in RUN_AHEAD else 0

    def start(
        self, made: Assembled, limits: Limits, asked: str, known: Known
    ) -> tuple[Runner | Speculation, Choice]:
        """The runner that guesses, and what it says of itself; `asked` is what the user chose.

        Where guesses would never pay, the runner as it is.
        """
        wish, capacity = self._config.speculation, made.capacity
        room = Room(
            positions=made.max_positions_per_step,
            rows=limits.max_num_seqs,
            row_tokens=min(1 + wish.max_draft_tokens, made.max_model_len),
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            max_model_len=made.max_model_len,
        )
        proposer = self._loader.start(made)
        if proposer is None:
            self._notes.save()
            why = f"{asked} was asked for and would be slower: {self._loader.describe()}"
            return made.runner, Choice("speculation", "none", why)
        costs, source = self._costs(made, proposer, room)
        governor = Governor(
            *(costs.guessed, made.max_positions_per_step, costs.plain, costs.drafting),
            *(wish.max_draft_tokens, partial(made.runner.max_draft_tokens, wish.max_draft_tokens)),
        )
        self._notes.save()
        parts = ["as set" if asked != "auto" else f"auto chose {wish.spec}", costs.describe()]
        parts += [source] if source else []
        if governor.is_hopeless(1):
            parts.append("drafts would not pay here if all were accepted: only rare trials")
        if wish.threshold is not None:
            parts.append(f"typical acceptance at {wish.threshold:g} CHANGES THE DISTRIBUTION")
        parts += [self._notes.problem] if self._notes.problem else []
        choice = Choice("speculation", self._loader.describe(), "; ".join(parts))
        return Speculation(made.runner, proposer, governor, known, self._check_notes), choice

    def _check_notes(self, disagreement: float) -> None:
        """Forget costs that running steps disagree with, so that the next start measures anew."""
        if disagreement > _AGREE and self._notes.of(self._costs_name) is not None:
            self._notes.drop(self._costs_name)
            self._notes.save()

    def _costs(self, made: Assembled, proposer: Proposer, room: Room) -> tuple[Costs, str]:
        """Costs of an earlier start, if steps take as long now; else measured."""
        name, size, source = self._costs_name, [room.positions, room.rows, room.row_tokens], ""
        known = self._notes.of(name)
        if known is not None:
            try:
                if known["room"] == size:
                    costs = Costs.from_json(known["found"])
                    off = spot_check(made.runner, proposer, room).disagreement(costs)
                    if off <= _AGREE:
                        return costs, "measured at an earlier start"
                    source = f"measured anew: costs of an earlier start were off by {off:.2f} times"
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._notes.problem = f"noted costs are not whole ({error!r}): measured anew"
        costs = measure(made.runner, proposer, room)
        self._notes.note(name, {"room": size, "found": costs.to_json()})
        return costs, source
