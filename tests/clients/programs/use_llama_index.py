"""llama-index: chats, streams, function calling, and structured prediction."""

from common import CITIES, SAYS, TINY, Visit, call, get_weather, say
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

OPTIONS = {
    "api_key": "none",
    "is_chat_model": True,
    "is_function_calling_model": True,
    "context_window": 2048,
    "max_tokens": 400,
    "max_retries": 0,
    "temperature": 0.0,
}
tiny = OpenAILike(model="tiny", api_base=f"{TINY}/v1", **OPTIONS)
says = OpenAILike(model="counter", api_base=f"{SAYS}/v1", **OPTIONS)
weather = FunctionTool.from_defaults(get_weather)

hello = [ChatMessage(role="user", content=say("Hello."))]
assert says.chat(hello).message.content == "Hello."
assert "".join(part.delta or "" for part in says.stream_chat(hello)) == "Hello."

free = says.chat_with_tools([weather], say(call("get_weather", city="Rome")))
(made,) = says.get_tool_calls_from_response(free)
assert (made.tool_name, made.tool_kwargs) == ("get_weather", {"city": "Rome"})
*_, last = says.stream_chat_with_tools([weather], say(call("get_weather", city="Rome")))
(made,) = says.get_tool_calls_from_response(last)
assert (made.tool_name, made.tool_kwargs) == ("get_weather", {"city": "Rome"})
forced = tiny.chat_with_tools([weather], "Weather?", tool_required=True)
made, *_ = tiny.get_tool_calls_from_response(forced)
assert made.tool_kwargs["city"] in CITIES
assert isinstance(tiny.as_structured_llm(Visit).chat(hello).raw, Visit)
