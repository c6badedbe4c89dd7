"""What a search found, for people and for `serve --config`: a table, the reason, and a YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from windlass.tools.common.record import Record, save_text
from windlass.tools.tune.tried import Tried, as_fast_as
from windlass.tools.tune.tune import Tuned, Wish

_SECRETS = ("hf_token",)
_NOTES = (
    "predicted: on the simulator, with costs of steps that were measured beforehand; measured: on an "
    "engine in this process, in turns with the others; of two runs the slower is shown, and how far "
    "they are apart. Quality: the 16-bit model's perplexity over the form's."
)


def record_of(found: Tuned, wish: Wish, model: str) -> Record:
    """Measured ones first, each kind from the best to the worst."""
    rows = [
        item.row()
        for items in (found.measured, found.predicted)
        for item in sorted(items, key=lambda each: each.rank, reverse=True)
    ]
    settings = {
        "model": model,
        "load": wish.load.title,
        "slo": str(wish.slo),
        "min_quality": wish.min_quality,
        "predicted": found.num_predicted,
        "pruned": found.num_pruned,
        "left_out": found.left_out,
        "runs": wish.num_runs,
        "price_per_hour": wish.price_per_hour,
    }
    return Record("tune", rows, _NOTES, settings)


def verdict(found: Tuned, wish: Wish) -> list[str]:
    """Why this one, in sentences."""
    best = found.best
    if best is None:
        return ["Nothing was tried to its end."]
    how = "measured" if best.is_measured else "predicted, not measured"
    sentences = [f"{best.settings.title}: {best.summary.output_throughput:,.1f} tok/s ({how})."]
    if not best.is_good:
        misses = "; ".join(wish.slo.misses(best.worst))
        sentences.append(f"Nothing meets the SLO {wish.slo}; this comes nearest: {misses}.")
    elif wish.slo.targets:
        values = ((item, item.value(best.worst)) for item in wish.slo.targets)
        kept = [
            f"{item.name} {value:,.1f} of {item.most_ms:g} ms"
            for item, value in values
            if value is not None
        ]
        sentences.append(f"The SLO is met: {', '.join(kept)}.")
    sentences += _compared(best, [item for item in found.measured if item.is_good])
    quality = best.settings.form.quality
    if quality.value is not None:
        basis = f"{quality.basis}: {quality.source}"
        sentences.append(f"It keeps {quality.value:.4f} of the quality ({basis}).")
    sentences.append(
        f"{found.num_predicted} settings were tried on the simulator, {found.num_pruned} could not "
        f"be; {len(found.measured)} were measured."
    )
    if found.left_out:
        sentences.append(f"Not tried: {found.left_out}.")
    return sentences


def _compared(best: Tried, good: Sequence[Tried]) -> list[str]:
    """How it stands against the others, and whether that may be chance."""
    others = [item for item in good if item is not best]
    if not best.is_measured or not others:
        return []
    second = max(others, key=lambda item: item.summary.output_throughput)
    times = best.summary.output_throughput / second.summary.output_throughput
    noise = best.noise(second)
    if len(best.runs) > 1 and max(best.spread, second.spread) > noise:
        apart = max(best.spread, second.spread)
        return [
            f"Runs of the same settings are up to {apart:.0%} apart: something else uses this "
            f"machine, and which is faster is not sure. {times:.2f} times: {second.settings.title}."
        ]
    if second in as_fast_as(best, [second]) or times < 1:
        return [
            f"As fast, within the {noise:.0%} that runs of the same settings may differ, and smaller: "
            f"{second.settings.title} ({1 / times:.2f} times this)."
        ]
    chance = f", more than runs of the same settings differ ({max(best.spread, second.spread):.0%})"
    return [
        f"{times:.2f} times the next{chance if len(best.runs) > 1 else ''}: {second.settings.title}."
    ]


def options_of(found: Tuned, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `serve` is to be told: the user's own and what was found; no secret."""
    best = found.best
    chosen = best.settings.options() if best is not None else {}
    own = {name: value for name, value in given.items() if name not in _SECRETS}
    return {**own, **chosen}


def write_yaml(path: Path, options: Mapping[str, Any], why: list[str]) -> None:
    """Whole or not at all, with the reason at its head."""
    head = "".join(f"# {line}\n" for sentence in why for line in sentence.splitlines())
    keys = {name.replace("_", "-"): _plain(value) for name, value in options.items()}
    body = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
    title = f"# Written by windlass tune; windlass serve --config {path.name}\n"
    save_text(path, f"{title}{head}{body}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
