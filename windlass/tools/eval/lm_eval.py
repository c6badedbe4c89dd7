"""A model as lm-eval's `LM`. Imported only if lm-eval is installed.

Log likelihoods come from the scorer. Generation uses an engine with the same weights, which is built
for the first task that generates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from windlass.build import build_engine, open_model
from windlass.build_scorer import build_scorer
from windlass.config import EngineConfig
from windlass.core.sampling import SamplingParams
from windlass.errors import ConfigError, RequestError
from windlass.llm import LLM, progress_bar
from windlass.runner.device import choose_device
from windlass.runner.scoring import ScoringLimits, Window

_DEFAULT_MAX_LENGTH = 8192  # longer contexts need --max-model-len: their KV cache takes memory
_MAX_NEW = 256

Pair = tuple[Any, list[int], list[int]]  # cache key, context, continuation


class WindlassLM(TemplateLM):
    """One model. The requests of a call are batched."""

    def __init__(self, config: EngineConfig, progress: bool = False) -> None:
        super().__init__()
        self._config = config
        self._progress = progress
        self._opened = open_model(config)
        self._tokenizer = self._opened.card.tokenizer
        steps = config.limits(choose_device(config.model).type)
        length = config.model.max_model_len
        own = self._opened.hparams.max_positions
        is_set = length is not None and length > 0
        self.max_length = length if is_set and length else min(own, _DEFAULT_MAX_LENGTH)
        limits = ScoringLimits(self.max_length, steps.max_num_batched_tokens, steps.max_num_seqs)
        self._built = build_scorer(config, self._opened.source, limits)
        self._llm: LLM | None = None

    @property
    def eot_token_id(self) -> int:
        if not self._tokenizer.eos_ids:
            raise ConfigError(f"the model {self._opened.card.name!r} has no end-of-text token.")
        return self._tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self._opened.card.special_tokens.get("bos_token")
        return self._tokenizer.encode(bos, add_special=False)[0] if bos else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        if add_special_tokens is None:
            bos = self._opened.card.special_tokens.get("bos_token")
            add_special_tokens = not (bos and string.startswith(bos))
        return self._tokenizer.encode(string, add_special=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log probability of each continuation, and whether greedy decoding would give it."""
        windows = [self._window(context, rest) for _, context, rest in requests]
        # Longest first: running out of memory shows early, and steps are filled evenly.
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))
        sums: dict[int, float] = defaultdict(float)
        wrong: set[int] = set()
        with progress_bar(len(order), self._progress and not disable_tqdm) as advance:
            for chunk in self._built.scorer.logits(windows[i] for i in order):
                number = order[chunk.window]
                tokens = windows[number].tokens
                targets = tokens[chunk.start + 1 : chunk.start + 1 + len(chunk.values)]
                total, greedy = _likelihood(chunk.values[: len(targets)], targets)
                sums[number] += total
                if not greedy:
                    wrong.add(number)
                if chunk.start + len(chunk.values) == len(tokens):
                    advance()
        results = [(sums[i], i not in wrong) for i in range(len(requests))]
        for (key, *_rest), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _window(self, context: list[int], continuation: list[int]) -> Window:
        """Truncate from the left."""
        if not 0 < len(continuation) < self.max_length:
            raise RequestError(
                f"a continuation of {len(continuation)} tokens cannot be scored: 1 to "
                f"{self.max_length - 1} fit this context. Raise --max-model-len."
            )
        tokens = [*context, *continuation][-self.max_length :]
        return Window(tokens, len(tokens) - len(continuation) - 1)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log probability of whole texts, in disjoint windows."""
        pairs: list[Pair] = []
        counts = []
        for (text,) in (request.args for request in requests):
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            found = [(None, *map(list, make_disjoint_window(part))) for part in parts]
            counts.append(len(found))
            pairs += found  # type: ignore[arg-type]
        scores = iter(self._loglikelihood_tokens(pairs, disable_tqdm))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate texts, each up to one of its stop strings."""
        if self._llm is None:
            built = build_engine(self._config, self._opened.source, self._built.weights)
            self._llm = LLM.over(self._opened.card, built)
        max_model_len = self._llm.report.max_model_len
        prompts, params = [], []
        for text, arguments in (request.args for request in requests):
            sampling = _sampling_params(arguments)
            assert sampling.max_tokens is not None
            max_prompt = max_model_len - sampling.max_tokens
            if max_prompt < 1:
                raise RequestError(
                    f"{sampling.max_tokens} new tokens leave no room for a prompt in a context of "
                    f"{max_model_len}."
                )
            prompts.append(self.tok_encode(text)[-max_prompt:])
            params.append(sampling)
        shown = self._progress and not disable_tqdm
        texts = [out.outputs[0].text for out in self._llm.generate(prompts, params, shown)]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts


def _likelihood(logits: torch.Tensor, targets: Sequence[int]) -> tuple[float, bool]:
    if not targets:  # the last position has no next token
        return 0.0, True
    with torch.inference_mode():
        picked = torch.tensor(targets, device=logits.device)
        found = logits.log_softmax(dim=-1).gather(-1, picked[:, None]).double().sum()
        return float(found), bool((logits.argmax(dim=-1) == picked).all())


def _sampling_params(arguments: dict[str, Any]) -> SamplingParams:
    """Convert lm-eval's generation arguments; greedy unless `do_sample` is set."""
    rest = dict(arguments)
    until = rest.pop("until", [])
    stops: Iterable[str] = [until] if isinstance(until, str) else until
    max_tokens = rest.pop("max_gen_toks", _MAX_NEW)
    do_sample = rest.pop("do_sample", False)
    temperature = rest.pop("temperature", 1.0 if do_sample else 0.0)
    known = {name: rest.pop(name) for name in ("top_p", "top_k") if name in rest}
    if rest:
        raise ConfigError(f"unknown generation arguments: {', '.join(rest)}.")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if do_sample else 0.0,
        stop=tuple(stop for stop in stops if stop),
        **known,
    )
