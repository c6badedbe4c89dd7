"""Turns measured rows into the ladder's record: speedups, reference figures, and remarks.

A remark states in one sentence per load what a rung changed and why, from the measured figures.
Regressions and rungs without gain always get one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from windlass.tools.common.record import Record
from windlass.tools.ladder.rungs import BASE
from windlass.tools.ladder.workload import LOAD_NAMES

Row = dict[str, Any]

_NOTES = (
    "Low load / saturation. Alone: on the base, which is continuous batching with 16-bit weights; "
    "stacked: on all rungs before it, where weights replace each other. Speedup over base: tokens per "
    "second, each divided by the speed of a short baseline workload on the base just before and after "
    "the run, so that the ratio holds on a shared machine; the other figures are not corrected. TTFT, "
    "TPOT: p50 / p99. Memory: weights and the peak of the KV cache. Dollars: per million generated "
    "tokens. The articles' figures are for Llama-3-70B on hardware that they do not name; their AWQ "
    "figure is shown with int4 when there is no AWQ checkpoint."
)
# The articles' AWQ row is shown with the int4 weights when there is no AWQ checkpoint.
_AWQ_FALLBACK = {("int4", "alone"): ("awq", "alone")}
# Ratios between these limits are within the noise of a short run.
_BETTER, _WORSE = 1.05, 0.95
_FULL_BATCH = 4  # tokens per step from which draft tokens compete with other requests
_SINGLE_ROW = 1.1


class ArticleFigures(NamedTuple):
    """Requests per second, and end-to-end seconds per request (p50)."""

    req_s: float
    p50_s: float


# By rung and mode. The articles enable single optimisations on the base.
ARTICLE_TABLE: dict[tuple[str, str], ArticleFigures] = {
    ("naive", "alone"): ArticleFigures(12, 2.1),
    ("continuous", "base"): ArticleFigures(47, 0.8),
    ("awq", "alone"): ArticleFigures(45, 0.9),
    ("spec", "alone"): ArticleFigures(58, 0.6),
    ("everything", "stacked"): ArticleFigures(89, 0.4),
}


def article_figures(rung: str, mode: str, has_awq: bool) -> ArticleFigures | None:
    key = (rung, "alone" if mode == "both" else mode)
    if not has_awq:
        key = _AWQ_FALLBACK.get(key, key)
    return ARTICLE_TABLE.get(key)


def make_record(rows: Sequence[Row], settings: dict[str, Any], num_left: int) -> Record:
    """Make the record; `num_left` rows are not yet measured."""
    base = next((row for row in rows if row["rung"] == BASE and "reason" not in row), None)
    has_awq = any(row["rung"] == "awq" and "reason" not in row for row in rows)
    made = [_with_speedups(dict(row), base, has_awq) for row in rows]
    lines = []
    for index, row in enumerate(made):
        row["remarks"] = _remarks(made, index)
        if row["remarks"]:
            lines.append(f"- {row['label']}: {'; '.join(row['remarks'])}.")
    notes = f"{_NOTES} {_about(settings)}"
    notes += _noise(made) + _fastest(made)
    if num_left:
        notes += f" Interrupted: {num_left} rows are still to be measured."
    if lines:
        notes += "\n\n" + "\n".join(lines)
    return Record(name="ladder", rows=made, notes=notes, settings=settings)


def is_measured(row: Row) -> bool:
    """Whether a row has all figures: not those of an earlier version, or of weights that were missing."""
    loads = [load for load in LOAD_NAMES if f"{load}_tok_s" in row]
    return "reason" not in row and all(f"{load}_read_mib" in row for load in loads)


def _with_speedups(row: Row, base: Row | None, has_awq: bool) -> Row:
    row["label"] = row["title"]
    if row["mode"] in ("stacked", "alone") and row["kind"] not in ("batching", "all"):
        row["label"] += f", {row['mode']}"
    if "reason" in row:
        row["label"] += f": {row['reason']}"
        return row
    for load in LOAD_NAMES:
        ratio = speedup(row, base, load) if base is not None else None
        row[f"{load}_speedup"] = None if ratio is None else round(ratio, 2)
    article = article_figures(row["rung"], row["mode"], has_awq)
    row["article_req_s"] = article.req_s if article else None
    row["article_p50_s"] = article.p50_s if article else None
    return row


def speedup(row: Row, base: Row, load: str) -> float | None:
    """Tokens per second relative to `base`, corrected by the machine's speed at the time."""
    if f"{load}_tok_s" not in row or f"{load}_tok_s" not in base:
        return None
    own = row[f"{load}_tok_s"] / row[f"{load}_baseline_tok_s"]
    other = base[f"{load}_tok_s"] / base[f"{load}_baseline_tok_s"]
    return float(own / other)


def _noise(rows: Sequence[Row]) -> str:
    """The last stacked rung and `everything` have the same settings, which shows the noise."""
    stacked = [row for row in rows if row["mode"] == "stacked" and "reason" not in row]
    if len(stacked) < 2 or stacked[-1]["rung"] != "everything":
        return ""
    ratios = (speedup(stacked[-1], stacked[-2], load) for load in LOAD_NAMES)
    apart = " and ".join(f"{abs(ratio - 1):.0%}" for ratio in ratios if ratio is not None)
    return (
        f" {stacked[-2]['title']}, stacked, and everything are the same settings, measured twice: "
        f"they differ by {apart}, so expect as much noise in the other rows."
    )


def _fastest(rows: Sequence[Row]) -> str:
    """Name the fastest rung of each load, unless it is `everything`."""
    names = []
    for load, title in LOAD_NAMES.items():
        measured = [row for row in rows if row.get(f"{load}_speedup") is not None]
        if not any(row["rung"] == "everything" for row in measured):
            continue
        best = max(measured, key=lambda row: row[f"{load}_speedup"])
        if best["mode"] != "both" and best["kind"] != "all":
            names.append(f"{title} {best['label']} ({best[f'{load}_speedup']:g}x the base)")
    return f" Fastest: at {', at '.join(names)}." if names else ""


def _about(settings: Mapping[str, Any]) -> str:
    text = "No quality: the weights are random, so the acceptance rate means nothing either."
    if settings["text"] is not None:
        text = f"Perplexity and agreement with the base: on {settings['text']}."
    loads = [f"{name}: {settings[name]}" for name in ("low", "saturation") if settings[name]]
    fewer = ""
    if settings.get("naive_requests"):
        fewer = (
            f" The rung with one request at a time ran only the first {settings['naive_requests']} "
            "requests: the queue length affects its latency, but not its tokens per second."
        )
    return (
        f"Load: {settings['workload']}; {'; '.join(loads)}.{fewer} 16 bit: {settings['base']}. "
        f"{text} Price: {settings['price']}."
    )


# ---- remarks ---------------------------------------------------------------------------------


def _remarks(rows: Sequence[Row], index: int) -> list[str]:
    row = rows[index]
    below = row_below(rows, index)
    if "reason" in row or below is None:
        return []
    texts = (remark(row, below=below, load=load) for load in LOAD_NAMES)
    return [text for text in texts if text is not None]


def row_below(rows: Sequence[Row], index: int) -> Row | None:
    """The row to compare with: the base, or for a stacked row the stacked row before it.

    Weights replace each other, so they are compared with the stack before the first weights.
    """
    row = rows[index]
    measured = {it["rung"]: it for it in rows if it["mode"] != "stacked" and "reason" not in it}
    if row["rung"] in ("naive", BASE):
        return measured.get("naive")
    if row["rung"] in ("static", "everything"):
        return measured.get("naive", measured.get(BASE))
    if row["mode"] != "stacked":
        return measured.get(BASE)
    for before in reversed(rows[:index]):
        if before["mode"] not in ("stacked", "both") or "reason" in before:
            continue
        if row["kind"] == "weights" and before["kind"] == "weights":
            continue
        if before["kind"] == "weights" and before["weights"] != row["weights"]:
            continue
        return before
    return measured.get(BASE)


def remark(row: Row, below: Row, load: str) -> str | None:
    """Compare a row with `below` at one load; None if there is nothing to compare."""
    ratio = speedup(row, below, load)
    if ratio is None or row is below:
        return None
    head = f"{LOAD_NAMES[load]}: {ratio:.2f}x"
    if row["kind"] == "all":
        return f"{head} {below['title']}"
    single = max(row[f"{load}_tokens_per_step"], below[f"{load}_tokens_per_step"]) < _SINGLE_ROW
    if row["kind"] == "batching" and single and (ratio > _WORSE or row["rung"] != "static"):
        return f"{head}, noise: one request runs at a time, so there is nothing to batch"
    reason = _REASONS[row["kind"]](row, below, load, ratio)
    if _WORSE < ratio < _BETTER:
        return f"{head}, no gain: {reason}"
    return f"{head}, {'worse' if ratio <= _WORSE else 'better'}: {reason}"


def _batching(row: Row, below: Row, load: str, ratio: float) -> str:
    tokens, before = row[f"{load}_tokens_per_step"], below[f"{load}_tokens_per_step"]
    if load == "low" and row["rung"] == "static" and ratio <= _WORSE:
        return "a batch waits for further requests, which do not arrive"
    if row["rung"] == "static" and ratio <= _WORSE:
        return "a batch waits until it is full or times out, and then for its longest output"
    return f"{tokens:g} tokens per step instead of {before:g}, and a step reads the weights once"


def _prefill(row: Row, below: Row, load: str, ratio: float) -> str:
    del ratio
    chunked, count = row[f"{load}_chunked_prompts"], row[f"{load}_requests"]
    budget = f"{row['max_num_batched_tokens']:,} tokens"
    text = f"{chunked} of {count} prompts were chunked to fill steps of {budget}"
    if not chunked:
        text = f"no prompt was chunked, since a step takes {budget}"
    if load == "low":
        return f"{text}, one at a time"
    contiguous = row["context"] * row["kv_token_bytes"] / 2**20
    return (
        f"{text}; TPOT p99 {_ms(row, load, 'tpot_p99_ms')}, was {_ms(below, load, 'tpot_p99_ms')}. "
        f"Paging cannot be switched off: {row['sat_kv_mib']:,.0f} MiB held all requests, a contiguous "
        f"cache would take {contiguous:,.0f} MiB per request"
    )


def _prefix(row: Row, below: Row, load: str, ratio: float) -> str:
    share, prompts = row[f"{load}_cached_share"], below[f"{load}_prompt_share"]
    if share == 0:
        return "no prompt shared a prefix with an earlier one"
    hits = f"{share:.0%} of the prompt tokens were cache hits"
    if ratio < _BETTER and prompts < 0.5:
        return f"{hits}, but prompts are only {prompts:.0%} of the computed tokens"
    return f"{hits}; prompts were {prompts:.0%} of the computed tokens"


def _weights(row: Row, below: Row, load: str, ratio: float) -> str:
    read, before = f"{row[f'{load}_read_mib']:,.0f}", f"{below[f'{load}_read_mib']:,.0f}"
    sizes = f"{read} MiB of weights instead of {before}"
    if read == before:
        sizes = f"the same {read} MiB of weights"
    kernels = " and ".join(row["kernels"]) or "torch GEMMs"
    if ratio < _BETTER and any("kernel: torch" in kernel for kernel in row["kernels"]):
        return f"{sizes}, but this device has no fast kernel for them ({kernels})"
    if load == "low":
        return f"{sizes} are read for every token ({kernels})"
    shared = f"{row['sat_tokens_per_step']:g} tokens per step share one read of the weights"
    if ratio < _BETTER:
        return f"{sizes}, but {shared}, and the step is compute-bound ({kernels})"
    return f"{sizes}; {shared}, so the arithmetic counts too ({kernels})"


def _kv(row: Row, below: Row, load: str, ratio: float) -> str:
    cache = below[f"{load}_kv_mean_mib"]
    share = cache / max(1e-9, cache + below[f"{load}_read_mib"])
    saved = 1 - row["kv_token_bytes"] / below["kv_token_bytes"]
    text = (
        f"the cache is {share:.0%} of the bytes that a step reads, of which this saves {saved:.0%}"
    )
    if ratio <= _WORSE:
        text = f"quantisation costs more than it saves: {text}"
    more = below["kv_token_bytes"] / row["kv_token_bytes"]
    return f"{text}; the same memory holds {more:.1f}x the tokens"


def _speculation(row: Row, below: Row, load: str, ratio: float) -> str:
    drafted, accepted = row[f"{load}_drafted"], row[f"{load}_accepted"]
    tokens = below[f"{load}_tokens_per_step"]
    if not drafted:
        return "no tokens were drafted, since the governor expected no gain; probing costs a little"
    acceptance = f"{accepted} of {drafted} draft tokens were accepted"
    if ratio >= _BETTER:
        return f"{acceptance}, each a token without a step of its own"
    if tokens >= _FULL_BATCH:
        return f"{acceptance}, and {tokens:g} tokens per step already saturate the machine"
    return f"{acceptance}, too few to pay for the verification"


_REASONS = {
    "batching": _batching,
    "prefill": _prefill,
    "prefix": _prefix,
    "weights": _weights,
    "kv": _kv,
    "spec": _speculation,
}


def _ms(row: Row, load: str, key: str) -> str:
    value = row[f"{load}_{key}"]
    return "-" if value is None else f"{value:,.0f} ms"
