"""Converts the flags of `bench serve` to loads: requests, rates, concurrency limits, ramps, rate search."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from windlass.cli.flags import split_names
from windlass.config import flag
from windlass.errors import ConfigError

if TYPE_CHECKING:
    from windlass.tools.common.load import Load

_GOODPUT_SHARE = 0.95
_SIZES = ("num_prompts", "input_len", "output_len", "prefix_len", "turns", "range_ratio")
_OPTIONAL_SIZES = ("prefix_len", "turns", "range_ratio")  # that some workloads use


def loads_of(given: dict[str, Any]) -> tuple[Load, ...]:
    """One load per request rate or per concurrency limit."""
    from windlass.tools.common.arrivals import Arrivals, Ramp
    from windlass.tools.load.rate_search import INITIAL_RATE

    is_search = given["request_rate"] == "auto"
    rates = [INITIAL_RATE] if is_search else numbers_of("--request-rate", given["request_rate"])
    limits: list[int | None] = [None]
    if given["max_concurrency"] is not None:
        numbers = numbers_of("--max-concurrency", given["max_concurrency"])
        if any(number != int(number) for number in numbers if math.isfinite(number)):
            raise ConfigError(f"--max-concurrency {given['max_concurrency']}: expected integers.")
        limits = [int(number) if math.isfinite(number) else None for number in numbers]
    if len(limits) > 1 and (len(rates) > 1 or is_search):
        raise ConfigError("--request-rate and --max-concurrency cannot both be a sweep.")
    ramp = None
    ramp_rates = [given["ramp_up_start_rps"], given["ramp_up_end_rps"]]
    if given["ramp_up_strategy"] is not None:
        if None in ramp_rates:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
        ramp = Ramp(given["ramp_up_strategy"], *ramp_rates)
    elif ramp_rates != [None, None]:
        raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
    is_trace = given["dataset_name"] == "timed_trace"
    pattern: Any = given["arrivals"] or ("trace" if is_trace and rates == [math.inf] else "poisson")
    if pattern == "trace" and given["dataset_name"] not in ("timed_trace", "custom"):
        raise ConfigError("--arrivals trace needs --dataset-name timed_trace or custom.")
    arrivals = [
        Arrivals(
            pattern=pattern,
            rate=rate,
            burstiness=given["burstiness"],
            burst_size=given["burst_size"],
            ramp=ramp,
            speed=given["trace_speed"],
        )
        for rate in rates
    ]
    load = _load_of(given)
    return tuple(
        replace(load, arrivals=each, max_concurrency=limit) for each in arrivals for limit in limits
    )


def _load_of(given: dict[str, Any]) -> Load:
    """The requests, with default arrivals."""
    from windlass.tools.common.load import Load
    from windlass.tools.common.request_files import FILE_FORMATS
    from windlass.tools.common.text_workload import TEXT_WORKLOADS, Sizes

    name, path, tokens_per_word = (
        given[key] for key in ("dataset_name", "dataset_path", "tokens_per_word")
    )
    sizes = Sizes(**{key: given[key] for key in _SIZES})
    if name in TEXT_WORKLOADS:
        if path is not None or given["skip_bad_lines"]:
            raise ConfigError(
                "--dataset-path and --skip-bad-lines have no effect with --dataset-name "
                f"{name}, which reads no file."
            )
    elif name not in FILE_FORMATS:
        known = ", ".join((*TEXT_WORKLOADS, *FILE_FORMATS))
        raise ConfigError(f"--dataset-name {name!r} is not known. Known: {known}.")
    elif path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE.")
    elif sizes.input_len is not None:
        raise ConfigError(f"--input-len has no effect with --dataset-name {name}.")
    takes = TEXT_WORKLOADS[name].takes if name in TEXT_WORKLOADS else ()
    for key in _OPTIONAL_SIZES:
        if key not in takes and getattr(sizes, key) != getattr(Sizes(), key):
            raise ConfigError(f"{flag(key)} has no effect with --dataset-name {name}. Remove it.")
    if tokens_per_word is not None and name == "custom":
        raise ConfigError("--tokens-per-word has no effect with --dataset-name custom.")
    if tokens_per_word is not None and not tokens_per_word > 0:
        raise ConfigError(f"--tokens-per-word must be above 0, got {tokens_per_word}.")
    return Load(name, path, sizes, skip_bad_lines=given["skip_bad_lines"], seed=given["seed"])


def search_share(given: dict[str, Any]) -> float | None:
    """Share of requests that must meet their targets; None: no rate search."""
    share = given["goodput_share"]
    if given["request_rate"] != "auto":
        if share is not None:
            raise ConfigError("--goodput-share has an effect only with --request-rate auto.")
        return None
    if not given["goodput"]:
        raise ConfigError("--request-rate auto needs targets: --goodput ttft:500 tpot:40.")
    share = _GOODPUT_SHARE if share is None else share
    if not 0 < share <= 1:
        raise ConfigError(f"--goodput-share must be above 0 and up to 1, got {share:g}.")
    return share


def numbers_of(flag: str, text: str, max_value: float = math.inf) -> list[float]:
    """Parse comma-separated numbers above 0."""
    try:
        numbers = [float(word) for word in split_names(text)]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= max_value for number in numbers):
        limit = f" up to {max_value:g}" if math.isfinite(max_value) else ""
        raise ConfigError(f"{flag} {text!r}: expected comma-separated numbers above 0{limit}.")
    return numbers
