"""langchain-openai: chats, streams, tools that the model may and must call, structured output, Responses."""

import json

from common import CITIES, SAYS, TINY, Visit, call, get_weather, say
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

OPTIONS = {"api_key": "none", "temperature": 0, "max_tokens": 400, "max_retries": 0}
tiny = ChatOpenAI(base_url=f"{TINY}/v1", model="tiny", **OPTIONS)
says = ChatOpenAI(base_url=f"{SAYS}/v1", model="counter", **OPTIONS)
weather = tool(get_weather)

assert says.invoke(say("Hello.")).content == "Hello."
assert "".join(chunk.content for chunk in says.stream(say("Hello."))) == "Hello."

question = HumanMessage(say("Let me see. " + call("get_weather", city="Rome")))
agent = says.bind_tools([weather])
answer = agent.invoke([question])
assert isinstance(answer, AIMessage)
assert answer.content == "Let me see."
(made,) = answer.tool_calls
assert (made["name"], made["args"]) == ("get_weather", {"city": "Rome"})
total = None
for chunk in agent.stream([question]):
    total = chunk if total is None else total + chunk
assert total.tool_calls[0]["args"] == {"city": "Rome"}
result = ToolMessage(weather.invoke(made["args"]), tool_call_id=made["id"])
assert agent.invoke([question, answer, result]).content == "It is sunny in Rome."

forced = tiny.bind_tools([weather], tool_choice="any", strict=True)
assert forced.invoke("Weather?").tool_calls[0]["args"]["city"] in CITIES
for method in ("function_calling", "json_schema"):
    structured = tiny.with_structured_output(Visit, method=method)
    assert isinstance(structured.invoke("Visit Rome for 3 days"), Visit)

responses = ChatOpenAI(base_url=f"{SAYS}/v1", model="counter", use_responses_api=True, **OPTIONS)
assert responses.invoke(say("Hello.")).text == "Hello."
assert "".join(chunk.text for chunk in responses.stream(say("Hello."))) == "Hello."
answer = responses.bind_tools([weather]).invoke([question])
assert [(made["name"], made["args"]) for made in answer.tool_calls] == [
    ("get_weather", {"city": "Rome"})
]
result = ToolMessage(weather.invoke({"city": "Rome"}), tool_call_id=answer.tool_calls[0]["id"])
assert responses.invoke([question, answer, result]).text == "It is sunny in Rome."


# A tool and the schema of the result are in the same request: the model calls, and then answers.
@tool
def length_of(city: str) -> str:
    """How long a visit takes."""
    return say(json.dumps({"city": city, "days": 3}))


for model in (says, responses):
    planner = create_agent(model, tools=[length_of], response_format=ProviderStrategy(Visit))
    state = planner.invoke({"messages": [HumanMessage(say(call("length_of", city="Rome")))]})
    assert state["structured_response"] == Visit(city="Rome", days=3), state
