"""Dashboard, alert rules and the page of metrics name metrics that exist; the real Prometheus agrees.

`python -m tests.serve.test_observability` prints the table of docs/observability.md.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import Options, counting
from windlass.config import ServeConfig
from windlass.serve.cost import make_cost_tracker
from windlass.serve.listener import bind
from windlass.serve.metrics import Metrics

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "windlass.json"
PAGE = ROOT / "docs" / "observability.md"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="needs Prometheus: apt-get install prometheus",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    build = counting(Options(num_blocks=64, max_model_len=1024, step_s=0.5))
    with running(build, price_per_hour=1.0) as server:
        yield server


def metric_table() -> str:
    """The table of docs/observability.md."""
    metrics = Metrics("m")
    make_cost_tracker(1.0, "m", metrics.registry)
    lines = ["| metric | type | labels | |", "|---|---|---|---|"]
    rows = []
    for collector in metrics.registry._collector_to_names:
        source: Any = getattr(collector, "_template", collector)  # of a FastHistogram
        labels = ", ".join(f"`{each}`" for each in source._labelnames if each != "model_name")
        [metric] = source.describe()
        name = metric.name + ("_total" if metric.type == "counter" else "")
        rows.append(f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |")
    return "\n".join([*lines, *sorted(rows)]) + "\n"


def exposed_names(text: str) -> set[str]:
    """The names of all series that an exposition may have."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE):
        names |= {name + suffix for suffix in SUFFIXES.get(kind, ("",))}
    return names


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bwindlass:[a-z_0-9:]+", expression))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_page_shows_all_metrics() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert metric_table() in page, "replace the table: python -m tests.serve.test_observability"


def test_every_alert_has_a_runbook() -> None:
    headings = re.findall(r"^### (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {heading.lower() for heading in headings}
    for rule in rules():
        if "alert" in rule:
            page, _, anchor = rule["annotations"]["runbook"].partition("#")
            assert (ROOT / page) == PAGE
            assert anchor in anchors, rule["alert"]


def test_expressions_use_metrics_that_the_server_has(server: Server) -> None:
    exposed = exposed_names(server.http.get("/metrics").text)
    known = exposed | {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        assert names_in(rule["expr"]) <= known, rule
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", ())
    ]
    assert len(expressions) > 20
    for expression in expressions:
        assert names_in(expression), expression
        assert names_in(expression) <= exposed, expression


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    """Panels do not overlap, have unique ids, and take their data source from the variable."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    variables = {each["name"]: each["type"] for each in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model": "query"}
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not taken & cells, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        cells |= taken
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references) > 0


@needs_prometheus
def test_alerts_fire_and_clear_by_their_unit_tests() -> None:
    tested = yaml.safe_load((RULES.parent / "alerts_test.yaml").read_text(encoding="utf-8"))
    cases = [case for test in tested["tests"] for case in test["alert_rule_test"]]
    for rule in rules():
        if "alert" in rule:
            mine = [case["exp_alerts"] for case in cases if case["alertname"] == rule["alert"]]
            assert any(mine), rule["alert"]  # it fires
            assert not mine[-1], rule["alert"]  # and clears
    for arguments in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            ["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_prometheus_scrapes_the_server_and_an_alert_fires_and_clears(
    server: Server, tmp_path: Path
) -> None:
    text = server.http.get("/metrics").text
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert "error while linting" not in checked.stderr
    # The alert of the rules, without the five minutes for which it must hold.
    (rule,) = [each for each in rules() if each.get("alert") == "WindlassKVCacheFull"]
    quick = {"groups": [{"name": "quick", "rules": [{**rule, "for": "0s"}]}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(quick), encoding="utf-8")
    target = server.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "windlass", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with bind(ServeConfig(port=0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yaml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=20) as api:
            wait_until(lambda: _query(api, f'up{{instance="{target}"}}') == 1)
            wait_until(lambda: _query(api, "windlass:engine_up") == 1)
            assert _alerts(api) == []
            prompt = "x" * 960  # 61 of 64 blocks
            body = {"prompt": prompt, "max_tokens": 50, "stream": True, "ignore_eos": True}
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()  # kept: httpx closes the stream with its iterator
                next(lines)
                wait_until(lambda: _alerts(api) == ["firing"])
            wait_until(lambda: _alerts(api) == [])
    finally:
        process.terminate()
        process.wait(30)


def _query(api: httpx.Client, expression: str) -> float | None:
    try:
        found = api.get("/query", params={"query": expression}).json()["data"]["result"]
    except (httpx.TransportError, json.JSONDecodeError, KeyError):  # it is starting
        return None
    return float(found[0]["value"][1]) if found else None


def _alerts(api: httpx.Client) -> list[str]:
    return [each["state"] for each in api.get("/alerts").json()["data"]["alerts"]]


if __name__ == "__main__":
    print(metric_table(), end="")
