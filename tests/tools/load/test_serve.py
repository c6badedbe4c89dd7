"""`bench serve` against a Windlass server, its results, and their HTML page."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.serve.conftest import Server, running
from tests.serve.fakes import Options, counting
from tests.tools.conftest import Windlass
from windlass.tools.load.monitor import MetricsSample, parse, speculation


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(build=counting(Options(step_s=0.002))) as made:
        yield made


def test_a_sweep_is_measured_and_written(
    server: Server, windlass: Windlass, tmp_path: Path
) -> None:
    before = server.metric("prompt_tokens_total")
    words = ("--num-prompts", 10, "--input-len", 40, "--output-len", 8, "--ignore-eos")
    more = ("--max-concurrency", "1,4", "--goodput", "ttft:5000", "tpot:5000", "--label", "ours")
    files = [tmp_path / f"r.{suffix}" for suffix in ("json", "csv", "html")]
    outputs = [word for path in files for word in ("-o", path)]
    shown = windlass(
        "bench", "serve", "--base-url", server.url, *words, *more, *outputs, "--save-detailed"
    )
    record = json.loads(files[0].read_text())
    one, four = record["rows"]
    assert record["name"] == "serve"
    assert record["settings"]["model"] == "counter"
    for row, limit in ((one, 1), (four, 4)):
        assert (row["completed"], row["failed"]) == (10, 0)
        assert row["max_concurrency"] == row["max_concurrent_requests"] == limit
        assert row["total_output_tokens"] == 80
        assert row["output_lens"] == [8] * 10
        assert all(len(gaps) == 7 for gaps in row["itls"])
        assert row["request_goodput"] == row["request_throughput"]
        assert row["p99_ttft_ms"] >= row["median_ttft_ms"] > 0
        assert max(row["server"]["running"]) <= limit
        assert sum(row["over_time"]["output_tok_s"]) > 0
    # The client's counts match the server's, without the texts that measure the tokenizer.
    counted = server.metric("prompt_tokens_total") - before
    assert one["total_input_tokens"] + four["total_input_tokens"] == counted
    # Lengths are met; the chat template adds a little.
    assert all(40 <= length < 80 for length in one["input_lens"])
    assert "Maximum request concurrency:             4" in shown
    lines = list(csv.DictReader(files[1].open()))
    assert [line["max_concurrency"] for line in lines] == ["1", "4"]
    assert float(lines[0]["p99_itl_ms"]) == one["p99_itl_ms"]


def test_a_chat_waits_for_answers_and_a_seed_repeats_the_requests(
    server: Server, windlass: Windlass, tmp_path: Path
) -> None:
    output = tmp_path / "r.json"
    words = ("--dataset-name", "chat", "--num-prompts", 6, "--turns", 3, "--input-len", 12)
    more = ("--output-len", 4, "--num-warmups", 2, "--seed", 7, "-o", output)
    fingerprints = []
    for _ in range(2):
        windlass("bench", "serve", "--base-url", server.url, *words, *more)
        record = json.loads(output.read_text())
        fingerprints.append(record["settings"]["fingerprint"])
        assert record["rows"][0]["completed"] == 6
        assert record["rows"][0]["max_concurrent_requests"] <= 2
    assert fingerprints[0] == fingerprints[1]
    assert record["rows"][0]["cached_input_tokens"] > 0


class _References(HTMLParser):
    """Collects the URLs that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.found += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        if self._tag == "script":
            self.text.append(data)


def test_two_engines_in_one_self_contained_page(
    server: Server, windlass: Windlass, tmp_path: Path
) -> None:
    paths = []
    for name, seed in (("ours", 0), ("<b>theirs</script>", 1)):
        paths.append(tmp_path / f"{seed}.json")
        words = ("--num-prompts", 4, "--input-len", 16, "--output-len", 4, "--label", name)
        more = ("--seed", seed, "--request-rate", 200, "-o", paths[-1])
        windlass("bench", "serve", "--base-url", server.url, *words, *more)
    page = tmp_path / "page.html"
    windlass("bench", "report", *paths, "-o", page)
    html = page.read_text()
    parser = _References()
    parser.feed(html)
    assert parser.found == []
    assert "@import" not in html.split("<script>")[0]
    assert "were measured with different requests" in html
    assert "&lt;b&gt;theirs&lt;/script&gt;" in html
    plots = json.loads(re.search(r"const plots = (.*);\n", "".join(parser.text[1:]))[1])  # type: ignore[index]
    names = {trace["name"] for plot in plots for trace in plot["data"]}
    assert {"ours", "ours p99", "<b>theirs</script> p50"} <= names
    assert len(plots) == len(re.findall('<div class="plot"', html)) == 11
    assert "Queue" not in html.split("<script>")[0]
    windlass("bench", "report", *paths, "--label", "a", "--label", "b", "-o", page)
    assert "Load on a, b" in page.read_text()


def test_invalid_results_are_rejected(windlass: Windlass, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    page = ("-o", tmp_path / "page.html")
    assert "is not a benchmark result" in windlass("bench", "report", other, *page, code=2)
    other.write_text('{"name": "prefix", "rows": [1]}')
    assert "is not a result of windlass bench serve" in windlass(
        "bench", "report", other, *page, code=2
    )
    words = ("bench", "report", other, "--label", "a", "--label", "b", *page)
    assert "--label was given 2 times for 1 files" in windlass(*words, code=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'vllm:num_requests_running{model_name="a"} 2.0\n'
            'vllm:num_requests_running{model_name="b"} 3.0\n'
            "# HELP vllm:num_requests_waiting x\nvllm:num_requests_waiting 1\n"
            "vllm:kv_cache_usage_perc 0.25\n",
            MetricsSample(1.0, 5.0, 1.0, 0.25),
        ),
        (
            "llamacpp:requests_processing 4\nllamacpp:requests_deferred 0\n",
            MetricsSample(1.0, 4.0, 0.0, None),
        ),
        (  # --metrics-prefix both
            "windlass:num_requests_running 4\nvllm:num_requests_running 4\n",
            MetricsSample(1.0, 4.0),
        ),
        ("other:num_requests_running 4\nvllm:num_requests_running soon\n", MetricsSample(1.0)),
    ],
)
def test_metrics_of_several_engines(text: str, expected: MetricsSample) -> None:
    assert parse(text, 1.0) == expected


def test_acceptance_from_the_servers_counters() -> None:
    def sample(drafts: float, drafted: float, accepted: float) -> MetricsSample:
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        return MetricsSample(
            0.0, counters=dict(zip(names, (drafts, drafted, accepted), strict=True))
        )

    figures = speculation([sample(10, 40, 20), sample(20, 80, 50)])
    assert figures["spec_decode_acceptance_rate"] == 75.0
    assert figures["spec_decode_acceptance_length"] == 4.0
    assert speculation([sample(0, 0, 0)] * 2) == {}


def test_rate_search_with_unreachable_targets(
    server: Server, windlass: Windlass, tmp_path: Path
) -> None:
    output = tmp_path / "r.json"
    words = ("--num-prompts", 3, "--input-len", 16, "--output-len", 4, "--request-rate", "auto")
    never = ("--goodput", "ttft:0.001", "--goodput-share", "50%", "-o", output)
    shown = windlass(
        "bench", "serve", "--base-url", server.url, *words[:1], 1, *words[2:], *never, code=1
    )
    assert "No rate was found at which at least 50% of the requests meet the targets: 0%" in shown
    record = json.loads(output.read_text())
    assert record["settings"]["found_rate"] is None
    assert [row["request_rate"] for row in record["rows"]] == [2.0**n for n in range(-6, 1)]
    assert {row["goodput_share"] for row in record["rows"]} == {0.0}


def test_probes_are_reported_separately(server: Server, windlass: Windlass, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    words = ("--num-prompts", 8, "--input-len", 16, "--output-len", 8, "--max-concurrency", 1)
    more = ("--probe-request-rate", 50, "-o", output)
    shown = windlass("bench", "serve", "--base-url", server.url, *words, *more)
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["completed"], row["total_output_tokens"], row["max_concurrent_requests"]) == (
        8,
        64,
        1,
    )
    assert row["probe_completed"] > 1
    assert row["probe_failed"] == 0
    assert row["probe_max_e2el_ms"] >= row["probe_p99_e2el_ms"] >= row["probe_median_e2el_ms"] > 0
    assert "Median probe E2EL (ms):" in shown
