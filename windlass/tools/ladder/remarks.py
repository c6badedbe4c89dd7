"""What a rung did, in a sentence, and why: from what was measured, for each of the two loads.

A rung that made things worse, or no better, is always told; so is what the others gave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.tools.ladder.rungs import BASE, Rung
from windlass.tools.ladder.work import LOAD_NAMES

Row = Mapping[str, Any]

BETTER, WORSE = 1.05, 0.95  # ratios between these are no difference that a short run could show
_FULL_ROWS = 4  # tokens a step, from which on a guess takes time from somebody else
_ALONE_ROWS = 1.1


def times(row: Row, base: Row, load: str) -> float | None:
    """Tokens a second against the base's, each against what the machine gave at that time."""
    if f"{load}_tok_s" not in row or f"{load}_tok_s" not in base:
        return None
    own = row[f"{load}_tok_s"] / row[f"{load}_yard_tok_s"]
    other = base[f"{load}_tok_s"] / base[f"{load}_yard_tok_s"]
    return float(own / other)


def remark(rung: Rung, row: Row, below: Row, load: str) -> str | None:
    """`below`: the row that it is compared with, at the same load; None: there is nothing to say."""
    ratio = times(row, below, load)
    if ratio is None or row is below:
        return None
    if rung.kind == "all":
        return f"{LOAD_NAMES[load]}: {ratio:.2f}x {below['title']}"
    alone = max(row[f"{load}_rows_a_step"], below[f"{load}_rows_a_step"]) < _ALONE_ROWS
    if rung.kind == "batching" and alone and (ratio > WORSE or rung.name != "static"):
        return (
            f"{LOAD_NAMES[load]}: {ratio:.2f}x, by chance: one request is under way at a time, and "
            "there is nobody to share a step with"
        )
    why = _WHY[rung.kind](rung, row, below, load, ratio)
    if WORSE < ratio < BETTER:
        return f"{LOAD_NAMES[load]}: {ratio:.2f}x, no gain: {why}"
    verdict = "worse" if ratio <= WORSE else "better"
    return f"{LOAD_NAMES[load]}: {ratio:.2f}x, {verdict}: {why}"


def _batching(rung: Rung, row: Row, below: Row, load: str, ratio: float) -> str:
    rows, before = row[f"{load}_rows_a_step"], below[f"{load}_rows_a_step"]
    if load == "low" and rung.name == "static" and ratio <= WORSE:
        return "a batch waits a while for others, who do not come"
    if rung.name == "static" and ratio <= WORSE:
        return "a batch waits until it is full, or for a while, and then for its longest answer"
    return f"{rows:g} tokens a step instead of {before:g}, and a step reads the weights once"


def _prefill(rung: Rung, row: Row, below: Row, load: str, ratio: float) -> str:
    del rung, ratio
    cut, count = row[f"{load}_cut"], row[f"{load}_requests"]
    budget = f"{row['max_num_batched_tokens']:,} tokens"
    said = f"{cut} of {count} prompts were cut to fill steps of {budget}"
    if not cut:
        said = f"no prompt had to be cut, since a step takes {budget}"
    whole = row["context"] * row["kv_token_bytes"] / 2**20
    if load == "low":
        return f"{said}, one at a time"
    return (
        f"{said}; TPOT p99 {_ms(row, load, 'tpot_p99_ms')}, was {_ms(below, load, 'tpot_p99_ms')}. "
        f"Pages cannot be switched off: {row['sat_kv_mib']:,.0f} MiB held all requests, a cache of "
        f"whole contexts would take {whole:,.0f} MiB for each"
    )


def _prefix(rung: Rung, row: Row, below: Row, load: str, ratio: float) -> str:
    del rung
    share, before = row[f"{load}_cached_share"], below[f"{load}_prompt_share"]
    if share == 0:
        return "no prompt began like an earlier one"
    found = f"{share:.0%} of the prompt tokens were found in the cache"
    if ratio < BETTER and before < 0.5:
        return f"{found}, but prompts are only {before:.0%} of the tokens that are computed"
    return f"{found}; prompts were {before:.0%} of the tokens to compute"


def _weights(rung: Rung, row: Row, below: Row, load: str, ratio: float) -> str:
    del rung
    sizes = f"{row['weights_mib']:,.0f} MiB of weights instead of {below['weights_mib']:,.0f}"
    kernels = " and ".join(row["held"]) or "torch's own products"
    if ratio < BETTER and any("torch kernel" in held for held in row["held"]):
        return f"{sizes}, but this device has no fast kernel for them ({kernels})"
    if load == "low":
        return f"{sizes} are read for every token ({kernels})"
    computed = f"{row['sat_rows_a_step']:g} tokens a step share one reading"
    if ratio < BETTER:
        return f"{sizes}, but {computed}, and arithmetic is what takes the time ({kernels})"
    return f"{sizes}; {computed}, so that their arithmetic counts too ({kernels})"


def _kv(rung: Rung, row: Row, below: Row, load: str, ratio: float) -> str:
    del rung
    cache = below[f"{load}_kv_mean_mib"]
    share = cache / max(1e-9, cache + below["weights_mib"])
    saved = 1 - row["kv_token_bytes"] / below["kv_token_bytes"]
    said = (
        f"the cache is {share:.0%} of the bytes that a step reads, and this saves {saved:.0%} of it"
    )
    if ratio <= WORSE:
        said = f"rounding costs more than it saves: {said}"
    more = below["kv_token_bytes"] / row["kv_token_bytes"]
    return f"{said}; the same memory holds {more:.1f}x the tokens"


def _hparams(rung: Rung, row: Row, below: Row, load: str, ratio: float) -> str:
    del rung
    drafted, accepted = row[f"{load}_drafted"], row[f"{load}_accepted"]
    rows = below[f"{load}_rows_a_step"]
    if not drafted:
        return "nothing was guessed, since the governor saw nothing to gain; looking costs a little"
    right = f"{accepted} of {drafted} guesses were right"
    if ratio >= BETTER:
        return f"{right}, each a token without a step of its own"
    if rows >= _FULL_ROWS:
        return f"{right}, and {rows:g} tokens a step already fill the machine"
    return f"{right}, too few to pay for verifying them"


_WHY = {
    "batching": _batching,
    "prefill": _prefill,
    "prefix": _prefix,
    "weights": _weights,
    "kv": _kv,
    "spec": _hparams,
}


def _ms(row: Row, load: str, key: str) -> str:
    value = row[f"{load}_{key}"]
    return "-" if value is None else f"{value:,.0f} ms"


def below_of(rows: Sequence[dict[str, Any]], index: int) -> dict[str, Any] | None:
    """What a row is compared with: the base, or for a stacked one the last stacked before it.

    Weights replace each other, so that these are compared with the stack before the first of them.
    """
    row = rows[index]
    measured = {it["rung"]: it for it in rows if it["how"] != "stacked" and "reason" not in it}
    if row["rung"] in ("naive", BASE):
        return measured.get("naive")
    if row["rung"] == "static":
        return measured.get("naive", measured.get(BASE))
    if row["rung"] == "everything":
        return measured.get("naive", measured.get(BASE))
    if row["how"] != "stacked":
        return measured.get(BASE)
    for before in reversed(rows[:index]):
        if before["how"] not in ("stacked", "both") or "reason" in before:
            continue
        if row["kind"] == "weights" and before["kind"] == "weights":
            continue
        if before["kind"] == "weights" and before["weights"] != row["weights"]:
            continue
        return before
    return measured.get(BASE)
