"""The search: its space (sequences, tokens a step, blocks, forms), and optuna over the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from windlass.config import EngineConfig
from windlass.errors import EngineError, UnsupportedError
from windlass.tools.plan.formats import STORED
from windlass.tools.plan.quality import REFERENCE, Retention
from windlass.tools.plan.select import Candidate, Plan

if TYPE_CHECKING:
    from windlass.tools.tune.tried import Tried

_FORM = ("quantization", "quantize_head", "dtype", "kv_cache_dtype")
_SEQS = {"cpu": (1, 2, 4, 8, 16, 32, 64, 128, 256), "cuda": (8, 16, 32, 64, 128, 256, 512)}
_TOKENS = {
    "cpu": (64, 128, 256, 512, 1024, 2048, 4096, 16384, 32768),
    "cuda": (512, 1024, 2048, 4096, 8192, 16384, 32768),
}
BLOCK_SHARES = (1.0, 0.5, 0.25)  # of the blocks that the engine would take by itself
SPECS = ("ngram", "lookahead")  # ways to guess that need no other weights


@dataclass(frozen=True, slots=True)
class Form:
    """How weights and keys and values are held."""

    name: str
    options: Mapping[str, Any]
    quality: Retention

    def weights_key(self, device: str) -> str:
        """Forms with the same one can share weights; a GPU's kernels are chosen for the KV type."""
        own = {k: v for k, v in self.options.items() if device == "cuda" or k != "kv_cache_dtype"}
        return repr(sorted(own.items()))


@dataclass(frozen=True, slots=True)
class Settings:
    """One point of the space. `num_blocks` None: as many as the engine takes by itself."""

    form: Form
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    spec: str = "none"

    def options(self) -> dict[str, Any]:
        """Of `serve` and `LLM`."""
        own: dict[str, Any] = {
            **self.form.options,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        if self.num_blocks is not None:
            own["num_blocks"] = self.num_blocks
        return own | ({"spec": self.spec} if self.spec != "none" else {})

    def config(self, given: Mapping[str, Any]) -> EngineConfig:
        """Over what the user set."""
        return EngineConfig.of(**{**given, **self.options()})

    def guessing(self, spec: str) -> Settings:
        return replace(self, spec=spec)

    @property
    def title(self) -> str:
        blocks = "" if self.num_blocks is None else f", {self.num_blocks:,} blocks"
        guesses = "" if self.spec == "none" else f", {self.spec}"
        return (
            f"{self.form.name}, {self.max_num_seqs} sequences, {self.max_num_batched_tokens:,} "
            f"tokens a step{blocks}{guesses}"
        )


@dataclass(frozen=True, slots=True)
class Space:
    """All values of each knob."""

    forms: tuple[Form, ...]
    seqs: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(
        cls, device: Literal["cpu", "cuda"], forms: tuple[Form, ...], start: tuple[int, int]
    ) -> Space:
        """`start`: the sequences and tokens of the starting point, which are always among them."""
        return cls(
            forms,
            tuple(sorted({*_SEQS[device], start[0]})),
            tuple(sorted({*_TOKENS[device], start[1]})),
        )


def choose_forms(found: Plan, most: int, is_named: bool = False) -> tuple[tuple[Form, ...], str]:
    """The forms that fit and are good enough, the fastest by the roofline; and what was left out.

    The weights as they are stored are always among them, if they are good enough. Forms that were
    asked for by name are left out by what was measured of them, not by what is typical.
    """
    poor = [
        item
        for item in found.candidates
        if not item.quality.meets(found.min_quality)
        and not (is_named and item.quality.basis != "measured")
    ]
    good = [item for item in found.candidates if item.fits and item not in poor]
    by_format: dict[str, list[Candidate]] = {}
    for item in good:
        by_format.setdefault(item.format, []).append(item)
    ranked = sorted(
        by_format,
        key=lambda name: (name != STORED, -max(i.tok_s_all or 0.0 for i in by_format[name])),
    )
    chosen, left = ranked[:most], ranked[most:]
    forms = tuple(
        Form(item.name, {k: v for k, v in item.options.items() if k in _FORM}, item.quality)
        for name in chosen
        for item in by_format[name]
        # Both are one byte a token; the device's own comes first.
        if item.kv_dtype in _kv_kinds(by_format[name])
    )
    why = []
    if poor:
        names = ", ".join(item.name for item in poor)
        why.append(f"expected below --min-quality {found.min_quality:g}: {names}")
    if left:
        why.append(f"slower by the roofline: {', '.join(left)}")
    return forms, "; ".join(why)


def stored_quality(found: Plan) -> Retention:
    """What the file is expected to have kept of the model that it was made from."""
    kinds = (i.quality for i in found.candidates if (i.format, i.kv_dtype) == (STORED, "auto"))
    return next(kinds, REFERENCE)


def _kv_kinds(items: list[Candidate]) -> list[str]:
    return [item.kv_dtype for item in items][:2]


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
