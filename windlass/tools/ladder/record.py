"""The rows of a ladder as a record: ratios, the articles' figures beside ours, and what each rung did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from windlass.tools.common.record import Record
from windlass.tools.ladder.remarks import below_of, remark, times
from windlass.tools.ladder.rungs import BASE, Rung
from windlass.tools.ladder.work import LOAD_NAMES

# Where there is no AWQ checkpoint, their row for it stands beside the int4 weights that there are.
STAND_IN = {("int4", "alone"): ("awq", "alone")}
Row = dict[str, Any]
_NOTES = (
    "Low load / saturation. Alone: on the base, continuous batching with 16-bit weights; stacked: "
    "on all rungs before it, where weights replace each other. Times the base: tokens a second, "
    "each run against a short piece of work of the base just before and after it, so that the ratio "
    "holds where the machine is shared; the other figures are as they were. TTFT, TPOT: p50 / p99. "
    "Memory: weights and the most that the KV cache held. Dollars: per million generated tokens. "
    "The articles' figures are of Llama-3-70B, on hardware that they do not name; their AWQ row "
    "stands beside int4 where there is no AWQ checkpoint."
)


class Theirs(NamedTuple):
    """Requests a second, and seconds of a whole request (p50)."""

    req_s: float
    p50_s: float


# By rung and whether it is stacked: what they switch on one at a time, they have on the base.
TABLE: dict[tuple[str, str], Theirs] = {
    ("naive", "alone"): Theirs(12, 2.1),
    ("continuous", "base"): Theirs(47, 0.8),
    ("awq", "alone"): Theirs(45, 0.9),
    ("spec", "alone"): Theirs(58, 0.6),
    ("everything", "stacked"): Theirs(89, 0.4),
}


def theirs(rung: str, how: str, has_awq: bool) -> Theirs | None:
    key = (rung, "alone" if how == "both" else how)
    if not has_awq:
        key = STAND_IN.get(key, key)
    return TABLE.get(key)


def make_record(
    rows: Sequence[Row], rungs: Mapping[str, Rung], settings: dict[str, Any], num_left: int
) -> Record:
    """`num_left`: rows that are still to be measured."""
    base = next((row for row in rows if row["rung"] == BASE and "reason" not in row), None)
    has_awq = any(row["rung"] == "awq" and "reason" not in row for row in rows)
    made = [_with_ratios(dict(row), base, has_awq) for row in rows]
    said = []
    for index, row in enumerate(made):
        row["remarks"] = _remarks(made, index, rungs)
        if row["remarks"]:
            said.append(f"- {row['label']}: {'; '.join(row['remarks'])}.")
    notes = f"{_NOTES} {_how(settings)}"
    notes += _noise(made) + _best(made)
    if num_left:
        notes += f" Interrupted: {num_left} rows are still to be measured."
    if said:
        notes += "\n\n" + "\n".join(said)
    return Record("ladder", made, notes, settings)


def _with_ratios(row: Row, base: Row | None, has_awq: bool) -> Row:
    row["label"] = row["title"]
    if row["how"] in ("stacked", "alone") and row["kind"] not in ("batching", "all"):
        row["label"] += f", {row['how']}"
    if "reason" in row:
        row["label"] += f": {row['reason']}"
        return row
    for load in LOAD_NAMES:
        ratio = times(row, base, load) if base is not None else None
        row[f"{load}_times"] = None if ratio is None else round(ratio, 2)
    other = theirs(row["rung"], row["how"], has_awq)
    row["article_req_s"] = other.req_s if other else None
    row["article_p50_s"] = other.p50_s if other else None
    return row


def _remarks(rows: Sequence[Row], index: int, rungs: Mapping[str, Rung]) -> list[str]:
    row = rows[index]
    below = below_of(rows, index)
    if "reason" in row or below is None:
        return []
    found = (remark(rungs[row["rung"]], row, below, load) for load in LOAD_NAMES)
    return [text for text in found if text is not None]


def _noise(rows: Sequence[Row]) -> str:
    """The last stacked rung and everything are the same settings, measured twice."""
    stacked = [row for row in rows if row["how"] == "stacked" and "reason" not in row]
    if len(stacked) < 2 or stacked[-1]["rung"] != "everything":
        return ""
    found = (times(stacked[-1], stacked[-2], load) for load in LOAD_NAMES)
    apart = " and ".join(f"{abs(ratio - 1):.0%}" for ratio in found if ratio is not None)
    return (
        f" {stacked[-2]['title']}, stacked, and everything are the same settings, measured twice: "
        f"the two are {apart} apart, and so much is noise in the others too."
    )


def _best(rows: Sequence[Row]) -> str:
    """Where to stop climbing, when that is not at the top."""
    said = []
    for load in LOAD_NAMES:
        found = [row for row in rows if row.get(f"{load}_times") is not None]
        if not any(row["rung"] == "everything" for row in found):
            continue
        best = max(found, key=lambda row: row[f"{load}_times"])
        if best["how"] != "both" and best["kind"] != "all":
            said.append(f"{LOAD_NAMES[load]} {best['label']} ({best[f'{load}_times']:g}x the base)")
    return f" Fastest: at {', at '.join(said)}." if said else ""


def _how(settings: Mapping[str, Any]) -> str:
    text = "No quality: the weights are random, and how often a guess is right says nothing either."
    if settings["text"] is not None:
        text = f"Perplexity and agreement with the base: on {settings['text']}."
    loads = [f"{name}: {settings[name]}" for name in ("low", "saturation") if settings[name]]
    fewer = ""
    if settings.get("naive_requests"):
        fewer = (
            f" One request at a time got the first {settings['naive_requests']} of these: its tokens "
            "a second do not depend on how many wait, its latency does."
        )
    return (
        f"Load: {settings['workload']}; {'; '.join(loads)}.{fewer} 16 bit: {settings['base']}. "
        f"{text} Price: {settings['price']}."
    )
