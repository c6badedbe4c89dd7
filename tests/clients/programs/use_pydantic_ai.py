"""pydantic-ai: agents with a tool and a structured result, by tools and by a schema, over two APIs."""

import json

from common import SAYS, TINY, Visit, call, get_weather, say
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"max_tokens": 400, "temperature": 0.0}
tiny = OpenAIProvider(base_url=f"{TINY}/v1", api_key="none")
says = OpenAIProvider(base_url=f"{SAYS}/v1", api_key="none")

for kind in (OpenAIChatModel, OpenAIResponsesModel):
    print(kind.__name__)
    for output in (Visit, NativeOutput(Visit)):
        agent = Agent(kind("tiny", provider=tiny), output_type=output, model_settings=SETTINGS)
        assert isinstance(agent.run_sync("Visit Rome for 3 days").output, Visit)
    model = kind("counter", provider=says)
    plain = Agent(model, tools=[get_weather], model_settings=SETTINGS)
    result = plain.run_sync(say(call("get_weather", city="Rome")))
    assert result.output == "It is sunny in Rome."
    with plain.run_stream_sync(say(call("get_weather", city="Rome"))) as streamed:
        *_, last = streamed.stream_text()
    assert last == "It is sunny in Rome."

# The tool's result asks for the structured result.
agent = Agent(OpenAIChatModel("counter", provider=says), model_settings=SETTINGS)
planner = Agent(
    OpenAIChatModel("counter", provider=says), output_type=[Visit, str], model_settings=SETTINGS
)


@planner.tool_plain
def days_in(city: str) -> str:
    """How long a visit takes."""
    return say(call("final_result", city=city, days=3))


visit = planner.run_sync(say(call("days_in", city="Rome"))).output
assert visit == Visit(city="Rome", days=3), visit

# A tool and the schema of the result are in the same request: the model calls, and then answers.
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    native = Agent(
        kind("counter", provider=says), output_type=NativeOutput(Visit), model_settings=SETTINGS
    )

    @native.tool_plain
    def length_of(city: str) -> str:
        """How long a visit takes."""
        return say(json.dumps({"city": city, "days": 3}))

    visit = native.run_sync(say(call("length_of", city="Rome"))).output
    assert visit == Visit(city="Rome", days=3), visit
