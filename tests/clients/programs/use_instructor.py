"""instructor: classes by tools, by JSON and by a schema; partial objects while they stream."""

import instructor
from common import TINY, Visit
from openai import OpenAI

OPTIONS = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Visit Rome for 3 days"}],
    "max_tokens": 400,
    "temperature": 0,
    "max_retries": 0,
}
for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    openai = OpenAI(base_url=f"{TINY}/v1", api_key="none")
    client = instructor.from_openai(openai, mode=getattr(instructor.Mode, mode))
    assert isinstance(client.chat.completions.create(response_model=Visit, **OPTIONS), Visit)
    *_, last = client.chat.completions.create_partial(response_model=Visit, **OPTIONS)
    Visit.model_validate(last.model_dump())
    print(mode)

openai = OpenAI(base_url=f"{TINY}/v1", api_key="none")
client = instructor.from_openai(openai, mode=instructor.Mode.RESPONSES_TOOLS)
made = client.responses.create(
    response_model=Visit,
    model="tiny",
    input="Visit Rome for 3 days",
    max_output_tokens=400,
    temperature=0,
    max_retries=0,
)
assert isinstance(made, Visit)
