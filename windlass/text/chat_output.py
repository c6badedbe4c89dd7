"""Decides how the output of one chat is constrained and read: reasoning, then tool calls or the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windlass.core.reasoning import ReasoningPhase, TokenIds
from windlass.core.sampling import SamplingParams
from windlass.core.structured import StructuredOutputs
from windlass.core.tokenizer import Tokenizer
from windlass.errors import RequestError
from windlass.text.parsing.dialect import Dialect
from windlass.text.parsing.output import ToolSet
from windlass.text.parsing.parser import ParsingOptions
from windlass.text.parsing.reasoning import ReasoningTags
from windlass.text.parsing.registry import DIALECTS, OutputFormat
from windlass.text.tool_grammar import optional_calls, required_calls, required_dialect_calls

# Text beside which a marker must keep its tokens.
_AROUND = ("x", ".", " ", "\n", "\n\n", "{")


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """How the output of one chat is sampled and parsed."""

    sampling: SamplingParams
    parsing: ParsingOptions


def chat_output(
    output_format: OutputFormat,
    tools: ToolSet | None,
    sampling: SamplingParams,
    *,
    prompt: str,
    tokenizer: Tokenizer,
) -> ChatOutput:
    """Constrain the output of a chat. The grammar of an answer or a call begins behind the reasoning.

    `prompt` is the rendered chat.
    """
    structured, dialect = sampling.structured_outputs, output_format.dialect
    may_have_text = structured is None and not (tools is not None and tools.forced)
    if tools is not None and tools.forced:
        # As in OpenAI's API, response_format describes text, and the output is a call.
        if structured is not None and structured.source != "response_format":
            raise RequestError(
                f"{structured.source} and a tool_choice that requires a call both set the format of "
                "the output. Send one.",
                structured.source,
            )
        if dialect.reasoning is not None and sampling.thinking_token_budget is None:
            structured = required_dialect_calls(tools, dialect)
        else:
            structured, dialect = required_calls(tools), DIALECTS["json"]
    elif tools is not None and (structured is not None or tools.strict or tools.only_these):
        tools = replace(tools, beside_answer=structured is not None)
        structured = optional_calls(tools, dialect, structured)
    tags = output_format.reasoning or dialect.reasoning
    is_open = tags is not None and tags.opened_by(prompt)
    phase = None
    is_closed = tags is not None and tags.closed_by(prompt)
    if tags is not None and _is_followed(sampling, structured, dialect, is_closed=is_closed):
        phase = _phase(
            tags,
            tokenizer,
            budget=sampling.thinking_token_budget,
            is_open=is_open,
            structured=structured,
            may_have_text=may_have_text,
        )
    sampling = replace(
        sampling, structured_outputs=structured, reasoning=phase, thinking_token_budget=None
    )
    has_reasoning = phase is not None or may_have_text
    parsing = ParsingOptions(
        dialect=_reader(dialect, tools, has_reasoning),
        tools=tools,
        reasoning=output_format.reasoning if has_reasoning else None,
        in_reasoning=has_reasoning and is_open,
    )
    return ChatOutput(sampling, parsing)


def _reader(dialect: Dialect, tools: ToolSet | None, has_reasoning: bool) -> Dialect | None:
    """The dialect, if there is anything for it to find."""
    finds_reasoning = has_reasoning and dialect.reasoning is not None
    return dialect if tools is not None or finds_reasoning else None


def _is_followed(
    sampling: SamplingParams,
    structured: StructuredOutputs | None,
    dialect: Dialect,
    *,
    is_closed: bool,
) -> bool:
    """Whether the end of the reasoning has an effect: a budget ends it, or a grammar begins behind it."""
    has_budget = sampling.thinking_token_budget is not None
    if structured is None or structured.calls is None or dialect.reasoning is None:
        return has_budget or (structured is not None and not is_closed)
    if has_budget:
        raise RequestError(
            f"with {dialect.name} calls, thinking_token_budget cannot be combined with strict tools, nor "
            "with tools and a format of the answer. Leave one of them out, or require a call.",
            "thinking_token_budget",
        )
    return False  # the grammar of the calls has the reasoning as well


def _phase(
    tags: ReasoningTags,
    tokenizer: Tokenizer,
    *,
    budget: int | None,
    is_open: bool,
    structured: StructuredOutputs | None,
    may_have_text: bool,
) -> ReasoningPhase | None:
    """The reasoning in token ids; None: it cannot be followed, and has no budget.

    `may_have_text`: the tags may be text of the output.
    """
    start = () if is_open else _ids(tokenizer, tags.start)
    # After the first of several tokens that a grammar allows, too, the answer may have begun.
    is_clear = structured is None or len(start) < 2
    if not is_clear and not may_have_text:
        return None  # the answer begins at once
    markers = [tags.end] if is_open else [tags.start, tags.end]
    if not tags.special_tokens:
        is_clear = is_clear and all(_is_isolated(tokenizer, each) for each in markers)
    if not is_clear and budget is None:
        return None
    if not is_clear:
        raise RequestError(
            f"thinking_token_budget needs reasoning tags that have tokens of their own; {tags.start!r} "
            f"and {tags.end!r} of this model have not.",
            "thinking_token_budget",
        )
    ends = (tags.end, *tags.answer_ends, *(tags.other_ends if structured is None else ()))
    return ReasoningPhase(
        start=start,
        ends=tuple(_ids(tokenizer, end) for end in ends),
        closing=_ids(tokenizer, tags.closing or tags.end),
        max_tokens=budget,
    )


def _ids(tokenizer: Tokenizer, text: str) -> TokenIds:
    return tuple(tokenizer.encode(text, add_special=False))


def _is_isolated(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a marker has the same tokens beside any text."""
    return all(
        _ids(tokenizer, around + text + around)
        == _ids(tokenizer, around) + _ids(tokenizer, text) + _ids(tokenizer, around)
        for around in _AROUND
    )
