"""Guided decoding is never wrong: what a random model writes under a schema parses and fits it, or is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from edge_runtime.errors import DecodeFailed, RequestError, Unsupported
from edge_runtime.language.calls import HERMES, AnswerShape, CallReader, Guide, read_tools
from edge_runtime.language.grammar import ANY, literal, one_of
from tests.unit.language.conftest import Writer


def guided(schema: Any) -> AnswerShape:
    """An answer that must fit a schema."""
    return AnswerShape(None, HERMES, schema, "schema")


def fits(text: str, schema: Any) -> bool:
    return bool(Draft202012Validator(schema).is_valid(json.loads(text)))


# ---- characters -----------------------------------------------------------------------------------------------------


def test_every_character_before_a_hexadecimal_digit_is_written_rightly(writer: Writer) -> None:
    """The engine's own way from a schema writes U+0080 to U+00FF before a digit as another character."""
    points = [*range(0x7F, 0x180), 0x2028, 0x20AC, 0x4E2D, 0xD7FF, 0xE000, 0xFFFD, 0x1F3E0, 0x1F600, 0x10FFFF]
    for digits in ("f", "A", "0"):
        text = "".join(chr(point) + digits for point in points)
        for start in range(0, len(text), 180):
            part = text[start : start + 180]
            assert writer.end(writer.begin(Guide(f"root ::= {literal(part)}"), max_tokens=490)) == (part, "stop")


@pytest.mark.parametrize(
    "ranges",
    [[(0x20, 0xD7FF)], [(0x85, 0x2027)], [(0x202A, 0xD7FF)], [(0x30, 0x39), (0xE4, 0xE4), (0x100, 0x12345)], [*ANY]],
    ids=str,
)
def test_sets_of_characters_have_no_others(writer: Writer, ranges: list[tuple[int, int]]) -> None:
    """The engine's own way allows bytes that are no UTF-8, and what follows them."""
    guide = Guide(f"root ::= ({one_of(ranges)})*")
    for seed in range(5):
        text, _ = writer.end(writer.begin(guide, seed, 200))
        assert all(any(low <= ord(each) <= high for low, high in ranges) for each in text.rstrip("\ufffd"))


WORDS_OF_TWO = st.lists(st.text("ab", min_size=1, max_size=5), min_size=2, max_size=6, unique=True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=WORDS_OF_TWO, seed=st.integers(0, 1000))
@example(values=["bb", "abba", "baabb", "b", "aba"], seed=0)
def test_values_that_begin_alike_are_told_apart(writer: Writer, values: list[str], seed: int) -> None:
    """The engine's own way from alternatives makes others of them."""
    text, finish = writer.write(guided({"enum": values}), seed)
    assert finish == "stop"
    assert json.loads(text) in values


ROOM = {
    "type": "object",
    "properties": {
        "Küche": {"enum": ["Lüfter", "Süd", "21 °C"]},
        "Übersicht": {"const": "21 °C"},
        'a\nb"c\\é0': {"enum": ["ÿf", "\u00850"]},
    },
    "required": ["Küche", "Übersicht", 'a\nb"c\\é0'],
}


@pytest.mark.parametrize("seed", range(6))
def test_umlauts_in_names_and_values_are_written_rightly(writer: Writer, seed: int) -> None:
    text, finish = writer.write(guided(ROOM), seed)
    assert finish == "stop"
    assert fits(text, ROOM)


@pytest.mark.parametrize("is_required", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_tool_call_for_the_kitchen_names_the_kitchen(writer: Writer, seed: int, is_required: bool) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "area": {"enum": ["Küche", "Südzimmer"]},
            "name": {"enum": ["Lüfter", "Kühlschrank"]},
            "temperature": {"enum": ["21 °C", "22 °C"]},
            "brightness": {"type": "integer", "minimum": 0, "maximum": 100},
        },
        "required": ["area", "name", "temperature"],
    }
    chat = {
        "tools": [{"type": "function", "function": {"name": "HassTurnOn", "parameters": parameters, "strict": True}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    made = AnswerShape(read_tools(chat), HERMES).guide()
    if not is_required:  # behind its mark, as a model that wants to call would write it
        free = AnswerShape(read_tools({**chat, "tool_choice": "auto"}), HERMES).guide()
        assert free.trigger == "<tool_call>"
        root, rest = free.grammar.removeprefix("root ::= ").split("\n", 1)
        made = Guide(f"root ::= {literal(free.begin)} ({root}) {literal(free.end)}\n{rest}")
    writer.trials.try_alone(made)
    text, finish = writer.end(writer.begin(made, seed))
    reader = CallReader(HERMES, ["HassTurnOn"])
    said = [reader.read(text), reader.close(finish)]
    assert [each.text for each in said] == ["", ""]
    (call,) = said[0].calls
    assert fits(call.function.arguments, parameters)
    assert said[1].finish_reason == "tool_calls"


# ---- random schemas -------------------------------------------------------------------------------------------------

WORDS = st.text(st.sampled_from('Kücheäßé°0aFÿ\u0085 "\\\n€😀漢'), max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-9999, 9999) | WORDS


def numbers(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    value = st.integers(-2000, 2000) if kind == "integer" else st.decimals(-2000, 2000, places=3).map(float)
    bounds = st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), value)
    )
    return bounds.map(lambda found: {"type": kind, **found})


def of_strings(words: Any) -> dict[str, Any]:
    return {"type": "string", **words}


STRINGS = st.sampled_from(
    [
        {},
        {"maxLength": 3},
        {"minLength": 1, "maxLength": 5},
        {"minLength": 2},
        {"pattern": "^[a-fü]{2,5}$"},
        {"pattern": "K[^e\\d]+e|^x?$"},
        {"pattern": '^(ab|[^a-z"\\\\])*°\\s\\w\\.$'},
        {"format": "date"},
        {"format": "date-time"},
        {"format": "uuid"},
        {"format": "ipv4"},
        {"format": "hostname"},
    ]
).map(of_strings)

LEAVES = (
    numbers("integer")
    | numbers("number")
    | STRINGS
    | st.lists(SCALARS, min_size=1, max_size=5).map(lambda values: {"enum": values})
    | SCALARS.map(lambda value: {"const": value})
    | st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]}, True])
)


def above(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of objects, lists and choices of others."""

    @st.composite
    def objects(draw: st.DrawFn) -> Any:
        properties = draw(st.dictionaries(WORDS, below, max_size=4))
        required = draw(st.lists(st.sampled_from([*properties, "Küche"]), unique=True, max_size=3))
        made = {"type": "object", "properties": properties, "required": required}
        return {**made, "additionalProperties": draw(below)} if draw(st.booleans()) else made

    @st.composite
    def lists(draw: st.DrawFn) -> Any:
        made: dict[str, Any] = {"type": "array", "items": draw(below)}
        if draw(st.booleans()):
            made["prefixItems"] = draw(st.lists(below, min_size=1, max_size=2))
        return made | draw(st.sampled_from([{}, {"minItems": 1}, {"maxItems": 2}, {"minItems": 2, "maxItems": 3}]))

    choices = st.lists(below, min_size=1, max_size=3)
    return objects() | lists() | choices.map(lambda each: {"anyOf": each}) | choices.map(lambda each: {"oneOf": each})


SCHEMAS = st.recursive(LEAVES, above, max_leaves=8)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 20))
def test_random_model_writes_what_fits_random_schemas(writer: Writer, schema: Any, seed: int) -> None:
    try:
        text, finish = writer.write(guided(schema), seed, 250)
    except Unsupported:
        return
    assert finish == "length" or fits(text, schema)


NEXT = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"next": NEXT}}}},
        {"allOf": [{"$ref": "#/$defs/a"}, {"required": ["ü"]}], "$defs": {"a": {"properties": {"ü": {"const": 1}}}}},
        {"oneOf": [{"properties": {"is": {"const": each}, "é": {}}, "required": ["is"]} for each in ("é0", "éa")]},
        {"type": ["string", "null"], "maxLength": 2},
        {"type": "object", "maxProperties": 2, "additionalProperties": {"type": "integer", "minimum": 0}},
        {"type": "array", "items": False},
        {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1}, "maxItems": 3},
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
        {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 1},
        {"type": "integer", "multipleOf": 5, "minimum": -20, "maximum": 20},
        {"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
        {"type": "number", "minimum": 0.001, "maximum": 0.002},
        {"enum": [1, 1.5, "1", None, {"ü": [1]}], "type": ["number", "object"]},
        {"type": "string", "maxLength": 0},
        {"minimum": 3, "exclusiveMaximum": 4.25},
    ],
    ids=lambda each: json.dumps(each)[:40],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(3))
def test_random_model_writes_what_fits(writer: Writer, schema: Any, seed: int) -> None:
    text, finish = writer.write(guided(schema), seed, 480)
    assert finish == "length" or fits(text, schema)


@pytest.mark.parametrize("seed", range(4))
def test_json_object_is_an_object(writer: Writer, seed: int) -> None:
    text, finish = writer.write(guided(True), seed)
    assert finish == "length" or isinstance(json.loads(text), dict)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "error", "told"),
    [
        ({"type": 5}, DecodeFailed, "schema['type'] is not a JSON schema: 5 is not valid"),
        (7, DecodeFailed, "schema is number"),
        ({"properties": {"a": {"minLength": -1}}}, DecodeFailed, "schema['properties']['a']['minLength']"),
        ({"not": {}}, Unsupported, "not cannot be kept to"),
        ({"type": "array", "items": {"if": {}}}, Unsupported, "if cannot be kept to"),
        ({"type": "object", "patternProperties": {"a": {}}}, Unsupported, "patternProperties"),
        ({"type": "array", "uniqueItems": True}, Unsupported, "uniqueItems"),
        ({"$ref": "https://example.com/a"}, Unsupported, "references into the schema itself"),
        ({"$ref": "#/$defs/a"}, Unsupported, "there is no such part"),
        ({"$ref": "#"}, Unsupported, "back to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, Unsupported, "back to itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, Unsupported, "no value can fit"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, Unsupported, "no value can fit"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, Unsupported, "oneOf has branches"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, Unsupported, "oneOf has branches"),
        ({"type": "string", "maxLength": 10_000_000}, Unsupported, "at most 64"),
        ({"type": "string", "pattern": "(?=a)b"}, Unsupported, "lookaround"),
        ({"type": "string", "pattern": "(a*)*"}, Unsupported, "may be empty"),
        ({"type": "string", "pattern": "((a{99}){99}){99}"}, Unsupported, "counts"),
        ({"type": "string", "pattern": "a{1,9999}"}, Unsupported, "counts"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, Unsupported, "pattern beside minLength"),
        ({"type": "number", "multipleOf": 0.1}, Unsupported, "multipleOf needs"),
        ({"const": "\ud800"}, Unsupported, "surrogate"),
        ({"enum": [*range(2000)]}, Unsupported, "2000 values"),
        ({"minimum": float("inf")}, DecodeFailed, "too large"),
        ({"type": "object", "minProperties": 3}, Unsupported, "minProperties"),
        ({"type": "array", "minItems": 10_000_000}, Unsupported, "minItems"),
    ],
)  # fmt: skip
def test_schema_that_no_grammar_keeps_to_is_refused_with_the_reason(
    schema: Any, error: type[RequestError], told: str
) -> None:
    with pytest.raises(error) as caught:
        guided(schema).guide()
    assert told in caught.value.message


def _nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        made = {"type": "object", "properties": {"a": made}, "required": ["a"]}
    return made


def _doubled(depth: int) -> dict[str, Any]:
    """2 ** depth places, if each reference were its own."""
    steps = {
        f"s{each}": {
            "anyOf": [
                {"$ref": f"#/$defs/s{each + 1}", "minLength": each},
                {"$ref": f"#/$defs/s{each + 1}", "maxLength": 60 - each},
            ]
        }
        for each in range(depth)
    }
    return {"$ref": "#/$defs/s0", "$defs": {**steps, f"s{depth}": {"type": "string"}}}


HOSTILE = {
    "deep": _nested(5000),
    "rather deep": _nested(40),
    "wide": {"properties": {f"p{each}": {} for each in range(5000)}},
    "doubled": _doubled(28),
    "many branches": {"anyOf": [{"const": each} for each in range(6000)]},
    "many different lengths": {
        "type": "object",
        "properties": {f"p{each}": {"type": "string", "maxLength": each} for each in range(64)},
    },
    "large": {"description": "x" * 70_000},
    "pattern of alternatives": {"type": "string", "pattern": "|".join("(a|b)*c{60}" for _ in range(90))},
    "nested groups": {"type": "string", "pattern": "(" * 400 + "a" + ")" * 400},
    "one of many": {"oneOf": [{"type": "string", "const": f"v{each}"} for each in range(900)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schema_is_refused(name: str) -> None:
    with pytest.raises(RequestError):
        guided(HOSTILE[name]).guide()


LARGEST = {
    "properties": {
        "properties": {f"prüfung{each}": {"type": ["string", "number"]} for each in range(250)},
        "type": "object",
    },
    "values": {"enum": [f"Küche {each}" for each in range(1000)]},
    "counted": {"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": each} for each in (64, 63, 62)]}},
    "nested lists": {
        "type": "array",
        "maxItems": 256,
        "items": {"type": "array", "minItems": 200, "items": {"type": "boolean"}},
    },
    "nested": _nested(15),
}


@pytest.mark.parametrize("name", LARGEST)
def test_largest_schemas_are_tried_and_kept_to(writer: Writer, name: str) -> None:
    text, finish = writer.write(guided(LARGEST[name]), max_tokens=300)
    assert finish == "length" or fits(text, LARGEST[name])


# ---- beside others --------------------------------------------------------------------------------------------------


def test_grammar_that_the_library_refuses_fails_in_its_trial_and_others_go_on(writer: Writer) -> None:
    other = writer.begin(None, max_tokens=20)
    with pytest.raises(RuntimeError):
        writer.trials.try_alone(Guide("root ::= nothing"))
    text, finish = writer.end(other)
    assert finish == "length"
    assert text


def test_guide_has_one_trial(writer: Writer) -> None:
    wanted = guided({"const": "once"})
    first = writer.trials.begin(wanted).result()
    again = writer.trials.begin(wanted)
    assert again.done()
    assert again.result() is first
