"""JSON schemas as grammars that the engine reads rightly: what is written under one always parses and fits its schema.

A schema is checked, and compiled here into EBNF, as the engine's own way from a schema writes some characters wrongly
and does not check what it is given. A grammar may allow less than its schema, never more: objects have the declared
properties alone, in their order. What no grammar can say is refused, with its name. Pure: values of JSON in, EBNF out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from edge_runtime.errors import DecodeFailed, Unsupported
from edge_runtime.language.grammar import (
    CHARACTER,
    FORMATS,
    MAX_COUNTED,
    NUMBER,
    STRING,
    Piece,
    Repeated,
    counted,
    either,
    integers,
    joined,
    json_text,
    lengths,
    literal,
    numbers,
    pattern,
    rules,
)

MAX_SCHEMA_BYTES = 64 << 10
MAX_DEPTH = 32
MAX_NODES = 3000
MAX_PROPERTIES = 256
MAX_VALUES = 1000
MAX_ITEMS = 256
MAX_BRANCHES = 64
"""What one schema may have. A grammar at these bounds was prepared in less than two seconds, in a thread of its own."""

MAX_FREE_DEPTH = 8
"""Levels of a value that no schema describes."""

_REFUSED = (
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
    "propertyNames",
    "contains",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that constrain, and that no grammar here can say."""

_NOTES = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
    "$id",
    "$defs",
    "definitions",
    "discriminator",
    "contentEncoding",
    "contentMediaType",
)
"""Keywords that constrain nothing."""

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}

Schema = Mapping[str, Any] | bool


def checked(schema: object, where: str) -> dict[str, Any] | bool:
    """Return a schema that is one. Raises DecodeFailed: where it is not, and why; Unsupported: it is too large."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    if not isinstance(schema, dict | bool):
        raise DecodeFailed(f"{where} is {_kind(schema)}, wanted a JSON schema, which is an object")
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except ValueError:
        raise DecodeFailed(f"{where} has a number that is too large for JSON's readers") from None
    except RecursionError:
        raise Unsupported(f"{where} has more than {MAX_DEPTH * 2} levels; make it flatter") from None
    if size > MAX_SCHEMA_BYTES:
        raise Unsupported(f"{where} has {size} bytes of JSON; at most {MAX_SCHEMA_BYTES} are read")
    _check_places(schema, where)
    draft = validator_for(schema, Draft202012Validator) if _is_older(schema) else Draft202012Validator
    try:
        draft.check_schema(schema)
    except SchemaError as error:
        place = "".join(f"[{each!r}]" for each in error.absolute_path)
        raise DecodeFailed(f"{where}{place} is not a JSON schema: {error.message[:300]}") from None
    return schema


def _is_older(schema: Schema) -> bool:
    """Whether a schema names a draft before 2020-12 whose words mean the same, but for lists of items."""
    named = schema.get("$schema", "") if isinstance(schema, dict) else ""
    return isinstance(named, str) and any(draft in named for draft in ("draft-06", "draft-07", "2019-09"))


def _check_places(schema: object, where: str) -> None:
    level: list[Any] = [schema]
    count = 0
    for _ in range(MAX_DEPTH * 2):
        count += len(level)
        if count > MAX_NODES:
            raise Unsupported(f"{where} has more than {MAX_NODES} values; make it smaller")
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise Unsupported(f"{where} has more than {MAX_DEPTH * 2} levels; make it flatter")


# ---- what a schema says ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    """The values that one place of a schema has. `piece`: the whole, for scalars and constants."""

    kind: str  # piece, string, any, either, object, map, array, never
    piece: Piece | None = None
    choices: list[_Node] = field(default_factory=list)
    keys: list[tuple[str, _Node, bool]] = field(default_factory=list)
    item: _Node | None = None
    needs_item: bool = False
    least: int = 0
    most: int | None = None
    is_finite: bool = False
    rule: str = ""


class Grammar:
    """A grammar under way: rules of EBNF, each made once. Its root is what `text()` is given."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._pieces: dict[Piece, str] = {}
        self._made = 0
        self.counted = 0

    def rule(self, body: str, hint: str = "r") -> str:
        """Return the name of the rule with this body; one that is there is used again."""
        if body not in self._names:
            self._names[body] = name = f"{hint}{len(self._rules)}"
            self._rules[name] = body
        return self._names[body]

    def piece(self, piece: Piece) -> str:
        """Return the name of the rule of a piece; one that is there is used again."""
        if piece not in self._pieces:
            self._pieces[piece], made = rules(piece, self._new)
            self._rules |= made
        return self._pieces[piece]

    def _new(self) -> str:
        self._made += 1
        return f"q{self._made}"

    def text(self, root: str) -> str:
        """Return the whole as EBNF, beginning with `root`."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._rules.items())])

    def schema(self, schema: Schema, where: str) -> str:
        """Return the name of a rule of the values of a checked schema.

        Raises Unsupported: the schema says what no grammar can, or no value fits it.
        """
        reader = _Reader(schema, where)
        node = reader.node(schema, 0)
        _mark_finite(reader.nodes)
        if not node.is_finite:
            raise Unsupported(f"{where}: no value can fit it")
        self.counted += reader.counted
        if self.counted > 4 * MAX_COUNTED:
            raise Unsupported(
                f"{where}: strings of limited length, and patterns, count {self.counted} characters; at most "
                f"{4 * MAX_COUNTED} are counted; leave minLength and maxLength out"
            )
        return self._rule_of(node)

    def any_object(self) -> str:
        """Return the name of a rule of any JSON object."""
        return self._object(MAX_FREE_DEPTH)

    # ---- rules of nodes ----

    def _rule_of(self, node: _Node) -> str:
        if node.rule:
            return node.rule
        if node.piece is not None:
            node.rule = self.piece(node.piece)
        elif node.kind == "string":
            node.rule = self._string()
        elif node.kind == "any":
            node.rule = self._any(MAX_FREE_DEPTH)
        else:
            # Named before its body, which may name it.
            node.rule = name = f"n{len(self._rules)}"
            self._rules[name] = ""
            body = {"either": self._either, "object": self._members, "map": self._map, "array": self._array}[node.kind]
            self._rules[name] = body(node)
        return node.rule

    def _either(self, node: _Node) -> str:
        choices = [each for each in _flat(node) if each.is_finite]
        pieces = [each.piece for each in choices if each.piece is not None]
        told = [self.piece(either(*pieces))] if pieces else []
        return " | ".join(dict.fromkeys([*told, *(self._rule_of(each) for each in choices if each.piece is None)]))

    def _members(self, node: _Node) -> str:
        """Properties in their order: for each a rule of what may follow, behind nothing and behind another."""
        members = [
            (f"{literal(json_text(key) + ':')} {self._space()} {self._rule_of(value)}", is_required)
            for key, value, is_required in node.keys
            if value.is_finite
        ]
        return f'"{{" {self._listed(members)} "}}"'

    def _listed(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members with commas between those that are there."""
        first, later = '""', '""'
        for member, is_required in reversed(members):
            comma = f"{self._comma()} {member} {later}"
            alone = f"{member} {later}"
            later, first = (
                (self.rule(comma, "m"), self.rule(alone, "f"))
                if is_required
                else (self.rule(f"{comma} | {later}", "m"), self.rule(f"{alone} | {first}", "f"))
            )
        return first

    def _map(self, node: _Node) -> str:
        member = self.rule(f'{self._string()} ":" {self._space()} {self._rule_of(node.choices[0])}', "m")
        return self._many("{", member, "}", node.least, node.most)

    def _array(self, node: _Node) -> str:
        first = [self._rule_of(each) for each in node.choices]
        if node.item is None or not node.item.is_finite:
            return '"[" ' + f" {self._comma()} ".join(first) + ' "]"'
        item = self._rule_of(node.item)
        if not first:
            return self._many("[", item, "]", node.least, node.most)
        more = self._more(item, max(0, node.least - len(first)), _less(node.most, len(first)))
        return '"[" ' + f" {self._comma()} ".join(first) + f' {more} "]"'

    def _many(self, begin: str, item: str, end: str, least: int, most: int | None) -> str:
        """From least to most items with commas between them."""
        if most == 0:
            return f'"{begin}{end}"'
        found = f"{item} {self._more(item, max(0, least - 1), _less(most, 1))}"
        return f'"{begin}" {found if least else f"({found})?"} "{end}"'

    def _more(self, item: str, least: int, most: float) -> str:
        """From least to most items with a comma before each."""
        one = self.rule(f"{self._comma()} {item}", "i")
        if most == math.inf:
            return f"{f'{one} ' * least}{one}*"
        more = '""'
        for _ in range(int(most) - least):
            more = self.rule(f'{one} {more} | ""', "i")
        return f"{f'{one} ' * least}{more}"

    # ---- rules that all share ----

    def _space(self) -> str:
        return self.rule('" "?', "space")

    def _comma(self) -> str:
        return self.rule('"," " "?', "comma")

    def _string(self) -> str:
        return self.piece(STRING)

    def _scalar(self) -> str:
        return self.piece(either(STRING, NUMBER, "true", "false", "null"))

    def _any(self, depth: int) -> str:
        """Return the name of a rule of values of at most `depth` levels: parsers refuse very deep ones."""
        if not depth:
            return self._scalar()
        array = self._many("[", self._any(depth - 1), "]", 0, None)
        return self.rule(f"{self._scalar()} | {self._object(depth)} | {array}", "any")

    def _object(self, depth: int) -> str:
        member = self.rule(f'{self._string()} ":" {self._space()} {self._any(depth - 1)}', "m")
        return self.rule(self._many("{", member, "}", 0, None), "object")


def _flat(node: _Node) -> list[_Node]:
    """Return the choices of a node, with the choices of those that are choices themselves."""
    return [below for each in node.choices for below in (_flat(each) if each.kind == "either" else [each])]


def _less(most: int | None, count: int) -> float:
    return math.inf if most is None else max(0, most - count)


def _mark_finite(nodes: Sequence[_Node]) -> None:
    """Mark each node that some finite value fits: an endless circle of required properties has none."""
    has_news = True
    while has_news:
        has_news = False
        for node in nodes:
            if not node.is_finite and _fits_something(node):
                node.is_finite = has_news = True


def _fits_something(node: _Node) -> bool:
    if node.kind in ("piece", "string", "any"):
        return True
    if node.kind == "either":
        return any(each.is_finite for each in node.choices)
    if node.kind == "object":
        return all(value.is_finite for _, value, is_required in node.keys if is_required)
    if node.kind == "map":
        return node.choices[0].is_finite
    if node.kind == "array":
        return all(each.is_finite for each in node.choices) and (
            node.item is None or not node.needs_item or node.item.is_finite
        )
    return False


class _Reader:
    """Reads one schema into nodes."""

    def __init__(self, root: Schema, where: str) -> None:
        self._root = root
        self._where = where
        self._known: dict[str, _Node] = {}
        self._open: list[str] = []
        self.nodes: list[_Node] = []
        self.counted = 0
        self._lengths: set[tuple[int, int | None]] = set()

    def node(self, schema: Schema, depth: int) -> _Node:
        """Return the node of a schema; the same one for schemas that are equal."""
        if depth > MAX_DEPTH:
            raise self._refusal(f"it has more than {MAX_DEPTH} levels")
        key = json.dumps(schema)
        if key in self._known:
            found = self._known[key]
            if key in self._open:
                raise self._refusal("a $ref leads back to itself without a property or an item between")
            return found
        made = self._known[key] = self._made("never")
        self._open.append(key)
        self._fill(made, schema, depth)
        self._open.remove(key)
        return made

    def _below(self, schema: Schema, depth: int) -> _Node:
        """The node of a property or an item: what encloses it has begun, so it may lead back."""
        kept, self._open = self._open, []
        try:
            return self.node(schema, depth + 1)
        finally:
            self._open = kept

    def _made(self, kind: str, **values: Any) -> _Node:
        if len(self.nodes) >= MAX_NODES:
            raise self._refusal(f"it has more than {MAX_NODES} places")
        node = _Node(kind, **values)
        self.nodes.append(node)
        return node

    def _fill(self, node: _Node, schema: Schema, depth: int) -> None:
        if isinstance(schema, bool):
            node.kind = "any" if schema else "never"
            return
        for word in _REFUSED:
            if word in schema:
                raise self._refusal(f"{word} cannot be kept to while text is written; leave it out")
        for word in ("$ref", "allOf", "anyOf", "oneOf"):
            if word in schema:
                self._fill_either(node, self._branches(word, schema), depth)
                return
        if "const" in schema or "enum" in schema:
            self._fill_constant(node, schema)
            return
        types = schema.get("type", self._types_of(schema))
        types = [types] if isinstance(types, str) else list(types)
        if len(types) == len(_TYPES):
            node.kind = "any"
        elif len(types) != 1:
            self._fill_either(node, [{**schema, "type": each} for each in types], depth)
        elif types[0] == "object":
            self._fill_object(node, schema, depth)
        elif types[0] == "array":
            self._fill_array(node, schema, depth)
        else:
            {"string": self._fill_string, "number": self._fill_number, "integer": self._fill_integer}.get(
                types[0], self._fill_named
            )(node, {**schema, "type": types[0]})

    def _fill_either(self, node: _Node, branches: Sequence[Schema], depth: int) -> None:
        node.kind = "either"
        node.choices = [self.node(each, depth + 1) for each in branches]

    def _types_of(self, schema: Mapping[str, Any]) -> list[str]:
        """Types of a schema that names none: the one that its keywords are about, or all."""
        told = [kind for kind, words in _OF_TYPE.items() if any(word in schema for word in words)]
        return told[:1] or list(_TYPES)

    # ---- schemas of schemas ----

    def _branches(self, word: str, schema: Mapping[str, Any]) -> list[Schema]:
        """Schemas one of which a value of `schema` fits, each with what stands beside `word`."""
        beside = {name: value for name, value in schema.items() if name != word and name not in _NOTES}
        if word == "$ref":
            return [self._merged(beside, self._named_schema(schema["$ref"]))]
        if word == "allOf":
            whole: Schema = beside
            for each in schema[word]:
                whole = self._merged(whole, self._resolved(each))
            return [whole]
        found = [self._merged(beside, each) for each in schema[word]]
        if word == "oneOf":
            if len(found) > MAX_BRANCHES:
                raise self._refusal(f"oneOf has {len(found)} branches; at most {MAX_BRANCHES} are read")
            self._check_apart(found)
        return found

    def _named_schema(self, reference: str) -> Schema:
        if not reference.startswith("#") or (reference[1:] and not reference.startswith("#/")):
            raise self._refusal(
                f"$ref {reference!r}: references into the schema itself are followed, such as #/$defs/NAME"
            )
        found: Any = self._root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise self._refusal(f"$ref {reference!r}: there is no such part") from None
        if not isinstance(found, dict | bool):
            raise self._refusal(f"$ref {reference!r}: it is not a schema")
        return found

    def _merged(self, first: Schema, second: Schema) -> Schema:
        """Return a schema of the values that fit both. Raises Unsupported where they cannot be put together."""
        if first is False or second is False:
            return False
        if isinstance(first, bool) or not first:
            return second
        if isinstance(second, bool):
            return first
        one = {name: value for name, value in first.items() if name not in _NOTES}
        other = {name: value for name, value in second.items() if name not in _NOTES}
        if not one or not other:
            return one or other
        both: dict[str, Any] = {}
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in one or name not in other or one[name] == other[name]:
                both[name] = one.get(name, other.get(name))
            else:
                both[name] = self._shared(name, one[name], other[name])
        if ("additionalProperties" in one or "additionalProperties" in other) and set(one.get("properties", ())) != set(
            other.get("properties", ())
        ):
            raise self._refusal(
                "additionalProperties beside other properties of allOf, anyOf or $ref; put them into one object"
            )
        return both

    def _shared(self, name: str, one: Any, other: Any) -> Any:
        if name == "properties":
            return {
                key: self._merged(one.get(key, True), other.get(key, True))
                for key in [*one, *(key for key in other if key not in one)]
            }
        if name == "required":
            return [*one, *(key for key in other if key not in one)]
        if name == "type":
            types = [[each] if isinstance(each, str) else each for each in (one, other)]
            found = [each for each in types[0] if each in types[1] or (each == "integer" and "number" in types[1])]
            if "integer" in types[1] and "number" in types[0]:
                found.append("integer")
            return found
        if name in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
            return max(one, other)
        if name in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
            return min(one, other)
        if name == "format":
            return one
        raise self._refusal(f"{name} is said twice, by schemas that both hold; say it once")

    def _check_apart(self, branches: Sequence[Schema]) -> None:
        """Raise Unsupported where a value may fit two branches of oneOf."""
        for at, one in enumerate(branches):
            for other in branches[at + 1 :]:
                if not self._are_apart(one, other, 0):
                    raise self._refusal(
                        "oneOf has branches that one value may fit; write anyOf, or give each a const of its own"
                    )

    def _are_apart(self, one: Schema, other: Schema, depth: int) -> bool:
        one, other = self._resolved(one), self._resolved(other)
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        values = [_values_of(each) for each in (one, other)]
        if values[0] is not None and values[1] is not None:
            return not any(a == b for a in values[0] for b in values[1])
        # A value that is written for one has the type that its keywords are about, whatever else it allows.
        shared_types = (_kinds_of(one) & _kinds_of(other, self._types_of(other))) | (
            _kinds_of(one, self._types_of(one)) & _kinds_of(other)
        )
        if not shared_types:
            return True
        if depth > 3 or shared_types != {"object"}:
            return False
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        return any(
            self._are_apart(
                one.get("properties", {}).get(key, True), other.get("properties", {}).get(key, True), depth + 1
            )
            for key in shared
        )

    def _resolved(self, schema: Schema) -> Schema:
        for _ in range(MAX_DEPTH):
            if isinstance(schema, bool) or "$ref" not in schema:
                return schema
            schema = self._merged(
                {name: value for name, value in schema.items() if name != "$ref"}, self._named_schema(schema["$ref"])
            )
        return True

    # ---- values ----

    def _fill_constant(self, node: _Node, schema: Mapping[str, Any]) -> None:
        from jsonschema.validators import Draft202012Validator

        values = _values_of(schema) or []
        if len(values) > MAX_VALUES:
            raise self._refusal(f"enum has {len(values)} values; at most {MAX_VALUES} are read")
        for word in ("pattern", "properties", "items", "prefixItems"):
            if word in schema:
                raise self._refusal(f"{word} beside enum or const; leave it out, as the values are all named")
        rest = Draft202012Validator(
            {word: value for word, value in schema.items() if word not in (*_NOTES, "enum", "const")}
        )
        if "const" in schema and "enum" in schema:
            values = [each for each in values if each in schema["enum"]]
        self._fill_texts(node, [json_text(each) for each in values if rest.is_valid(each)])

    def _fill_named(self, node: _Node, schema: Mapping[str, Any]) -> None:
        self._fill_texts(node, ["null"] if schema["type"] == "null" else ["true", "false"])

    def _fill_texts(self, node: _Node, texts: Sequence[str]) -> None:
        self._fill_piece(node, either(*dict.fromkeys(texts)) if texts else None)

    def _fill_piece(self, node: _Node, piece: Piece | None) -> None:
        node.kind, node.piece = "never" if piece is None else "piece", piece

    def _fill_integer(self, node: _Node, schema: Mapping[str, Any]) -> None:
        low, high = self._bounds(schema)
        whole = [
            None if each is None else (math.ceil(each) if at == 0 else math.floor(each))
            for at, each in enumerate((low, high))
        ]
        if whole[0] is not None and "exclusiveMinimum" in schema and whole[0] <= _decimal(schema["exclusiveMinimum"]):
            whole[0] += 1
        if whole[1] is not None and "exclusiveMaximum" in schema and whole[1] >= _decimal(schema["exclusiveMaximum"]):
            whole[1] -= 1
        if "multipleOf" in schema and schema["multipleOf"] != 1:
            self._fill_multiples(node, schema, whole[0], whole[1])
            return
        self._fill_piece(node, integers(*whole))

    def _fill_number(self, node: _Node, schema: Mapping[str, Any]) -> None:
        low, high = self._bounds(schema)
        above = low is not None and "exclusiveMinimum" in schema and low == _decimal(schema["exclusiveMinimum"])
        below = high is not None and "exclusiveMaximum" in schema and high == _decimal(schema["exclusiveMaximum"])
        if "multipleOf" in schema:
            self._fill_multiples(node, schema, low, high)
            return
        self._fill_piece(node, numbers(low, high, above=above, below=below))

    def _bounds(self, schema: Mapping[str, Any]) -> tuple[Decimal | None, Decimal | None]:
        lows = [_decimal(schema[word]) for word in ("minimum", "exclusiveMinimum") if word in schema]
        highs = [_decimal(schema[word]) for word in ("maximum", "exclusiveMaximum") if word in schema]
        return max(lows, default=None), min(highs, default=None)

    def _fill_multiples(self, node: _Node, schema: Mapping[str, Any], low: Any, high: Any) -> None:
        """Name each multiple between the bounds: no grammar divides."""
        from jsonschema.validators import Draft202012Validator

        step = _decimal(schema["multipleOf"])
        count = None if low is None or high is None else math.floor(high / step) - math.ceil(low / step) + 1
        if count is None or count > MAX_VALUES:
            raise self._refusal(
                f"multipleOf needs minimum and maximum with at most {MAX_VALUES} multiples between them"
            )
        rule = Draft202012Validator({word: value for word, value in schema.items() if word not in _NOTES})
        texts = [format((math.ceil(low / step) + at) * step, "f") for at in range(max(0, count))]
        self._fill_texts(node, [each for each in texts if rule.is_valid(json.loads(each))])

    def _fill_string(self, node: _Node, schema: Mapping[str, Any]) -> None:
        least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
        piece = None
        if "pattern" in schema:
            piece = pattern(schema["pattern"])
            self.counted += counted(piece)
            shortest, longest = lengths(piece)
            if shortest < least or (most is not None and longest > most):
                raise self._refusal(
                    "pattern beside minLength or maxLength that it does not keep by itself; say the length in it"
                )
        elif least or most is not None:
            if max(least, most or 0) > MAX_COUNTED:
                raise self._refusal(
                    f"a string of {least} to {'any number of' if most is None else most} characters: at most "
                    f"{MAX_COUNTED} are counted while text is written; leave minLength and maxLength out"
                )
            if most is not None and most < least:
                return
            piece = Repeated(CHARACTER, least, math.inf if most is None else int(most))
            self.counted += max(least, most or 0)
        elif schema.get("format") in FORMATS:
            piece = pattern(FORMATS[schema["format"]])
        if piece is None:
            node.kind = "string"
            return
        self._fill_piece(node, joined('"', piece, '"'))

    def _fill_array(self, node: _Node, schema: Mapping[str, Any], depth: int) -> None:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        first, items = self._items_of(schema)
        if least > MAX_ITEMS:
            raise self._refusal(f"minItems is {least}; at most {MAX_ITEMS} are read")
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise self._refusal(
                "uniqueItems cannot be kept to while text is written; leave it out, or set maxItems to 1"
            )
        most = None if most is None else min(int(most), MAX_ITEMS)
        if most is not None and most < least:
            return
        node.kind, node.least, node.most = "array", least, most
        node.choices = [self._below(each, depth) for each in first[: most if most is not None else len(first)]]
        if (not first or least > len(first)) and (most is None or most > len(node.choices)):
            node.item, node.needs_item = self._below(items, depth), least > len(first)
        elif len(node.choices) < least:
            node.kind = "never"

    def _items_of(self, schema: Mapping[str, Any]) -> tuple[list[Schema], Schema]:
        items = schema.get("items", True)
        if isinstance(items, list):  # drafts before 2020-12
            return items, schema.get("additionalItems", True)
        if "prefixItems" in schema and _is_older(self._root):
            raise self._refusal("prefixItems with a $schema before 2020-12, which does not know it")
        return list(schema.get("prefixItems", ())), items

    def _fill_object(self, node: _Node, schema: Mapping[str, Any], depth: int) -> None:
        rest: Schema = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        required = list(schema.get("required", ()))
        properties = {
            **schema.get("properties", {}),
            **{key: rest for key in required if key not in schema.get("properties", {})},
        }
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if len(properties) > MAX_PROPERTIES:
            raise self._refusal(f"an object has {len(properties)} properties; at most {MAX_PROPERTIES} are read")
        is_open = "properties" not in schema or "additionalProperties" in schema
        if not properties and is_open and rest is not False:
            if least > 1:
                raise self._refusal("minProperties of more than 1 without properties; name the properties")
            node.kind, node.least, node.most = "map", least, None if most is None else min(int(most), MAX_ITEMS)
            node.choices = [self._below(rest, depth)]
            if most is not None and most < least:
                node.kind = "never"
            return
        if least > len(required) or (most is not None and most < len(properties)):
            raise self._refusal("minProperties or maxProperties beside properties; say which are required instead")
        node.kind = "object"
        node.keys = [(key, self._below(value, depth), key in required) for key, value in properties.items()]

    def _refusal(self, reason: str) -> Unsupported:
        return Unsupported(f"{self._where}: {reason}")


def _values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found: list[Any] | None = schema.get("enum")
    return found


def _kinds_of(schema: Mapping[str, Any], unsaid: Sequence[str] = _TYPES) -> set[str]:
    values = _values_of(schema)
    if values is not None:
        return {_kind(each) for each in values}
    types = schema.get("type", unsaid)
    found = {types} if isinstance(types, str) else set(types)
    return {"number" if each == "integer" else each for each in found}


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _decimal(value: float) -> Decimal:
    return Decimal(repr(value))
