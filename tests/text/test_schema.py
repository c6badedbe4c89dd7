"""JSON schemas as clients write them: what a grammar can enforce is enforced, the rest is named."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import pathlib
import uuid
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import UUID4, AnyUrl, BaseModel, Field, Json, SecretStr

from windlass.core.structured import StructuredOutputs
from windlass.errors import RequestError
from windlass.models.dummy import ByteTokenizer
from windlass.text.grammar.schema import adapt
from windlass.text.grammar.translate import to_llguidance
from windlass.text.grammar.vocabulary import Vocabulary, make_tokenizer

llguidance = pytest.importorskip("llguidance")

BYTES = ByteTokenizer(300, (256,))
TOKENIZER = make_tokenizer(Vocabulary.of(BYTES, 300), lambda text: BYTES.encode(text, False))
NUMBER = {"type": "integer"}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]


class Everything(BaseModel):
    path: pathlib.Path
    secret: SecretStr
    raw: bytes
    tags: set[str]
    ids: frozenset[int]
    day: datetime.date
    moment: datetime.datetime
    time: datetime.time
    span: datetime.timedelta
    amount: decimal.Decimal
    price: Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)]
    key: uuid.UUID
    random: UUID4
    colour: Colour
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    children: list[Everything] = []
    pair: tuple[int, str]
    by_name: dict[Literal["x", "y"], int]
    by_colour: dict[Colour, int]
    by_pattern: dict[Annotated[str, Field(pattern="^a+$")], int]
    url: AnyUrl
    encoded: Json[int]


VALUE = {
    "path": "/tmp/a",
    "secret": "hush",
    "raw": "bytes",
    "tags": ["a", "b"],
    "ids": [1],
    "day": "2024-02-29",
    "moment": "2024-02-29T12:00:00Z",
    "time": "12:00:00Z",
    "span": "P3D",
    "amount": 1.5,
    "price": "1.25",
    "key": "12345678-1234-4234-8234-123456789012",
    "random": "12345678-1234-4234-8234-123456789012",
    "colour": "red",
    "pet": {"kind": "cat", "lives": 7},
    "children": [],
    "pair": [1, "b"],
    "by_name": {"x": 1},
    "by_colour": {"blue": 1},
    "by_pattern": {"aa": 1},
    "url": "https://example.org/",
    "encoded": "3",
}


def accepts(schema: dict[str, Any], value: object, **options: Any) -> bool:
    """Whether a schema's grammar accepts a value."""
    grammar = to_llguidance(StructuredOutputs(json=schema), **options)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = json.dumps(value).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_all_types_of_pydantic(mode: Any) -> None:
    schema = Everything.model_json_schema(mode=mode)
    assert set(adapt(schema).unsupported) <= {
        "uniqueItems at #/$defs/Everything/properties/tags",
        "uniqueItems at #/$defs/Everything/properties/ids",
        "pattern with look-around at #/$defs/Everything/properties/amount",
        "pattern with look-around at #/$defs/Everything/properties/amount/anyOf/1",
        "pattern with look-around at #/$defs/Everything/properties/price",
        "pattern with look-around at #/$defs/Everything/properties/price/anyOf/1",
    }
    value = dict(VALUE)
    if mode == "serialization":
        value |= {"amount": "1.5", "encoded": 3}
    if not accepts(schema, value):
        schema_of = {
            key: {**schema, "$ref": f"#/$defs/Everything/properties/{key}"} for key in VALUE
        }
        wrong = [key for key in VALUE if not accepts(schema_of[key], value[key])]
        raise AssertionError(wrong)
    Everything.model_validate(VALUE)
    assert not accepts(schema, {**value, "day": "tomorrow"})
    assert not accepts(
        schema, {**value, "pet": {"kind": "dog", "lives": "many"}, "by_name": {"z": 1}}
    )


OBJECT = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}
ENFORCED = {
    "dependentRequired": ({**OBJECT, "dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
    "dependencies": ({**OBJECT, "dependencies": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    "dependentSchemas": (
        {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    "propertyNames, enum": (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": NUMBER},
        {"a": 1},
        {"b": 1},
    ),
    "propertyNames, pattern": (
        {"type": "object", "propertyNames": {"pattern": r"^\d$"}},
        {"1": "x"},
        {"b": "x"},
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {r"^\d": NUMBER}, "additionalProperties": False},
        {"1": 1},
        {"1": "x"},
    ),
    "uuid4": ({"type": "string", "format": "uuid4"}, VALUE["random"], "x"),
    "oneOf": ({"oneOf": [{"type": "string"}, NUMBER]}, 1, 1.5),
}


@pytest.mark.parametrize("name", ENFORCED)
@pytest.mark.parametrize("strictness", ["strict", "relaxed"])
def test_keywords_that_are_enforced(name: str, strictness: str) -> None:
    schema, right, wrong = ENFORCED[name]
    assert accepts(schema, right, strictness=strictness)
    assert not accepts(schema, wrong, strictness=strictness)


def test_unknown_formats_are_annotations() -> None:
    schema = {"type": "string", "format": "colour"}
    assert adapt(schema).unsupported == ()
    assert accepts(schema, "red", strictness="strict")


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    names = ("not", "if", "format", "pattern", "uniqueItems", "properties", "contains")
    properties = {name: {"type": "string"} for name in names}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    assert adapt(schema).schema == schema
    assert adapt(schema).unsupported == ()
    values = {"enum": [{"not": 1}], "default": {"format": "x"}, "const": {"pattern": r"\d"}}
    assert adapt(values).schema == values


UNSUPPORTED = {
    "uniqueItems": {"type": "array", "items": NUMBER, "uniqueItems": True},
    "not": {"type": "integer", "not": {"const": 2}},
    "contains": {"type": "array", "contains": NUMBER, "minContains": 1},
    "if": {**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {}},
    "unevaluatedProperties": {**OBJECT, "unevaluatedProperties": False},
    "propertyNames": {"type": "object", "propertyNames": {"minLength": 3}},
    "pattern with look-around": {"type": "string", "pattern": "^(?!a)b+$"},
    "minProperties": {**OBJECT, "minProperties": 1},
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_other_keywords_are_refused_or_dropped(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a/b": UNSUPPORTED[keyword]}}
    found = f"{keyword} at #/properties/a~1b"
    assert adapt(schema).unsupported == (found,)
    with pytest.raises(RequestError, match="--schema-strictness relaxed") as error:
        accepts(schema, {}, strictness="strict")
    assert found in str(error.value)
    kind = UNSUPPORTED[keyword]["type"]
    value = {"array": [1, 1], "integer": 2, "object": {}, "string": "bb"}[kind]
    assert accepts(schema, {"a/b": value})


def test_a_schema_of_listed_names_is_adapted_once() -> None:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(60):  # for each name alone: 2**60 schemas
        schema = {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": schema}
    adapted = adapt(schema)
    assert adapted.schema["properties"]["a"] is adapted.schema["properties"]["b"]
    assert len(adapted.unsupported) == 1


def test_what_is_not_enforced_is_named_within_limits() -> None:
    properties = {str(i): {"not": {}} for i in range(1000)}
    unsupported = adapt({"properties": {"a" * 50_000: {"properties": properties}}}).unsupported
    assert len(unsupported) == 64
    assert sum(map(len, unsupported)) < 16_384


def test_keywords_without_effect_are_no_problem() -> None:
    schema = {"type": "array", "items": NUMBER, "uniqueItems": False, "$dynamicAnchor": "a"}
    assert adapt(schema).unsupported == ()
    assert accepts(schema, [1], strictness="strict")


def test_properties_that_are_not_listed_need_additional_properties() -> None:
    assert accepts(OBJECT, {"a": 1, "b": 2})
    assert not accepts(OBJECT, {"a": 1, "c": 2})
    assert accepts({**OBJECT, "additionalProperties": True}, {"a": 1, "c": 2})
    assert accepts({"type": "object"}, {"c": 2})


def test_parts_of_a_combination_stay_open() -> None:
    other = {"type": "object", "properties": {"c": NUMBER}, "required": ["c"]}
    assert accepts({"allOf": [OBJECT, other]}, {"a": 1, "c": 2})
    assert accepts({**OBJECT, "anyOf": [other]}, {"a": 1, "c": 2})
    assert not accepts({"anyOf": [OBJECT, other]}, {"a": 1, "d": 2})


KEYWORDS = (
    *(
        "type",
        "properties",
        "items",
        "anyOf",
        "oneOf",
        "$ref",
        "$defs",
        "enum",
        "const",
        "required",
    ),
    *("propertyNames", "additionalProperties", "patternProperties", "dependentRequired", "format"),
    *("dependentSchemas", "dependencies", "pattern", "not", "if", "then", "uniqueItems", "a"),
    *("minProperties", "contains", "prefixItems", "allOf"),
)
VALUES = st.none() | st.booleans() | st.integers() | st.sampled_from(["string", "#/a", "#", "^a$"])
JSON = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner),
    max_leaves=10,
)


@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), JSON))
@settings(max_examples=50)
def test_any_json_can_be_adapted(schema: dict[str, Any]) -> None:
    before = json.dumps(schema)
    adapted = adapt(schema)
    assert json.dumps(schema) == before
    assert adapt(adapted.schema).unsupported == ()
