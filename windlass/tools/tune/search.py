"""The search space (sequences, tokens per step, blocks, formats), and optuna over the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from windlass.config import EngineConfig
from windlass.errors import EngineError, UnsupportedError
from windlass.tools.plan.formats import STORED
from windlass.tools.plan.quality import REFERENCE, Retention
from windlass.tools.plan.select import Candidate, Plan

if TYPE_CHECKING:
    from windlass.tools.tune.results import TrialResult

_FORMAT_OPTIONS = ("quantization", "quantize_head", "dtype", "kv_cache_dtype")
_SEQS = {"cpu": (1, 2, 4, 8, 16, 32, 64, 128, 256), "cuda": (8, 16, 32, 64, 128, 256, 512)}
_TOKENS = {
    "cpu": (64, 128, 256, 512, 1024, 2048, 4096, 16384, 32768),
    "cuda": (512, 1024, 2048, 4096, 8192, 16384, 32768),
}
BLOCK_SHARES = (1.0, 0.5, 0.25)  # of the blocks that the engine would allocate
SPECS = ("ngram", "lookahead")  # proposers that need no further weights


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """A weight format with a KV cache type."""

    name: str
    options: Mapping[str, Any]
    quality: Retention

    def weights_key(self, device: str) -> str:
        """Return a key that is equal for formats that can share loaded weights.

        On CUDA the KV type is part of the key: kernels are selected for it.
        """
        own = {k: v for k, v in self.options.items() if device == "cuda" or k != "kv_cache_dtype"}
        return repr(sorted(own.items()))


@dataclass(frozen=True, slots=True)
class Settings:
    """One point of the search space. `num_blocks` None: the engine's default."""

    format: ModelFormat
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    spec: str = "none"

    def options(self) -> dict[str, Any]:
        """Return options of `serve` and `LLM`."""
        own: dict[str, Any] = {
            **self.format.options,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        if self.num_blocks is not None:
            own["num_blocks"] = self.num_blocks
        return own | ({"spec": self.spec} if self.spec != "none" else {})

    def config(self, engine_options: Mapping[str, Any]) -> EngineConfig:
        """Apply the settings to the user's options."""
        return EngineConfig.of(**{**engine_options, **self.options()})

    @property
    def title(self) -> str:
        blocks = "" if self.num_blocks is None else f", {self.num_blocks:,} blocks"
        spec = "" if self.spec == "none" else f", {self.spec}"
        return (
            f"{self.format.name}, {self.max_num_seqs} sequences, {self.max_num_batched_tokens:,} "
            f"tokens per step{blocks}{spec}"
        )


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Where the search starts: the device's defaults, or those of --profile."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Space:
    """All values of each setting."""

    formats: tuple[ModelFormat, ...]
    seqs: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(
        cls,
        device: Literal["cpu", "cuda"],
        formats: tuple[ModelFormat, ...],
        start: StartingPoint,
    ) -> Space:
        """Return the device's values and those of the starting point."""
        return cls(
            formats,
            tuple(sorted({*_SEQS[device], start.max_num_seqs})),
            tuple(sorted({*_TOKENS[device], start.max_num_batched_tokens})),
        )


def choose_formats(
    found: Plan, max_formats: int, is_named: bool = False
) -> tuple[tuple[ModelFormat, ...], str]:
    """Return the formats that fit and have enough quality, fastest first, and why others are left out.

    The weights as stored come first if their quality is enough. `is_named`: the user named the
    formats; then only a measured quality excludes one, not a typical one.
    """
    poor = [
        item
        for item in found.candidates
        if not item.quality.meets(found.min_quality)
        and not (is_named and item.quality.basis != "measured")
    ]
    by_format: dict[str, list[Candidate]] = {}
    for item in found.candidates:
        if item.fits and item not in poor:
            by_format.setdefault(item.format, []).append(item)
    ranked = sorted(
        by_format,
        key=lambda name: (name != STORED, -max(i.tok_s_all or 0.0 for i in by_format[name])),
    )
    chosen, left = ranked[:max_formats], ranked[max_formats:]
    formats = tuple(
        ModelFormat(
            item.name,
            {k: v for k, v in item.options.items() if k in _FORMAT_OPTIONS},
            item.quality,
        )
        for name in chosen
        # auto and one 8-bit type: the two take one byte per number, and the faster comes first.
        for item in by_format[name][:2]
    )
    why = []
    if poor:
        names = ", ".join(item.name for item in poor)
        why.append(f"expected below --min-quality {found.min_quality:g}: {names}")
    if left:
        why.append(f"slower by the roofline: {', '.join(left)}")
    return formats, "; ".join(why)


def stored_quality(found: Plan) -> Retention:
    """Return the expected retention of the stored weights relative to their original."""
    kinds = (i.quality for i in found.candidates if (i.format, i.kv_dtype) == (STORED, "auto"))
    return next(kinds, REFERENCE)


Predict = Callable[[Settings, float], "TrialResult"]  # settings, share of the blocks


def import_optuna() -> Any:
    """Import optuna, or raise an error that says how to install it."""
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
    """Owns the optuna study and its results, which stay valid after an interruption."""

    def __init__(self, space: Space, predict: Predict, start: StartingPoint, seed: int) -> None:
        self._optuna = import_optuna()
        self._space = space
        self._predict = predict
        self.tried: dict[str, TrialResult] = {}  # by the title of their settings
        self.num_pruned = 0
        sampler = self._optuna.samplers.TPESampler(seed=seed, n_startup_trials=12)
        self._study = self._optuna.create_study(direction="maximize", sampler=sampler)
        for index in range(len(space.formats)):
            self._study.enqueue_trial(
                {
                    "format": index,
                    "seqs": start.max_num_seqs,
                    "tokens": start.max_num_batched_tokens,
                    "blocks": BLOCK_SHARES[0],
                }
            )

    def run(self, num_trials: int) -> None:
        self._study.optimize(self._objective, n_trials=num_trials)

    def _objective(self, trial: Any) -> float:
        space = self._space
        format = space.formats[trial.suggest_categorical("format", range(len(space.formats)))]
        seqs = trial.suggest_categorical("seqs", space.seqs)
        tokens = trial.suggest_categorical("tokens", space.tokens)
        share = trial.suggest_categorical("blocks", BLOCK_SHARES)
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
