"""What the programs share: the server's address, a class, a tool, and texts that a model is asked to say."""

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TINY, SAYS = sys.argv[1:3]
CITIES = ("Rome", "Paris")


class Visit(BaseModel):
    """A visit to a city. A random model would write more and more properties if it could."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Paris"]
    days: int = Field(ge=1, le=9)


def get_weather(city: Literal["Rome", "Paris"]) -> str:
    """The weather of a city."""
    return say(f"It is sunny in {city}.")


def say(text: str) -> str:
    """Ask the model to say a text."""
    return f"SAY({text})YAS"


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
