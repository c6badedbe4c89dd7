"""Chat templates: probed at start, sandboxed, refusals carry the template's message."""

from __future__ import annotations

import pytest

from windlass.errors import ConfigError, RequestError
from windlass.text.chat_template import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
USER = {"role": "user", "content": "x"}


def test_a_template_that_does_not_parse_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match=r"line 2: .*--chat-template"):
        ChatTemplate("{% for m in messages %}\n{% endif %}", {})


def test_a_template_that_cannot_render_a_user_message_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match="line 2: no users here"):
        ChatTemplate("\n{{ raise_exception('no users here') }}", {})


def test_a_template_that_refuses_system_messages_warns_and_raises_later() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    )
    template = ChatTemplate(source, {})
    assert template.warnings == ("the chat template refuses system messages: line 1: no system",)
    with pytest.raises(RequestError, match="line 1: no system"):
        template.render([{"role": "system", "content": "a"}, USER])


def test_a_template_that_drops_system_messages_warns() -> None:
    source = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(source, {}).warnings == ("the chat template drops system messages",)


def test_filters_functions_and_tags_that_templates_use() -> None:
    source = (
        "{{ bos_token }}{{ {'a': '<é>'} | tojson }}{% for m in messages %}{% if loop.index > 1 %}"
        "{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y')[:1] }}{% if think %}T{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"}, {"think": True})
    assert template.render([USER, USER]) == '<s>{"a": "<é>"}x2T'
    assert template.render([USER], {"think": False}) == '<s>{"a": "<é>"}x2'


def test_the_role_developer_becomes_system_unless_the_template_has_it() -> None:
    messages = [{"role": "developer", "content": "a"}, USER]
    assert ChatTemplate(PLAIN, {}).render(messages) == "system:a\nuser:x\n"
    assert ChatTemplate(PLAIN + "{# developer #}", {}).render(messages) == "developer:a\nuser:x\n"


def test_python_errors_in_a_template_are_request_errors() -> None:
    template = ChatTemplate(PLAIN + "{{ 1 / (messages | length - 4) }}", {})
    with pytest.raises(RequestError, match=r"line 2: .*zero"):
        template.render([USER] * 4)


def test_a_refusal_does_not_repeat_the_conversation() -> None:
    template = ChatTemplate(
        "{% if messages | length > 3 %}{{ raise_exception(messages[0].content) }}{% endif %}x", {}
    )
    with pytest.raises(RequestError) as caught:
        template.render([{"role": "user", "content": "y" * 100_000}] * 4)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_blocks_attacks(attack: str) -> None:
    guarded = "{% if messages | length == 5 %}" + attack + "{% endif %}"
    with pytest.raises(RequestError):
        ChatTemplate(guarded, {}).render([USER] * 5)


def test_continue_final_message() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", {})
    answer = {"role": "assistant", "content": " so far "}
    assert template.render([USER, answer], continue_final=True) == "[x][so far"
    with pytest.raises(RequestError, match="exclude"):
        template.render([USER, answer], add_generation_prompt=True, continue_final=True)
    upper = ChatTemplate("{% for m in messages %}{{ m.content | upper }}{% endfor %}", {})
    with pytest.raises(RequestError, match="unchanged"):
        upper.render([USER, answer], continue_final=True)
