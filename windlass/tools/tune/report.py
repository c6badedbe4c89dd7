"""Results of a search: a record, the reasons for the choice, and a config file for `serve --config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from windlass.tools.common.record import Record, save_text
from windlass.tools.tune.results import TrialResult, as_fast_as
from windlass.tools.tune.tune import TuneConfig, TuneResult

_SECRETS = ("hf_token",)
_NOTES = (
    "predicted: simulated with step costs measured beforehand. measured: on an engine in this "
    "process, in turns with the other settings; of two runs the slower is shown, with the spread "
    "between them. quality: the 16-bit model's perplexity over the format's."
)


def record_of(found: TuneResult, config: TuneConfig, model: str) -> Record:
    """Make the record: measured rows first, each kind from best to worst."""
    rows = [
        item.row()
        for items in (found.measured, found.predicted)
        for item in sorted(items, key=lambda each: each.rank, reverse=True)
    ]
    settings = {
        "model": model,
        "load": config.load.title,
        "slo": str(config.slo),
        "min_quality": config.min_quality,
        "predicted": found.num_predicted,
        "pruned": found.num_pruned,
        "left_out": found.left_out,
        "runs": config.num_runs,
        "price_per_hour": config.price_per_hour,
    }
    return Record(name="tune", rows=rows, notes=_NOTES, settings=settings)


def verdict(found: TuneResult, config: TuneConfig) -> list[str]:
    """Explain the choice in sentences."""
    best = found.best
    if best is None:
        return ["No settings were tried to the end."]
    how = "measured" if best.is_measured else "predicted, not measured"
    sentences = [f"{best.settings.title}: {best.summary.output_throughput:,.1f} tok/s ({how})."]
    if not best.meets_slo:
        misses = "; ".join(config.slo.misses(best.worst))
        sentences.append(f"Nothing meets the SLO {config.slo}; the nearest misses it: {misses}.")
    elif config.slo.targets:
        values = ((item, item.value(best.worst)) for item in config.slo.targets)
        met = [
            f"{item.name} {value:,.1f} of {item.max_ms:g} ms"
            for item, value in values
            if value is not None
        ]
        sentences.append(f"The SLO is met: {', '.join(met)}.")
    sentences += _comparison(best, [item for item in found.measured if item.meets_slo])
    quality = best.settings.format.quality
    if quality.value is not None:
        basis = f"{quality.basis}: {quality.source}"
        sentences.append(f"Its quality is {quality.value:.4f} of the 16-bit model's ({basis}).")
    sentences.append(
        f"{found.num_predicted} settings were simulated, {found.num_pruned} were invalid, "
        f"{len(found.measured)} were measured."
    )
    if found.left_out:
        sentences.append(f"Not tried: {found.left_out}.")
    return sentences


def _comparison(best: TrialResult, good: Sequence[TrialResult]) -> list[str]:
    """Compare the best with the next, and say whether the difference may be chance."""
    others = [item for item in good if item is not best]
    if not best.is_measured or not others:
        return []
    second = max(others, key=lambda item: item.summary.output_throughput)
    ratio = best.summary.output_throughput / second.summary.output_throughput
    noise, spread = best.noise(second), max(best.spread, second.spread)
    if len(best.runs) > 1 and spread > noise:
        return [
            f"Runs of the same settings differ by up to {spread:.0%}: other work uses this machine, "
            f"and the order is uncertain. {ratio:.2f} times the speed of {second.settings.title}."
        ]
    if second in as_fast_as(best, [second]) or ratio < 1:
        return [
            f"As fast as {second.settings.title} ({1 / ratio:.2f} times this) within the {noise:.0%} "
            "that runs of the same settings may differ, and smaller."
        ]
    chance = f", more than runs of the same settings differ ({spread:.0%})"
    return [
        f"{ratio:.2f} times the next{chance if len(best.runs) > 1 else ''}: {second.settings.title}."
    ]


def options_of(found: TuneResult, engine_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for `serve`: the user's and the best settings, without secrets."""
    best = found.best
    chosen = best.settings.options() if best is not None else {}
    own = {name: value for name, value in engine_options.items() if name not in _SECRETS}
    return {**own, **chosen}


def write_yaml(path: Path, options: Mapping[str, Any], reasons: list[str]) -> None:
    """Write the config file atomically, with the reasons as comments."""
    head = "".join(f"# {line}\n" for sentence in reasons for line in sentence.splitlines())
    keys = {name.replace("_", "-"): _plain(value) for name, value in options.items()}
    body = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True)
    title = f"# Written by windlass tune; windlass serve --config {path.name}\n"
    save_text(path, f"{title}{head}{body}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
