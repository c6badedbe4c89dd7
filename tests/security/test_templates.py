"""Templates that come with a request, or with a model, cannot leave their process or its limits."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator

import psutil
import pytest

from windlass.errors import CapacityError, ConfigError, EngineError, RequestError
from windlass.text import template_process
from windlass.text.template_process import TemplateProcess
from windlass.text.template_worker import RenderJob, TemplateSource

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"

# Reaches of a template for Python's objects; each renders nothing of them, or is refused.
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|first }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ namespace.__init__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends '/etc/passwd' %}",
]
REFUSED = {
    "a range": "{{ range(10**9)|list|length }}",
    "a string": "{{ ('x' * 10**10)|length }}",
    "a padded string": "{{ messages[0].content.center(10**10) }}",
    "a list": "{{ ([messages] * 10**10)|length }}",
    "recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "changing the messages": "{{ messages.append(1) }}",
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "nested blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "a constant": "{{ (2**100000)|string|length }}",
    "a long sum": "{{ " + "+".join("1" * 20000) + " }}",
    "a long tag": "{% " + "x" * 10**6 + " %}",
    "a long error": "{{ raise_exception('x' * 10**6) }}",
}


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    started = TemplateProcess(TemplateSource(PLAIN))
    yield started
    started.close()


def render(process: TemplateProcess, template: str | None, max_chars: int = 1000) -> str:
    job = RenderJob(
        messages=[{"role": "user", "content": "Hi"}], max_chars=max_chars, template=template
    )
    return asyncio.run(process.render(job))


@pytest.mark.parametrize("template", ESCAPES)
def test_pythons_objects_cannot_be_reached(process: TemplateProcess, template: str) -> None:
    try:
        text = render(process, template + PLAIN, max_chars=10**6)
    except RequestError:
        return
    leaks = ("<class", "<function", "<module", "<method", "built-in", "root:", "Context")
    assert not any(leak in text for leak in leaks), text


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_beyond_a_limit_is_the_clients_error(
    process: TemplateProcess, name: str
) -> None:
    with pytest.raises(RequestError) as caught:
        render(process, REFUSED[name] + PLAIN)
    assert len(str(caught.value)) < 2000
    assert render(process, None) == "Hi"


def test_the_output_is_limited_before_it_is_sent(process: TemplateProcess) -> None:
    with pytest.raises(CapacityError, match=r"10,000,000 characters.*at most 1,000"):
        render(process, "{{ 'x' * 10**7 }}{% if 0 %}" + PLAIN + "{% endif %}")


def test_an_endless_template_of_a_request_is_stopped(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "RENDER_TIMEOUT_S", 1.0)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="was stopped"):
        render(process, loop + PLAIN)
    monkeypatch.setattr(template_process, "RENDER_TIMEOUT_S", 30.0)
    assert render(process, None) == "Hi"


@pytest.mark.parametrize("name", ["nested brackets", "a constant"])
def test_a_models_template_that_cannot_be_compiled_is_named_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be compiled"):
        TemplateProcess(TemplateSource(REFUSED[name] + PLAIN))


def test_the_process_has_limits(process: TemplateProcess) -> None:
    render(process, None)
    (child,) = multiprocessing.active_children()
    found = psutil.Process(child.pid)
    assert found.rlimit(psutil.RLIMIT_AS)[1] == 2**30
    assert found.rlimit(psutil.RLIMIT_NOFILE)[1] == 64
    for limit in (psutil.RLIMIT_CORE, psutil.RLIMIT_FSIZE):  # no core files, no files at all
        assert found.rlimit(limit) == (0, 0)
    assert found.net_connections("inet") == []


def test_a_process_that_a_template_ended_is_not_the_servers_error(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_timeout_s: float) -> None:
        raise EOFError

    monkeypatch.setattr(process._process, "receive", ended)
    with pytest.raises(RequestError, match="while it used this template"):
        render(process, PLAIN)
    assert render(process, None) == "Hi"
    monkeypatch.setattr(process._process, "receive", ended)
    with pytest.raises(EngineError, match="Send the request again"):
        render(process, None)
