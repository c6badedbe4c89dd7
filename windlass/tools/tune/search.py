"""The search over sequences, tokens per step, blocks and formats: optuna over the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from windlass.config import Limits
from windlass.errors import EngineError, UnsupportedError
from windlass.tools.tune.results import TrialResult
from windlass.tools.tune.space import ModelFormat, Settings

# Values to search, beside those of the device's defaults or of --profile.
_SEQS = {"cpu": (1, 2, 4, 8, 16, 32, 64, 128, 256), "cuda": (8, 16, 32, 64, 128, 256, 512)}
_TOKENS = {
    "cpu": (64, 128, 256, 512, 1024, 2048, 4096, 16384, 32768),
    "cuda": (512, 1024, 2048, 4096, 8192, 16384, 32768),
}
_BLOCK_SHARES = (1.0, 0.5, 0.25)  # of the blocks that the engine would allocate
Predict = Callable[[Settings, float], TrialResult]  # settings, share of the blocks


def import_optuna() -> Any:
    """Import optuna, or raise an error that says how to install it."""
    try:
        import optuna
    except ImportError as error:
        raise UnsupportedError(
            "windlass tune searches with optuna, which is not installed: "
            "pip install 'windlass-llm[tune]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Search:
    """Owns the optuna study and its results, which stay valid after an interruption."""

    def __init__(
        self,
        formats: Sequence[ModelFormat],
        device: Literal["cpu", "cuda"],
        predict: Predict,
        start: Limits,
        seed: int,
    ) -> None:
        """`start`: the limits to try first, with every format."""
        self._optuna = import_optuna()
        self._formats = formats
        self._seqs = sorted({*_SEQS[device], start.max_num_seqs})
        self._tokens = sorted({*_TOKENS[device], start.max_num_batched_tokens})
        self._predict = predict
        self.tried: dict[str, TrialResult] = {}  # by the title of their settings
        self.num_pruned = 0
        sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=12)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        for index in range(len(formats)):
            self._study.enqueue_trial(
                {
                    "format": index,
                    "seqs": start.max_num_seqs,
                    "tokens": start.max_num_batched_tokens,
                    "blocks": _BLOCK_SHARES[0],
                }
            )

    def run(self, num_trials: int) -> None:
        self._study.optimize(self._objective, n_trials=num_trials)

    def _objective(self, trial: Any) -> float:
        format = self._formats[trial.suggest_categorical("format", range(len(self._formats)))]
        seqs = trial.suggest_categorical("seqs", self._seqs)
        tokens = trial.suggest_categorical("tokens", self._tokens)
        share = trial.suggest_categorical("blocks", _BLOCK_SHARES)
        if tokens < seqs:
            self.num_pruned += 1
            raise self._optuna.TrialPruned("a step has fewer tokens than sequences")
        try:
            found = self._predict(Settings(format, seqs, tokens), share)
        except EngineError as error:
            self.num_pruned += 1
            raise self._optuna.TrialPruned(str(error)) from error
        self.tried[found.settings.title] = found
        return found.score

    def best(self, count: int) -> list[TrialResult]:
        """Return the best results, without settings whose figures equal those of better ones."""
        ranked = sorted(self.tried.values(), key=lambda item: item.rank, reverse=True)
        chosen: list[TrialResult] = []
        for item in ranked:
            if all(item.figures != other.figures for other in chosen):
                chosen.append(item)
        return chosen[:count]
