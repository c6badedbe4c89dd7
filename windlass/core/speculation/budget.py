"""Bounds the loss of finding out whether speculation is profitable, in units of plain steps.

The budget sums what steps with drafts gain or lose against plain steps, and every step adds a small
allowance. It pays for trials and for the prompts that a draft model computes. So a proposer that is
never profitable costs a bounded time at first, and later no more than the allowance, even when the
cost tables are wrong.
"""

from __future__ import annotations

# Chosen with the simulations of tests/speculative/test_wrong_costs.py. With twice the allowance per
# step, unprofitable drafts lose 0.3 % more, and profitable drafts gain no more: they pay for themselves.
_PER_STEP = 0.0025
_MAX_TRIALS = 4.0  # limit of earlier gains. 8: unprofitable drafts lose up to 2.6 %
# An unlucky streak delays the next trial by no more than this. Without a limit, a draft model that
# becomes twice as fast is not used for 4,000 steps; with 0 some simulations lose 0.5 % more.
_MIN_TRIALS = -2.0
# A request of 100 tokens saves 25 steps at 1.33 times the speed. 4: long prompts lose up to 5 %.
_MAX_PROMPTS = 32.0


class Budget:
    """Owns two balances with different limits: a prompt costs more than a trial."""

    def __init__(self) -> None:
        self._trials = _MAX_TRIALS
        self._prompts = _MAX_PROMPTS / 2

    def pass_step(self) -> None:
        """Add the allowance of one step."""
        self.gain(_PER_STEP)

    def gain(self, steps: float) -> None:
        """Add the plain steps that a step with drafts saved; negative: its loss."""
        self._trials = max(min(self._trials + steps, _MAX_TRIALS), _MIN_TRIALS)
        self._prompts = min(self._prompts + steps, _MAX_PROMPTS)

    def pay_prompt(self, steps: float) -> None:
        """Subtract the cost of prompt tokens, or other missed tokens, that a draft model computed."""
        self._prompts -= steps

    def allows_trial(self, loss: float) -> bool:
        """Whether a trial may lose `loss`; a full balance allows any, since the estimate may be wrong."""
        return self._trials >= min(loss, _MAX_TRIALS)

    def allows_prompts(self, steps: float) -> bool:
        """Whether a draft model may compute prompts of this cost; a full balance allows any."""
        return self._prompts >= min(steps, _MAX_PROMPTS)
