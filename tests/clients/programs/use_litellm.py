"""litellm: as an OpenAI, an Anthropic and an Ollama server; calls, streams, classes."""

import json

import litellm
from common import CITIES, SAYS, TINY, Visit, call, say

litellm.telemetry = False
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": list(CITIES)}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def ask(model: str, base: str, text: str, **options: object) -> object:
    messages = [{"role": "user", "content": text}]
    key = {} if model.startswith("ollama") else {"api_key": "none"}
    return litellm.completion(
        model=model, api_base=base, messages=messages, max_tokens=400, **key, **options
    )


for model, base in (
    ("openai/counter", f"{SAYS}/v1"),
    ("hosted_vllm/counter", f"{SAYS}/v1"),
    ("anthropic/counter", SAYS),
    ("ollama_chat/counter", SAYS),
):
    print(model)
    assert ask(model, base, say("Hello.")).choices[0].message.content == "Hello."
    chunks = ask(model, base, say("Hello."), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello."
    answer = ask(model, base, say(call("get_weather", city="Rome")), tools=[TOOL])
    (made,) = answer.choices[0].message.tool_calls
    assert made.function.name == "get_weather"
    assert json.loads(made.function.arguments) == {"city": "Rome"}

forced = ask("openai/tiny", f"{TINY}/v1", "Weather?", tools=[TOOL], tool_choice="required")
(made, *_) = forced.choices[0].message.tool_calls
assert json.loads(made.function.arguments)["city"] in CITIES
parsed = ask("openai/tiny", f"{TINY}/v1", "Visit Rome", response_format=Visit, temperature=0)
Visit.model_validate_json(parsed.choices[0].message.content)
