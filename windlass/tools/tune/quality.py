"""What each form of a model keeps of it, measured: perplexity on short texts beside a reference.

The reference is the model without rounding while loading: in float32 on a CPU, in its own type on a
GPU. What a file lost when others quantised it cannot be measured without the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from windlass.build import OpenModel
from windlass.config import EngineConfig
from windlass.errors import EngineError
from windlass.tools.common.judge import Judge, short_corpus
from windlass.tools.eval.windows import Cut
from windlass.tools.plan.quality import Retention
from windlass.tools.tune.search import Form

if TYPE_CHECKING:
    from windlass.runner.assemble import Loaded

_CONTEXT = 256


class Tester:
    """Owns the reference, which is loaded with the first question."""

    def __init__(
        self,
        given: Mapping[str, Any],
        opened: OpenModel,
        device: str,
        stored: Retention,
        log: Callable[[str], None],
    ) -> None:
        """`stored`: what the model's file is expected to have kept of the original."""
        context = min(_CONTEXT, opened.hparams.max_positions)
        plain = {"dtype": "float32"} if device == "cpu" else {}
        self._config = EngineConfig.of(**{**given, **plain})
        self._given = given
        self._opened = opened
        self._corpus = short_corpus()
        self._stored = stored
        self._cut = Cut("strided", context, context)
        self._log = log
        self._judge: Judge | None = None

    def measure(self, form: Form, weights: Loaded) -> Form:
        """The form with what it was found to keep; as it was where that cannot be."""
        config = EngineConfig.of(**{**self._given, **form.options})
        try:
            if self._judge is None:
                self._judge = Judge(self._config, self._opened, self._corpus, self._cut)
            found = self._judge.compare(self._judge.build(config, weights))
        except EngineError as error:
            self._log(f"{form.name}: quality not measured: {error}")
            return form
        assert found.against is not None
        kept = round(min(1.0, 1 / found.against.ppl_ratio), 4)
        measured = Retention(kept, "measured", f"on {self._corpus.name}")
        self._log(f"{form.name}: keeps {kept:.4f} of the quality, measured")
        return replace(form, quality=self._stored.times(measured))
