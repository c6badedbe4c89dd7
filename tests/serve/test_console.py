"""The web console in a real Chromium, and its files and endpoints without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.serve.browser import Page, find_chromium, open_browser
from tests.serve.conftest import Server, running, wait_until
from tests.serve.fakes import CARD, Options, counting
from windlass.core.memory import AdapterUse, Memory
from windlass.core.types import AdapterSize
from windlass.serve.console_files import CONSOLE_PATHS

ROOT = Path(__file__).parent.parent.parent
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
# A template of a model that reasons and calls tools as Hermes does.
TEMPLATE = """{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<' + message.role + '>' + message.content }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}
{%- endfor %}{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}{{ '<think>' if open }}"""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script> [a](javascript:alert(3)) "
    "![b](http://example.com/x.png) **<b onclick=alert(4)>c</b>** <svg/onload=alert(5)>"
)
needs_browser = pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    card = replace(CARD, chat_template=TEMPLATE)
    build = counting(Options(max_num_seqs=2))
    with running(build, card=card, price_per_hour=2.5) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, server: Server) -> Iterator[Page]:
    """The playground of a new visitor; nothing may have complained at the end."""
    browser.resize(1280, 800)
    browser.open(f"{server.url}/version")  # of the same origin, and it keeps nothing
    browser.eval("localStorage.clear(), sessionStorage.clear()")
    browser.open("about:blank")
    browser.complaints.clear()
    browser.open(f"{server.url}/")
    browser.wait("document.querySelector('.status-text')?.textContent === 'Connected'")
    yield browser
    assert browser.complaints == []


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("Enter")


def answered(page: Page, number: int = 1) -> str:
    """Wait for an answer to end; returns its text."""
    page.wait(f"document.querySelectorAll('.message.assistant footer').length === {number}")
    return page.eval(
        "[...document.querySelectorAll('.message.assistant .content')].at(-1).innerText"
    )


def visit(page: Page, view: str) -> None:
    page.eval(f"location.hash = '#/{view}'")
    page.wait("document.querySelector('nav a[aria-current]').hash === location.hash")


# ---- without a browser -----------------------------------------------------------------------


def test_the_page_is_for_browsers_and_other_clients_still_get_404(server: Server) -> None:
    page = server.http.get("/", headers=HTML)
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["vary"] == "Accept"
    for accept in ("application/json", "*/*"):
        answer = server.http.get("/", headers={"Accept": accept})
        assert (answer.status_code, "nothing at /" in answer.json()["error"]["message"]) == (
            404,
            True,
        )


def test_files_have_a_strict_policy_and_are_sent_once(server: Server) -> None:
    for path in CONSOLE_PATHS:
        answer = server.http.get(path, headers=HTML)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = server.http.get(path, headers=HTML | {"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in answer.text


def test_nothing_but_the_files_is_served(server: Server) -> None:
    for name in ("", "none.js", "..%2froutes.py", "../routes.py", "%2e%2e/routes.py"):
        assert server.http.get(f"/console/{name}").status_code == 404, name


def test_files_need_no_key_but_data_does() -> None:
    with running(api_key=("client",), admin_key=("admin",), price_per_hour=1.0) as server:
        assert {server.http.get(path, headers=HTML).status_code for path in CONSOLE_PATHS} == {200}
        for name in ("info", "state", "requests"):
            assert server.http.get(f"/console/{name}").status_code == 401
        client = {"Authorization": "Bearer client"}
        admin = {"Authorization": "Bearer admin"}
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        server.http.post("/v1/chat/completions", json=chat, headers=admin)
        assert server.http.get("/console/requests", headers=client).json()["data"] == []
        (entry,) = server.http.get("/console/requests", headers=admin).json()["data"]
        assert (entry["state"], entry["output_tokens"]) == ("ended", 3)
        assert "usd" in server.http.get("/console/state", headers=admin).json()["cost"]
        assert "usd" not in server.http.get("/console/state", headers=client).json()["cost"]


def test_without_the_console() -> None:
    with running(console=False) as server:
        assert server.http.get("/", headers=HTML).status_code == 404
        assert server.http.get("/console/state").status_code == 404
        assert server.http.get("/console/main.js").status_code == 404


def test_state_and_requests(server: Server) -> None:
    answer = server.chat(max_tokens=5, request_id="listed").json()
    state = server.http.get("/console/state").json()
    assert state["health"] == {"status": "ok", "reason": ""}
    assert state["engines"][0]["stats"]["num_blocks"] == 4096
    counts = state["latencies"]["ttft"]["counts"]
    assert counts == sorted(counts)
    assert state["latencies"]["ttft"]["le"][-1] is None
    entry = server.http.get("/console/requests?limit=1").json()["data"][0]
    assert entry["id"] == answer["id"] == "chatcmpl-listed"
    assert (entry["path"], entry["model"]) == ("/v1/chat/completions", "counter")
    assert entry["output_tokens"] == 5
    assert 0 < entry["first_token"] <= entry["seconds"]["total"]
    for bad in ("0", "201", "x", "-1"):
        refused = server.http.get(f"/console/requests?limit={bad}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


def test_a_reused_id_is_listed_once_and_first(server: Server) -> None:
    for name in ("first", "second", "first"):
        server.chat(max_tokens=1, request_id=name)
    listed = server.http.get("/console/requests?limit=3").json()["data"]
    assert [each["id"] for each in listed][:2] == ["chatcmpl-first", "chatcmpl-second"]
    assert "chatcmpl-first" not in [each["id"] for each in listed][1:]


def test_figures_of_http_workers_are_added_up() -> None:
    with running(http_workers=2) as server:
        assert server.http.get("/", headers=HTML).status_code == 200
        for _ in range(6):  # on new connections, which the workers share
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            httpx.post(f"{server.url}/v1/chat/completions", json=body).raise_for_status()
        state = server.http.get("/console/state").json()
        assert {state["latencies"][name]["counts"][-1] for name in ("ttft", "tpot", "queue")} == {6}
        listed = server.http.get("/console/requests").json()["data"]
        assert [each["path"] for each in listed] == ["/v1/chat/completions"] * 6
        assert all(each["state"] == "ended" for each in listed)


def test_a_wheel_has_the_files(tmp_path: Path) -> None:
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs setuptools")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "windlass"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run([*command, "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    for folder in ("windlass/serve/console", "windlass/serve/docs"):
        shipped = {Path(name).name for name in packed if name.startswith(f"{folder}/")}
        assert shipped == {path.name for path in (ROOT / folder).iterdir()}


# ---- in a browser ----------------------------------------------------------------------------


@needs_browser
def test_an_answer_streams_with_its_figures(page: Page) -> None:
    ask(page, "SAY(# Windlass\n\nIt *lifts* an `anchor`.\n\n- one\n- two)YAS SLOW")
    page.wait("document.querySelector('.message.assistant.busy .content h3')")  # while it grows
    assert answered(page) == "Windlass\n\nIt lifts an anchor.\n\none\ntwo"
    assert (
        page.eval("document.querySelectorAll('.content em, .content code, .content li').length")
        == 4
    )
    stats = page.text(".message.assistant .stats")
    for part in ("49 tokens", "tok/s", "first token", "prompt tokens", "$"):
        assert part in stats


@needs_browser
def test_cached_and_draft_tokens_are_shown(page: Page) -> None:
    page.fill("#max_tokens", "8")
    ask(page, "DRAFT of a text that is longer than a block or two of sixteen tokens each")
    answered(page)
    page.click("button[aria-label='Regenerate']")
    page.wait("document.querySelector('.stats')?.innerText.includes('cached')")
    stats = page.text(".message.assistant .stats")
    assert "draft tokens accepted" in stats
    assert "reached max tokens" in stats


@needs_browser
def test_stop_and_regenerate_and_edit(page: Page, server: Server) -> None:
    ask(page, "SLOW and endless")
    page.wait("document.querySelector('.message.assistant .content')?.innerText.length > 3")
    page.press("Escape")
    text = answered(page)
    assert "stopped" in page.text(".stats")
    wait_until(lambda: server.metric("requests_in_flight") == 0)
    page.click("button[aria-label='Regenerate']")
    page.wait("document.querySelector('.message.assistant.busy .content')?.innerText.length > 3")
    page.click("button[aria-label='Stop']")
    assert answered(page)[:3] == text[:3]
    page.click("button[aria-label='Edit and send again']")
    page.fill("textarea.edit", "SAY(edited)YAS")
    page.press("Enter")
    page.wait("document.querySelector('.message.assistant .content')?.innerText === 'edited'")
    assert page.eval("document.querySelectorAll('.message').length") == 2


@needs_browser
def test_shift_enter_starts_a_line(page: Page) -> None:
    page.fill("#prompt", "one")
    page.press("Enter", shift=True)
    assert page.eval("document.querySelector('#prompt').value") == "one\n"
    assert page.eval("document.querySelectorAll('.message').length") == 0


@needs_browser
def test_options_reach_the_request_and_the_snippets(page: Page) -> None:
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.fill("#top_k", "7")
    page.fill("#stop", "x, END")
    ask(page, "It's SAY(ok)YAS")
    answered(page)
    page.eval("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    buttons = "[...document.querySelectorAll('.settings button')]"
    page.eval(f"{buttons}.find((each) => each.innerText === 'Copy as curl').click()")
    curl = page.wait("window.copied")
    assert "It'\\''s SAY" in curl
    body = json.loads(curl.split("-d '")[1].rstrip("'\n").replace("'\\''", "'"))
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["stop"]) == (0.5, 7, ["x", "END"])
    page.eval("window.copied = ''")
    page.eval(f"{buttons}.find((each) => each.innerText === 'Copy as Python').click()")
    program = page.wait("window.copied")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("ok", "")


@needs_browser
def test_the_schema_pane(page: Page, server: Server) -> None:
    before = server.metric("grammar_compilations_total")
    page.fill("#schema", "{")
    assert "not JSON" in page.eval("document.querySelector('#schema-problem').textContent")
    page.click("#schema-example")
    assert page.eval("document.querySelector('#schema-problem').textContent") == ""
    ask(page, 'SAY({"name": "a", "year": 1, "tags": []})YAS')
    answered(page)
    assert json.loads(page.text(".content pre")) == {"name": "a", "year": 1, "tags": []}
    assert server.metric("grammar_compilations_total") > before


@needs_browser
def test_the_tools_pane(page: Page) -> None:
    page.click("#tools-example")
    ask(page, f"SAY({CALL})YAS")
    page.wait("document.querySelector('.tool-call form')")
    assert '"city": "Paris"' in page.text(".tool-call pre")
    page.fill(".tool-call textarea", "SAY(It is warm.)YAS")
    page.eval("document.querySelector('.tool-call form').requestSubmit()")
    assert answered(page, 2) == "It is warm."


@needs_browser
def test_reasoning_is_folded(page: Page) -> None:
    ask(page, "SAY(<think>Let me see.</think>Yes.)YAS")
    assert answered(page) == "Yes."
    assert page.eval("document.querySelector('details.reasoning').open") is False
    assert page.eval("document.querySelector('details.reasoning div').textContent") == "Let me see."


@needs_browser
def test_model_output_stays_text(page: Page) -> None:
    page.eval("window.alert = () => { window.attacked = true; }")
    ask(
        page, f"SAY({HOSTILE}\n\n```html\n{HOSTILE}\n```\n\n| {HOSTILE} |\n|---|\n| {HOSTILE} |)YAS"
    )
    text = answered(page)
    assert text.count("<script>alert(2)</script>") == 4
    assert (
        page.eval("document.querySelectorAll('main img, main script, main svg[onload]').length")
        == 0
    )
    assert (
        page.eval("[...document.querySelectorAll('.content a')].map((a) => a.protocol)")
        == ["http:"] * 3
    )
    assert page.eval("window.attacked") is None
    # The policy refuses HTML even where a mistake would insert it.
    assert page.eval(
        "(() => { try { document.body.innerHTML = '<b>'; return false; } catch { return true; } })()"
    )
    page.complaints.clear()


_ALLOWED = (
    "A BLOCKQUOTE BR BUTTON CODE DEL DIV EM H3 H4 H5 H6 HR LI OL P PATH PRE SPAN STRONG SVG TABLE "
    "TBODY TD TH THEAD TR UL"
)
_RENDER = """(async () => {
  const { markdown } = await import('/console/markdown.js');
  const pieces = %s;
  let seed = 7;
  const next = (limit) => (seed = (seed * 48271) %% 2147483647) %% limit;
  const tags = new Set();
  for (let round = 0; round < 400; round++) {
    const text = Array.from({ length: 30 }, () => pieces[next(pieces.length)]).join('');
    const box = document.createElement('div');
    box.append(...markdown(text));
    for (const each of box.querySelectorAll('*')) {
      tags.add(each.tagName.toUpperCase());
      for (const { name, value } of each.attributes) {
        if (name.startsWith('on') || (name === 'href' && !/^(https?|mailto):/i.test(value))) throw Error(value);
      }
    }
  }
  const long = document.createElement('div');
  long.append(...markdown('[*_`~'.repeat(20000) + '\\n' + '[*_`~'.repeat(1500) + '\\n> > '.repeat(3000)));
  return [...tags];
})()"""


@needs_browser
def test_any_markdown_becomes_harmless_elements(page: Page) -> None:
    pieces = [
        "\n",
        "\n\n",
        " ",
        "a",
        "1. ",
        "- ",
        "    ",
        "# ",
        "> ",
        "|",
        "|-|",
        "\n|-|-|\n",
        "*",
        "**",
    ]
    pieces += ["_", "~~", "`", "```", "```js\n", "[", "](", ")", "javascript:", "http://a.b", "<b>"]
    pieces += [
        "<img src=x onerror=alert(1)>",
        "data:text/html,x",
        "\\",
        "&lt;",
        "---\n",
        "mailto:a@b",
    ]
    tags = page.eval(_RENDER % json.dumps(pieces))
    assert set(tags) <= set(_ALLOWED.split())
    assert {"TABLE", "LI", "CODE", "A", "BLOCKQUOTE"} <= set(tags)
    render = (
        "import('/console/markdown.js').then(({ markdown }) => { const box = document.createElement('div');"
        "box.append(...markdown(%s)); return [...box.querySelectorAll('*')].map((each) =>"
        "each.tagName.toLowerCase()).join(' '); })"
    )
    for text, elements in (
        ("2*3*4 a_b_c * d *", "p"),
        ("*a* **b** ~~c~~ `d`", "p em strong del code"),
        ("1. a\n   - b\n   - c\n2. d", "ol li ul li li li"),
        ("a\n- b", "p ul li"),
        ("> a\n> - b", "blockquote p ul li"),
        ("|a|b|\n|-|-|\n|c|d|", "div table thead tr th th tbody tr td td"),
        ("# a\n\n---", "h3 hr"),
        ("[a](https://b.c) ![d](https://e.f)", "p a a"),
    ):
        assert page.eval(render % json.dumps(text)) == elements, text


@needs_browser
def test_adapters_appear_without_a_reload(page: Page, server: Server) -> None:
    server.client.adapters.folders["sea"] = "/adapters/sea"
    try:
        page.wait("document.querySelector('#model option[value=sea]')")
        visit(page, "server")
        page.wait("document.querySelector('main').innerText.includes('/adapters/sea')")
    finally:
        del server.client.adapters.folders["sea"]


@needs_browser
def test_adapters_have_details(page: Page, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client = server.client
    report = client.memory

    async def memory() -> dict[int, Memory]:
        size = AdapterSize(rank=16, num_bytes=5 * 2**20)
        uses = (
            AdapterUse("ice", "disk", None, num_running=0, num_waiting=0, num_requests=0),
            AdapterUse("sea", "device", size, num_running=2, num_waiting=1, num_requests=40),
        )
        return {index: replace(each, adapters=uses) for index, each in (await report()).items()}

    monkeypatch.setattr(client, "memory", memory)
    monkeypatch.setattr(
        client.adapters, "folders", {"ice": "/adapters/ice", "sea": "/adapters/sea"}
    )
    visit(page, "server")
    page.wait("document.querySelector('table.plain')?.innerText.includes('device')")
    rows = page.eval(
        "[...document.querySelectorAll('table.plain tbody tr')].map("
        "(row) => [...row.cells].map((cell) => cell.innerText))"
    )
    assert rows == [
        ["sea\n/adapters/sea", "device", "16", "5.00 MiB", "2", "1", "40"],
        ["ice\n/adapters/ice", "disk", "–", "–", "0", "0", "0"],
    ]
    for width in (390, 900):
        page.resize(width, 844, is_phone=width == 390)
        assert page.eval("document.documentElement.scrollWidth") == width
        fits = "document.querySelector('main').scrollWidth <= document.querySelector('main').clientWidth"
        page.wait(fits)


@needs_browser
def test_an_error_is_shown_and_the_conversation_goes_on(page: Page) -> None:
    page.fill("#max_tokens", "999999")
    ask(page, "Hi")
    page.wait("document.querySelector('.message .problem')?.innerText.includes('999999')")
    page.complaints.clear()  # the browser logs the 400
    page.fill("#max_tokens", "2")
    page.click("button[aria-label='Regenerate']")
    assert len(answered(page)) == 2


@needs_browser
def test_charts_get_data(page: Page, server: Server) -> None:
    visit(page, "dashboard")
    for _ in range(3):
        server.chat(max_tokens=20, messages=[{"role": "user", "content": "SLOW DRAFT " * 20}])
    for title in ("Throughput", "Time to first token", "Time per output token", "Cost"):
        page.wait(f"document.querySelector('[aria-label=\"{title}\"] .plot .line')")
    page.wait(
        "document.querySelector('[aria-label=\"Draft acceptance\"] .chart-value').innerText.endsWith(' %')"
    )
    assert "%" in page.text("[aria-label='KV cache'] .chart-value")
    assert page.eval("document.querySelectorAll('.chart').length") == 9


@needs_browser
def test_charts_keep_their_history_over_a_reload(page: Page, server: Server) -> None:
    times = (
        "(JSON.parse(sessionStorage.getItem('windlass-charts'))?.samples ?? []).map((s) => s.time)"
    )
    count = "[...document.querySelectorAll('[aria-label=Requests] .line')].map((line) => line.getAttribute('d').split('L').length)[0]"
    visit(page, "dashboard")
    server.chat(max_tokens=20)
    page.wait(f"{count} >= 3")
    page.reload()
    page.wait("document.querySelector('.status-text')?.textContent === 'Connected'")
    kept = page.eval(times)
    assert len(kept) >= 3
    page.wait(f"{count} > {len(kept)}")
    assert page.eval(
        "document.querySelector('[aria-label=Throughput] .chart-value').innerText.endsWith('tok/s')"
    )
    # Another model's figures are not shown.
    page.eval(
        "addEventListener('pagehide', () => sessionStorage.setItem('windlass-charts', JSON.stringify({model: 'other', samples: [{time: 1}]})))"
    )
    page.reload()
    page.wait("document.querySelector('.status-text')?.textContent === 'Connected'")
    page.wait(f"{count} >= 2")
    assert page.eval(count) < len(kept)


@needs_browser
def test_the_timeline_of_a_running_and_an_ended_request(page: Page, server: Server) -> None:
    def chat(name: str, max_tokens: int) -> threading.Thread:
        body = {"messages": [{"role": "user", "content": "SLOW"}], "max_tokens": max_tokens}
        thread = threading.Thread(target=lambda: server.chat(**body, request_id=name))
        thread.start()
        return thread

    chats = [chat("long-0", 100), chat("long-1", 100)]
    wait_until(lambda: server.metric("num_requests_running") == 2)
    chats.append(chat("short", 10))  # waits for a slot
    visit(page, "requests")
    page.wait("document.querySelector('.state.running')")
    for each in chats:
        each.join()
    page.wait(
        "document.querySelector('a[href$=chatcmpl-short]')?.closest('tr').querySelector('.phases')"
    )
    page.click("a[href$=chatcmpl-short]")
    page.wait("document.querySelector('dialog[open] .timeline .bar')")
    lanes = page.eval("[...document.querySelectorAll('.timeline .lane')].map((t) => t.textContent)")
    assert lanes == ["HTTP", "Queue", "Prefill", "Decode"]
    assert "10 tokens" in page.eval("document.querySelector('.timeline').textContent")
    assert "one of 2 running slots" in page.text(".sentence")
    assert "--max-num-seqs" in page.text(".setting")
    page.press("Escape")
    page.wait("!document.querySelector('dialog[open]') && location.hash === '#/requests'")


@needs_browser
def test_the_server_page(page: Page) -> None:
    visit(page, "server")
    page.wait("document.querySelector('.stack')")
    text = page.text("main")
    for part in ("counter", "Prefix cache", "Continuous batching", "KV blocks of 16 tokens"):
        assert part in text
    assert "No adapters" in text
    assert "temperature 1" in text  # a choice


@needs_browser
def test_a_phone_has_no_horizontal_scroll(page: Page) -> None:
    page.resize(375, 720, is_phone=True)
    ask(
        page,
        f"SAY({'word ' * 30} {'x' * 300}\n\n```\n{'y' * 300}\n```\n\n|a|b|\n|-|-|\n|{'z' * 200}|1|)YAS",
    )
    answered(page)
    for view in ("playground", "dashboard", "requests", "server"):
        visit(page, view)
        page.wait("document.querySelector('main').innerText.length > 20")
        assert page.eval("document.documentElement.scrollWidth") <= 375, view
        assert page.eval("document.querySelector('main').scrollWidth") == 375, view
        assert page.eval("document.querySelector('nav').offsetWidth") == 375, view
    visit(page, "requests")
    page.wait("document.querySelector('.list tbody tr .phases')")
    assert page.eval(_CUT_OFF % ".list th, .list td:not(:first-child), .tile strong") == []
    visit(page, "playground")
    page.click("button[aria-label='Options']")
    page.wait("document.querySelector('.settings').getBoundingClientRect().left >= 0")
    page.press("Escape")
    page.wait("!document.querySelector('.settings').classList.contains('open')")


@needs_browser
@pytest.mark.parametrize("width", [1000, 1280])
def test_the_list_of_requests_and_the_tiles_fit(page: Page, server: Server, width: int) -> None:
    page.resize(width, 800)
    for name in ("a-prompt", "a-prompt-again"):
        text = "a prompt that is longer than a block of sixteen tokens" * 3
        server.chat(max_tokens=20, messages=[{"role": "user", "content": text}], request_id=name)
    visit(page, "requests")
    page.wait("document.querySelector('.list tbody tr .phases')")
    assert page.eval("document.querySelector('.list').getBoundingClientRect().right") <= width
    parts = "[...document.querySelector('.phases').children].map((each) => parseFloat(each.style.width))"
    assert page.eval(f"{parts}.reduce((total, each) => total + each)") == pytest.approx(
        100, abs=0.1
    )
    visit(page, "server")
    page.wait("document.querySelectorAll('.tile').length === 6")
    assert page.eval(_CUT_OFF % ".tile strong") == []
    tops = page.eval("[...document.querySelectorAll('.tile')].map((each) => each.offsetTop)")
    assert tops[:3] == tops[:1] * 3
    assert tops[3:] == tops[3:4] * 3


# Texts that are longer than their elements.
_CUT_OFF = (
    "[...document.querySelectorAll('%s')].filter((each) => each.scrollWidth > each.clientWidth)"
    ".map((each) => each.innerText)"
)


@needs_browser
def test_the_theme_follows_the_system_and_the_switch(page: Page) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    page.prefer("dark")
    dark = page.eval(colour)
    page.prefer("light")
    light = page.eval(colour)
    assert dark != light
    page.click("#theme")  # light
    page.click("#theme")  # dark
    assert page.eval(colour) == dark
    page.reload()
    page.wait("document.querySelector('#theme')?.title === 'Theme: dark'")
    assert page.eval(colour) == dark


@needs_browser
def test_every_control_has_a_name(page: Page) -> None:
    ask(page, "SAY(Hi)YAS")
    answered(page)
    for view in ("playground", "dashboard", "requests", "server"):
        visit(page, view)
        nameless = page.eval(
            "[...document.querySelectorAll('button, a, input, select, textarea')].filter((each) =>"
            "!each.textContent.trim() && !each.ariaLabel && !each.labels?.length)"
            ".map((each) => each.outerHTML)"
        )
        assert nameless == [], view


@needs_browser
def test_a_sleeping_server_says_so(browser: Page, tmp_path: Path) -> None:
    build = counting(Options(sleep_file=str(tmp_path / "asleep")))
    with running(build, admin_key=("admin",)) as server:
        browser.open(f"{server.url}/#/server")
        browser.wait("document.querySelector('.status-text')?.textContent === 'Connected'")
        admin = {"Authorization": "Bearer admin"}
        server.http.post("/admin/sleep", headers=admin).raise_for_status()
        browser.wait("document.querySelector('.banner.warn')?.innerText.includes('/admin/wake')")
        assert browser.text(".status-text") == "Asleep"
        server.http.post("/admin/wake", headers=admin).raise_for_status()
        browser.wait("document.querySelector('.banner').hidden")


@needs_browser
def test_a_wrong_key_then_the_right_one_then_no_server(browser: Page) -> None:
    with running(api_key=("right",)) as server:
        browser.open(f"{server.url}/")
        browser.fill("dialog.prompt input", "wrong")
        browser.press("Enter")
        browser.wait("document.querySelector('.prompt .problem').innerText.includes('not know')")
        browser.press("Escape")
        browser.press("Escape")
        browser.wait("document.querySelector('dialog.prompt').open")
        browser.fill("dialog.prompt input", "right")
        browser.press("Enter")
        browser.wait("document.querySelector('.status-text').textContent === 'Connected'")
        assert browser.eval("document.querySelector('dialog.prompt')") is None
        ask(browser, "SAY(open)YAS")
        assert answered(browser) == "open"
        assert browser.eval("Object.values(sessionStorage)").count("right") == 1
        assert "right" not in browser.eval("Object.values(localStorage).join()")
    browser.wait("document.querySelector('.banner.bad')?.innerText.includes('does not answer')")
    assert browser.text(".status-text") == "Disconnected"
    ask(browser, "Hi")
    browser.wait(
        "document.querySelector('.message .problem')?.innerText.includes('does not answer')"
    )
