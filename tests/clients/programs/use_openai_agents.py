"""openai-agents: a tool and a structured result in every turn, over chat completions and the Responses API."""

import json

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import SAYS, TINY, Visit, call, say
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)
SETTINGS = ModelSettings(temperature=0.0, max_tokens=400)
tiny = AsyncOpenAI(base_url=f"{TINY}/v1", api_key="none", max_retries=0)
says = AsyncOpenAI(base_url=f"{SAYS}/v1", api_key="none", max_retries=0)


@function_tool
def length_of(city: str) -> str:
    """How long a visit takes."""
    return say(json.dumps({"city": city, "days": 3}))


for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    print(kind.__name__)
    planner = Agent(
        name="planner",
        model=kind("counter", says),
        model_settings=SETTINGS,
        output_type=Visit,
        tools=[length_of],
    )
    result = Runner.run_sync(planner, say(call("length_of", city="Rome")))
    assert result.final_output == Visit(city="Rome", days=3), result.final_output
    random = Agent(
        name="random", model=kind("tiny", tiny), model_settings=SETTINGS, output_type=Visit
    )
    assert isinstance(Runner.run_sync(random, "Visit Rome for 3 days").final_output, Visit)
