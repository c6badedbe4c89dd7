"""litellm: as an OpenAI, an Anthropic and an Ollama server; calls, streams, classes, Responses, batches."""

import io
import json
import time

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
    chunks = ask(model, base, say(call("get_weather", city="Rome")), tools=[TOOL], stream=True)
    (made,) = litellm.stream_chunk_builder(list(chunks)).choices[0].message.tool_calls
    assert made.function.name == "get_weather"
    assert json.loads(made.function.arguments) == {"city": "Rome"}

forced = ask("openai/tiny", f"{TINY}/v1", "Weather?", tools=[TOOL], tool_choice="required")
(made, *_) = forced.choices[0].message.tool_calls
assert json.loads(made.function.arguments)["city"] in CITIES
parsed = ask("openai/tiny", f"{TINY}/v1", "Visit Rome", response_format=Visit, temperature=0)
Visit.model_validate_json(parsed.choices[0].message.content)

SERVER = {"api_base": f"{SAYS}/v1", "api_key": "none"}
first = litellm.responses(model="openai/counter", input=say("Hello."), **SERVER)
assert first.output[0].content[0].text == "Hello."
events = litellm.responses(model="openai/counter", input=say("Hello."), stream=True, **SERVER)
assert [event.delta for event in events if event.type == "response.output_text.delta"]

body = {"model": "counter", "messages": [{"role": "user", "content": say("Hello.")}]}
line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
SERVER["custom_llm_provider"] = "openai"
requests = ("requests.jsonl", io.BytesIO(json.dumps(line).encode()))
file = litellm.create_file(file=requests, purpose="batch", **SERVER)
batch = litellm.create_batch(
    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **SERVER
)
while batch.status not in ("completed", "failed"):
    time.sleep(0.1)
    batch = litellm.retrieve_batch(batch_id=batch.id, **SERVER)
result = json.loads(litellm.file_content(file_id=batch.output_file_id, **SERVER).content)
assert result["response"]["body"]["choices"][0]["message"]["content"] == "Hello."
