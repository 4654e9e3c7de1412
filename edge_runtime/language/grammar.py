"""Pieces of a grammar: texts, sets of characters, regular expressions, numbers between bounds; and their rules in EBNF.

A piece is a regular expression as a value. `rules()` writes it as rules that are deterministic: no two alternatives of
a rule begin alike. The engine reads others wrongly (openvino-genai 2026.4.1, with xgrammar): of
`"bb" | "abba" | "baabb" | "b" | "aba"` it allows "abbba". It also reads U+0080 to U+00FF wrongly before a hexadecimal
digit in one literal, so characters above ASCII stand in literals of their own; and it allows bytes that are not UTF-8
in sets of characters that `one_of` cuts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from edge_runtime.errors import Unsupported

MAX_COUNTED = 64
"""Characters of one string that a grammar counts. The engine prepares each position for its whole vocabulary: 20 ms and
.6 MB of one with 150 000 tokens."""

MAX_DIGITS = 15
"""Of an integer: as many as a double keeps."""

MAX_STATES = 20_000
"""Of one piece: as many as the texts of a thousand values have characters."""

_MAX_FRACTION = 6
_LARGEST = 10**MAX_DIGITS - 1
_LARGEST_WITH_FRACTION = 10 ** (MAX_DIGITS - _MAX_FRACTION) - 1

Range = tuple[int, int]

ANY: tuple[Range, ...] = ((0x00, 0xD7FF), (0xE000, 0xFFFC), (0xFFFE, 0x10FFFF))
"""Code points of text, but for the one that stands for what cannot be read."""

_PLAIN: tuple[Range, ...] = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), *ANY[1:])
"""Code points that stand in a JSON string as they are."""

_SURROGATES: Range = (0xD800, 0xDFFF)
_LAST_OF_LENGTHS = (0x7F, 0x7FF, 0xFFFF)
"""The last code points of one, two and three bytes in UTF-8."""

_ESCAPES = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}


# ---- pieces ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these code points."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """The texts of another rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Joined:
    """Pieces one after the other."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """One of several pieces."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A piece, from least to most times."""

    piece: Piece
    least: int
    most: float


Piece = Chars | Rule | Joined | Either | Repeated


def joined(*pieces: Piece | str) -> Piece:
    """Return pieces one after the other; a text stands for itself."""
    return Joined(tuple(text(each) if isinstance(each, str) else each for each in pieces))


def either(*pieces: Piece | str) -> Piece:
    """Return one of several pieces; a text stands for itself."""
    return Either(tuple(text(each) if isinstance(each, str) else each for each in pieces))


def optional(piece: Piece) -> Piece:
    """Return a piece, or nothing."""
    return Repeated(piece, 0, 1)


def text(value: str) -> Piece:
    """Return exactly this text."""
    return Joined(tuple(Chars(((ord(each), ord(each)),)) for each in value))


def lengths(piece: Piece) -> tuple[int, float]:
    """Return how many characters a piece has at least and at most."""
    if isinstance(piece, Joined | Either):
        found = [lengths(each) for each in piece.pieces]
        low, high = [each[0] for each in found], [each[1] for each in found]
        return (sum(low), sum(high)) if isinstance(piece, Joined) else (min(low, default=0), max(high, default=0))
    if isinstance(piece, Repeated):
        low_one, high_one = lengths(piece.piece)
        return low_one * piece.least, high_one * piece.most if piece.most and high_one else 0
    return 1, 1


def counted(piece: Piece) -> int:
    """Return how many places of characters a piece has, those of a repetition as often as it counts."""
    if isinstance(piece, Joined | Either):
        return sum(counted(each) for each in piece.pieces)
    if isinstance(piece, Repeated):
        return counted(piece.piece) * (piece.least + 1 if piece.most == math.inf else int(piece.most))
    return 1


# ---- rules ----------------------------------------------------------------------------------------------------------

Label = Range | str
"""What leads from a state to the next one: a character between two, or a rule."""


def rules(piece: Piece, name: Callable[[], str]) -> tuple[str, dict[str, str]]:
    """Return EBNF of a piece as the name of its first rule, and the bodies of its rules. name: returns a new name."""
    ways, ends = _automaton(piece)
    names: dict[int, str] = {}
    bodies: dict[str, str] = {}
    waiting: list[int] = []

    def ref(state: int) -> str:
        if state not in names:
            names[state] = name()
            waiting.append(state)
        return names[state]

    def behind(state: int) -> str:
        return "" if ends[state] and not ways[state] else f" {ref(state)}"

    first = ref(0)
    while waiting:
        state = waiting.pop()
        told = [label for label, to in ways[state] if to == state]
        leads = [(label, to) for label, to in ways[state] if to != state]
        alternatives = []
        if len(leads) == 1 and not told and not ends[state]:
            alternatives.append(_chain(leads[0], ways, ends, behind))
        else:
            for label, to in leads:
                alternatives += [f"{each}{behind(to)}" for each in _labels(label)]
            if ends[state]:
                alternatives.append('""')
        body = " | ".join(alternatives)
        if told:
            rest = name()
            bodies[rest] = body
            body = f"({' | '.join(each for label in told for each in _labels(label))})* {rest}"
        bodies[names[state]] = body
    return first, bodies


def _chain(lead: tuple[Label, int], ways: _Ways, ends: Sequence[bool], behind: Callable[[int], str]) -> str:
    """Write the only way from a state, as far as there is no other."""
    found = []
    seen = set()
    while True:
        label, state = lead
        classes = _labels(label)
        found.append(label if isinstance(label, tuple) and label[0] == label[1] else classes)
        if len(classes) > 1 or ends[state] or len(ways[state]) != 1 or state in seen or ways[state][0][1] == state:
            break
        seen.add(state)
        lead = ways[state][0]
    written, run = [], ""
    for each in found:
        if isinstance(each, tuple):
            run += chr(each[0])
            continue
        written += [literal(run)] if run else []
        run = ""
        written.append(each[0] if len(each) == 1 else f"({' | '.join(each)})")
    written += [literal(run)] if run else []
    return " ".join(written) + behind(state)


def _labels(label: Label) -> list[str]:
    return [label] if isinstance(label, str) else one_of([label]).split(" | ")


_Ways = Sequence[Sequence[tuple[Label, int]]]


def _automaton(piece: Piece) -> tuple[_Ways, list[bool]]:
    """Return a deterministic automaton: the ways from each state, and whether a text may end in it; 0 is the first."""
    nodes: list[list[tuple[tuple[Range, ...] | str | None, int]]] = [[], []]
    _build(piece, 0, 1, nodes)
    closures: dict[int, frozenset[int]] = {}

    def closed(states: Iterable[int]) -> frozenset[int]:
        found: set[int] = set()
        for state in states:
            if state not in closures:
                reached, rest = {state}, [state]
                while rest:
                    for label, to in nodes[rest.pop()]:
                        if label is None and to not in reached:
                            reached.add(to)
                            rest.append(to)
                closures[state] = frozenset(reached)
            found |= closures[state]
        return frozenset(found)

    start = closed([0])
    numbers_of = {start: 0}
    waiting = [start]
    ways: list[list[tuple[Label, int]]] = [[]]
    ends = [1 in start]
    while waiting:
        states = waiting.pop()
        for label, all_to in _leads(edge for state in states for edge in nodes[state]):
            reached_states = closed(all_to)
            if reached_states not in numbers_of:
                numbers_of[reached_states] = len(ways)
                ways.append([])
                ends.append(1 in reached_states)
                waiting.append(reached_states)
                if len(ways) > MAX_STATES:
                    raise Unsupported(
                        f"values and patterns of a schema make more than {MAX_STATES} states; make it smaller"
                    )
            ways[numbers_of[states]].append((label, numbers_of[reached_states]))
    return ways, ends


def _leads(edges: Iterable[tuple[tuple[Range, ...] | str | None, int]]) -> Iterator[tuple[Label, set[int]]]:
    """Return what leads where, no two labels with a character in common."""
    named: dict[str, set[int]] = {}
    borders: dict[int, tuple[set[int], set[int]]] = {}
    for label, to in edges:
        if isinstance(label, str):
            named.setdefault(label, set()).add(to)
        for low, high in label if isinstance(label, tuple) else ():
            borders.setdefault(low, (set(), set()))[0].add(to)
            borders.setdefault(high + 1, (set(), set()))[1].add(to)
    yield from named.items()
    here: dict[int, int] = {}
    found: list[tuple[int, int, frozenset[int]]] = []
    points = sorted(borders)
    for at, point in enumerate(points):
        for to in borders[point][0]:
            here[to] = here.get(to, 0) + 1
        for to in borders[point][1]:
            here[to] -= 1
        all_to = frozenset(each for each, count in here.items() if count > 0)
        if not all_to:
            continue
        end = points[at + 1] - 1
        if found and found[-1][2] == all_to and found[-1][1] == point - 1:
            found[-1] = (found[-1][0], end, all_to)
        else:
            found.append((point, end, all_to))
    for low, high, all_to in found:
        yield (low, high), set(all_to)


def _build(piece: Piece, start: int, end: int, nodes: list[list[tuple[tuple[Range, ...] | str | None, int]]]) -> None:
    """Add the ways of a piece between two nodes."""

    def new() -> int:
        nodes.append([])
        if len(nodes) > 4 * MAX_STATES:
            raise Unsupported(f"values and patterns of a schema make more than {MAX_STATES} states; make it smaller")
        return len(nodes) - 1

    if isinstance(piece, Chars):
        nodes[start].append((_united_ranges(piece.ranges), end))
    elif isinstance(piece, Rule):
        nodes[start].append((piece.name, end))
    elif isinstance(piece, Joined):
        for each in piece.pieces:
            following = new()
            _build(each, start, following, nodes)
            start = following
        nodes[start].append((None, end))
    elif isinstance(piece, Either):
        for each in piece.pieces:
            begin = new()
            nodes[start].append((None, begin))
            _build(each, begin, end, nodes)
    else:
        for _ in range(piece.least):
            following = new()
            _build(piece.piece, start, following, nodes)
            start = following
        if piece.most == math.inf:
            loop, following = new(), new()
            nodes[start].append((None, loop))
            nodes[loop] += [(None, end)]
            _build(piece.piece, loop, following, nodes)
            nodes[following].append((None, loop))
            return
        nodes[start].append((None, end))
        for _ in range(int(piece.most) - piece.least):
            following = new()
            _build(piece.piece, start, following, nodes)
            nodes[following].append((None, end))
            start = following


def _united_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    return tuple(_united(ranges))


# ---- texts ----------------------------------------------------------------------------------------------------------


def literal(exact: str) -> str:
    """Return EBNF of exactly this text."""
    pieces = re.findall(r"[ -~]+|[^ -~]", exact)
    return " ".join('"' + _escaped(each) + '"' for each in pieces) or '""'


def _escaped(piece: str) -> str:
    if piece.isascii() and piece.isprintable():
        return piece.replace("\\", "\\\\").replace('"', '\\"')
    return _code(ord(piece))


def _code(point: int) -> str:
    return f"\\u{point:04x}" if point <= 0xFFFF else f"\\U{point:08x}"


def json_text(value: Any) -> str:
    """Return the JSON that stands for a constant value in answers."""
    told = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        told.encode()
    except UnicodeEncodeError:
        raise Unsupported(
            "a value has half of a surrogate pair, which no text can have; send the whole character"
        ) from None
    return told


# ---- sets of characters ---------------------------------------------------------------------------------------------


def _united(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges, and join those that touch."""
    found: list[Range] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _without(ranges: Sequence[Range], taken: Iterable[Range]) -> list[Range]:
    left = list(ranges)
    for low, high in taken:
        left = [
            part
            for start, end in left
            for part in ((start, min(end, low - 1)), (max(start, high + 1), end))
            if part[0] <= part[1]
        ]
    return left


def _shared(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    return [(max(a, c), min(b, d)) for a, b in ranges for c, d in others if max(a, c) <= min(b, d)]


def characters(ranges: Iterable[Range]) -> Piece:
    """Return one character of these code points, as it stands in a JSON string. Raises Unsupported: there is none."""
    wanted = _united(ranges)
    plain = _shared(wanted, _PLAIN)
    escaped = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
    special = [point for low, high in _shared(wanted, escaped) for point in range(low, high + 1)]
    if not plain and not special:
        raise Unsupported("a set of a pattern has no character")
    told: list[Piece | str] = [Chars(tuple(plain))] if plain else []
    return either(*told, *(_ESCAPES.get(point, f"\\u{point:04x}") for point in special))


def one_of(ranges: Iterable[Range]) -> str:
    """Return EBNF of one character of these code points; empty where there is none.

    The bytes of each class are a range at each of their places: for other classes the engine allows what is not UTF-8,
    even with quotes in it (openvino-genai 2026.4.1).
    """
    ascii_ranges, classes = "", []
    for low, high in _united(ranges):
        for start, end in _of_one_form(low, high):
            told = _code(start) if start == end else f"{_code(start)}-{_code(end)}"
            if end <= _LAST_OF_LENGTHS[0]:
                ascii_ranges += told
            else:
                classes.append(f"[{told}]")
    return " | ".join([f"[{ascii_ranges}]", *classes] if ascii_ranges else classes)


def _of_one_form(low: int, high: int) -> Iterator[Range]:
    """Cut a range so that the bytes of each part are a range at each place, by themselves."""
    for last in (_SURROGATES[0] - 1, _SURROGATES[1], *_LAST_OF_LENGTHS):
        if low <= last < high:
            yield from _of_one_form(low, last)
            yield from _of_one_form(last + 1, high)
            return
    if _SURROGATES[0] <= low <= _SURROGATES[1]:
        return
    for places in range(1, sum(high > last for last in _LAST_OF_LENGTHS) + 1):
        rest = (1 << 6 * places) - 1
        if low & ~rest == high & ~rest:
            continue
        cut = (low | rest) if low & rest else (high & ~rest) - 1 if high & rest != rest else None
        if cut is not None:
            yield from _of_one_form(low, cut)
            yield from _of_one_form(cut + 1, high)
            return
    yield low, high


CHARACTER: Piece = either(Chars(_PLAIN), joined("\\", Chars(tuple((ord(each), ord(each)) for each in '"\\/bfnrt'))))
"""Any character of a JSON string; of those that are escaped, the usual ones."""

STRING: Piece = joined('"', Repeated(CHARACTER, 0, math.inf), '"')


# ---- regular expressions --------------------------------------------------------------------------------------------


_DIGIT: tuple[Range, ...] = ((0x30, 0x39),)
_WORD: tuple[Range, ...] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: tuple[Range, ...] = ((0x09, 0x0D), (0x20, 0x20))
_ASCII: tuple[Range, ...] = ((0x20, 0x7E),)
_CLASSES = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    # What is none of these differs from language to language above ASCII: there the grammar has fewer characters.
    "D": tuple(_without(_ASCII, _DIGIT)),
    "W": tuple(_without(_ASCII, _WORD)),
    "S": tuple(_without(_ASCII, _SPACE)),
}
_DOT: tuple[Range, ...] = tuple(_without(_PLAIN, ((0x85, 0x85), (0x2028, 0x2029))))
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_ANYTHING: Piece = Repeated(Chars(_DOT), 0, math.inf)


def pattern(expression: str) -> Piece:
    """Return the strings in which a regular expression is found, as they stand in JSON, without quotes.

    ECMA 262's syntax without lookaround, references and word boundaries. Raises Unsupported: names what it cannot read.
    """
    return _Expression(expression).whole()


class _Expression:
    """Reads one regular expression, a character at a time."""

    def __init__(self, text: str) -> None:
        if len(text) > 1000:
            raise Unsupported(f"a pattern has {len(text)} characters; at most 1000 are read")
        self._text = text
        self._at = 0

    def whole(self) -> Piece:
        """The alternatives of the whole, each found anywhere but where it is anchored."""
        found = []
        while True:
            is_begun = self._takes("^")
            piece = self._sequence(0)
            is_ended = self._takes("$")
            found.append(joined(*([] if is_begun else [_ANYTHING]), piece, *([] if is_ended else [_ANYTHING])))
            if not self._takes("|"):
                break
        if self._at < len(self._text):
            raise self._unread()
        return self._bounded(either(*found))

    def _sequence(self, depth: int) -> Piece:
        if depth > 20:
            raise Unsupported("a pattern has more than 20 groups in one another")
        found = []
        while self._at < len(self._text) and self._text[self._at] not in "|)$":
            found.append(self._repeated(self._one(depth)))
        return joined(*found)

    def _one(self, depth: int) -> Piece:
        character = self._text[self._at]
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._set()
        self._at += 1
        if character == ".":
            return Chars(_DOT)
        if character == "\\":
            return characters(self._escape())
        if character in "^*+?{}":
            self._at -= 1
            raise self._unread()
        return characters([(ord(character), ord(character))])

    def _group(self, depth: int) -> Piece:
        self._at += 1
        if self._takes("?") and not self._takes(":"):
            name = re.compile(r"P?<[A-Za-z_]\w*>").match(self._text, self._at)
            if name is None:
                raise self._unread()
            self._at = name.end()
        found = [self._sequence(depth + 1)]
        while self._takes("|"):
            found.append(self._sequence(depth + 1))
        if not self._takes(")"):
            raise self._unread()
        return either(*found)

    def _set(self) -> Piece:
        self._at += 1
        is_negated = self._takes("^")
        ranges: list[Range] = []
        is_ascii = False
        while not self._takes("]"):
            start = self._member()
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                end = self._member()
                if len(start) != 1 or len(end) != 1 or start[0][0] > end[0][0] or start[0][0] != start[0][1]:
                    raise self._unread()
                start = [(start[0][0], end[0][1])]
            is_ascii = is_ascii or len(start) > 1 or start[0] == _DIGIT[0]
            ranges += start
        if not is_negated:
            return characters(ranges)
        # A class in a negated set: above ASCII, what it holds differs from language to language.
        return characters(_without(_ASCII if is_ascii else _PLAIN, (*ranges, (0x22, 0x22), (0x5C, 0x5C))))

    def _member(self) -> list[Range]:
        if self._at >= len(self._text):
            raise self._unread()
        character = self._text[self._at]
        self._at += 1
        return self._escape(is_set=True) if character == "\\" else [(ord(character), ord(character))]

    def _escape(self, *, is_set: bool = False) -> list[Range]:
        if self._at >= len(self._text):
            raise self._unread()
        character = self._text[self._at]
        self._at += 1
        if character in _CLASSES:
            return list(_CLASSES[character])
        if character in _CONTROLS:
            return [(_CONTROLS[character],) * 2]
        if character in "xu":
            digits = re.compile("[0-9a-fA-F]" * (2 if character == "x" else 4)).match(self._text, self._at)
            if digits is None or 0xD800 <= int(digits[0], 16) <= 0xDFFF:
                raise self._unread()
            self._at = digits.end()
            return [(int(digits[0], 16),) * 2]
        if character.isalnum() and not (is_set and character == "b"):
            self._at -= 1
            raise self._unread()
        return [(0x08, 0x08)] if character == "b" else [(ord(character), ord(character))]

    def _repeated(self, piece: Piece) -> Piece:
        counts = re.compile(r"(?:\*|\+|\?|\{(\d{1,4})(,(\d{0,4}))?\})\??").match(self._text, self._at)
        if counts is None:
            return piece
        self._at = counts.end()
        sign = counts[0][0]
        if sign == "{":
            least = int(counts[1])
            most: float = least if counts[2] is None else int(counts[3]) if counts[3] else math.inf
        else:
            least, most = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}[sign]
        if most < least:
            raise self._unread()
        if lengths(piece)[0] == 0 and most > 1:
            raise Unsupported(f"pattern {self._text!r}: it repeats what may be empty; write it without that")
        return self._bounded(Repeated(piece, least, most))

    def _bounded(self, piece: Piece) -> Piece:
        if (places := counted(piece)) > 4 * MAX_COUNTED:
            raise Unsupported(
                f"pattern {self._text!r}: it counts {places} characters; at most {4 * MAX_COUNTED} are counted"
            )
        return piece

    def _takes(self, character: str) -> bool:
        if self._text[self._at : self._at + 1] != character:
            return False
        self._at += 1
        return True

    def _unread(self) -> Unsupported:
        return Unsupported(
            f"pattern {self._text!r}: it is not read from character {self._at + 1} on; groups, sets, alternatives, "
            "repetitions and anchors at its ends are, lookaround, references and word boundaries are not"
        )


# ---- numbers --------------------------------------------------------------------------------------------------------


def _digits(low: int = 0, high: int = 9) -> Piece:
    return Chars(((0x30 + low, 0x30 + high),))


def _any_digits(count: int) -> Piece:
    return Repeated(_digits(), count, count)


def integers(low: int | None, high: int | None) -> Piece | None:
    """Return the integers from low to high, of at most `MAX_DIGITS` digits; None where there is none."""
    least, most = (-_LARGEST if low is None else low), (_LARGEST if high is None else high)
    found = _integers(max(least, -_LARGEST), min(most, _LARGEST))
    return either(*found) if found else None


def _integers(low: int, high: int) -> list[Piece]:
    found = []
    if low < 0:
        found += [joined("-", each) for each in _naturals(max(1, -high), -low)]
    if high >= 0:
        found += _naturals(max(0, low), high)
    return found


def _naturals(low: int, high: int) -> list[Piece]:
    """Alternatives of the natural numbers from low to high, without leading zeros."""
    found = []
    while low <= high:
        end = min(high, 10 ** len(str(low)) - 1)
        found += _same_length(str(low), str(end))
        low = end + 1
    return found


def _same_length(low: str, high: str) -> list[Piece]:
    """Alternatives of the texts of digits from low to high, both of one length."""
    rest = len(low) - 1
    if set(low) <= {"0"} and set(high) <= {"9"}:
        return [_any_digits(len(low))]
    if low[0] == high[0]:
        return [joined(low[0], each) for each in _same_length(low[1:], high[1:])]
    first, last = int(low[0]), int(high[0])
    found: list[Piece] = []
    if set(low[1:]) - {"0"}:
        found += [joined(low[0], each) for each in _same_length(low[1:], "9" * rest)]
        first += 1
    if set(high[1:]) - {"9"}:
        found += [joined(high[0], each) for each in _same_length("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        found.append(joined(_digits(first, last), _any_digits(rest)))
    return found


NUMBER: Piece = joined(
    optional(text("-")),
    either("0", joined(_digits(1), Repeated(_digits(), 0, MAX_DIGITS - 1))),
    optional(joined(".", Repeated(_digits(), 1, MAX_DIGITS))),
)
"""Any number, without an exponent."""


def numbers(low: Decimal | None, high: Decimal | None, *, above: bool = False, below: bool = False) -> Piece | None:
    """Return numbers from low to high, with at most six digits behind the point; None where there is none.

    above, below: low, or high, is not itself one of them.
    """
    if low is None and high is None:
        return NUMBER
    largest = Decimal(_LARGEST_WITH_FRACTION)
    least, most = max(-largest if low is None else low, -largest), min(largest if high is None else high, largest)
    found = []
    for digits in range(min(max(2, _fraction(least), _fraction(most)), _MAX_FRACTION) + 1):
        scale = Decimal(10) ** digits
        first, last = math.ceil(least * scale), math.floor(most * scale)
        first += above and low is not None and first == low * scale
        last -= below and high is not None and last == high * scale
        if not digits:
            found += _integers(first, last)
            continue
        if first < 0:
            found += [joined("-", each) for each in _fractions(max(1, -last), -first, digits)]
        if last >= 0:
            found += _fractions(max(0, first), last, digits)
    return either(*found) if found else None


def _fraction(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _fractions(low: int, high: int, digits: int) -> list[Piece]:
    """Alternatives of low to high hundredths (or what `digits` says), each with that many digits behind the point."""
    found: list[Piece] = []
    while low <= high:
        width = max(len(str(low)), digits + 1)
        end = min(high, 10**width - 1)
        low_text, high_text = str(low).zfill(width), str(end).zfill(width)
        found += [_pointed(each, digits) for each in _same_length(low_text, high_text)]
        low = end + 1
    return found


def _pointed(piece: Piece, digits: int) -> Piece:
    """Put a point before the last digits of a piece, which has as many in all of its texts."""
    flat = list(_flat(piece))
    return joined(*flat[:-digits], ".", *flat[-digits:])


def _flat(piece: Piece) -> Iterator[Piece]:
    if isinstance(piece, Joined):
        for each in piece.pieces:
            yield from _flat(each)
    elif isinstance(piece, Repeated):
        for _ in range(piece.least):
            yield from _flat(piece.piece)
    else:
        yield piece


# ---- strings of a known format --------------------------------------------------------------------------------------

_DATE = r"20\d\d-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
FORMATS = {
    "date": rf"^{_DATE}$",
    "date-time": rf"^{_DATE}T([01]\d|2[0-3]):[0-5]\d:[0-5]\d(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": r"^((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)$",
}
"""Formats of strings that answers have, as patterns; any other is a note to the reader, as JSON Schema says."""
