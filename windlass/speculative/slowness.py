"""What steps took, against what they should have: with guesses, and without."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_FADE = 0.95  # of what was learned
_AGREE = 3  # steps with guesses whose middle counts: a single slow one says nothing of the others
_LEAST_DEAR, _MOST_DEAR = 0.5, 4.0


@dataclass(slots=True)
class Slowness:
    """Of steps of about one number of rows."""

    plain: float = 1.0
    guessing: float = 1.0
    has_guessed: bool = False
    num_sure: int = 0  # steps with guesses since a doubt
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_AGREE))

    def note(self, guessing: bool, ratio: float) -> None:
        # One that stood still, while something was compiled or recorded, says nothing of the others.
        ratio = min(ratio, _MOST_DEAR / 2)
        if guessing:
            self._note_guessing(ratio)
        else:
            self.plain += (1 - _FADE) * (ratio - self.plain)
            if not self.has_guessed:  # a machine that is faster or slower now is so for all steps
                self.guessing = self.plain

    def _note_guessing(self, ratio: float) -> None:
        self.latest.append(ratio)
        if len(self.latest) < _AGREE:
            return
        self.has_guessed = True
        self.num_sure += 1
        share = max(1 - _FADE, 1 / (1 + self.num_sure))
        middle = sorted(self.latest)[_AGREE // 2]
        self.guessing += share * (middle - self.guessing)

    def doubt(self) -> None:
        """What was learned of guesses is as old as the pause before this try was long."""
        self.guessing = (self.guessing + self.plain) / 2
        self.num_sure = 0

    @property
    def dearness(self) -> float:
        """How much more than plain ones do steps with guesses exceed what they should take."""
        return min(max(self.guessing / self.plain, _LEAST_DEAR), _MOST_DEAR)
