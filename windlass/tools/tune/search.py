"""Asks optuna for settings and tries them on the simulator: hundreds of seconds in a fraction of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from windlass.errors import EngineError, UnsupportedError
from windlass.tools.tune.space import BLOCK_SHARES, Settings, Space

if TYPE_CHECKING:
    from windlass.tools.tune.tried import Tried

Predict = Callable[[Settings, float], "Tried"]  # settings, share of the blocks


def need_optuna() -> Any:
    """The package, or an error that says how to get it."""
    try:
        import optuna
    except ImportError as error:
        raise UnsupportedError(
            "windlass tune searches with optuna, which is not installed: "
            "pip install 'windlass[tune]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Search:
    """Owns the study and what it found; what there is stays when somebody interrupts."""

    def __init__(self, space: Space, predict: Predict, start: tuple[int, int], seed: int) -> None:
        self._optuna = need_optuna()
        self._space = space
        self._predict = predict
        self.tried: dict[str, Tried] = {}  # by the title of their settings
        self.num_pruned = 0
        sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=12)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        for form in range(len(space.forms)):
            self._study.enqueue_trial(
                {"form": form, "seqs": start[0], "tokens": start[1], "blocks": BLOCK_SHARES[0]}
            )

    def run(self, num_trials: int) -> None:
        self._study.optimize(self._try, n_trials=num_trials)

    def _try(self, trial: Any) -> float:
        space = self._space
        form = space.forms[trial.suggest_categorical("form", range(len(space.forms)))]
        seqs = trial.suggest_categorical("seqs", space.seqs)
        tokens = trial.suggest_categorical("tokens", space.tokens)
        share = trial.suggest_categorical("blocks", BLOCK_SHARES)
        if tokens < seqs:
            self.num_pruned += 1
            raise self._optuna.TrialPruned("a step has less tokens than sequences")
        try:
            found = self._predict(Settings(form, seqs, tokens), share)
        except EngineError as error:
            self.num_pruned += 1
            raise self._optuna.TrialPruned(str(error)) from error
        self.tried[found.settings.title] = found
        return found.score

    def best(self, count: int) -> list[Tried]:
        """The best, no two with the same figures: a knob that changes nothing is left as it is."""
        ranked = sorted(self.tried.values(), key=lambda item: item.rank, reverse=True)
        chosen: list[Tried] = []
        for item in ranked:
            if all(item.figures != other.figures for other in chosen):
                chosen.append(item)
        return chosen[:count]
