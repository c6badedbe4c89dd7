"""How much speculation may lose while it finds out whether it pays, in plain steps.

What steps with drafts gain or lose against plain ones is added up, and every step adds a small
allowance. Trials and prompts for a draft model are paid from that. So a drafter that never pays
costs a bounded time at first, and later no more than the allowance, whatever its tables say.
"""

from __future__ import annotations

# Chosen in the worlds of tests/speculative/test_wrong_costs.py. With twice the allowance per step, drafts
# that never pay lose 0.3 % more, and drafts that pay gain no more: they pay for themselves.
_PER_STEP = 0.0025
_MOST_FOR_TRIALS = 4.0  # earlier gains pay for no more than that
# An unlucky streak delays the next trial by no more than this. Without a limit, a draft model that
# becomes twice as fast is not used for 4,000 steps; with 0 some worlds lose 0.5 % more.
_LEAST_FOR_TRIALS = -2.0
_MOST_FOR_PROMPTS = 32.0  # a request of 100 tokens saves 25 steps at 1.33 times the speed


class Budget:
    """Owns two balances that differ in their limits: a prompt costs more than a trial."""

    def __init__(self) -> None:
        self._trials = _MOST_FOR_TRIALS
        self._prompts = _MOST_FOR_PROMPTS / 2

    def pass_step(self) -> None:
        self.gain(_PER_STEP)

    def gain(self, steps: float) -> None:
        """A step with drafts saved so many plain steps; negative: it cost more than it gave."""
        self._trials = max(min(self._trials + steps, _MOST_FOR_TRIALS), _LEAST_FOR_TRIALS)
        self._prompts = min(self._prompts + steps, _MOST_FOR_PROMPTS)

    def pay_prompt(self, steps: float) -> None:
        """A draft model computed tokens of a prompt, or others that it had missed."""
        self._prompts -= steps

    def allows_trial(self, loss: float) -> bool:
        """A full balance allows any trial: what it is expected to lose may be wrong."""
        return self._trials >= min(loss, _MOST_FOR_TRIALS)

    def allows_prompts(self, steps: float) -> bool:
        """Whether a draft model may compute prompts that cost so much; a full balance allows any."""
        return self._prompts >= min(steps, _MOST_FOR_PROMPTS)
