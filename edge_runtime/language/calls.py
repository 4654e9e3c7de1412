"""Calls of tools in what a model writes: the grammar under which they are right, and their way out of the text.

Each family of models writes calls in a form of its own, which its chat template shows. A call is read from the text as
it comes, and goes out once, whole; one that was cut goes nowhere. Pure: no library, no clock.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from msgspec import Struct

from edge_runtime.errors import DecodeFailed
from edge_runtime.language.grammar import ANY, Chars, Piece, Repeated, Rule, either, joined, optional
from edge_runtime.language.messages import FunctionCall, ToolCall
from edge_runtime.language.schemas import Grammar, checked

MAX_TOOLS = 128
MAX_CALLS = 16
"""Of one answer that must be calls; a model that need not call stops by itself."""

_UNLIKE_CALLS: Piece = optional(
    joined(Chars(((0x21, 0x7A), (0x7C, 0xD7FF), *ANY[1:])), Repeated(Chars(ANY), 0, math.inf))
)
"""Text whose first character no call has: no brace, no space."""


class Guide(Struct, frozen=True):
    """A grammar of answers, in EBNF; with a trigger, of what follows it in an answer that is any text otherwise.

    begin, end: around the grammar's text, begin with the trigger first. is_once: the answer ends behind it.
    """

    grammar: str
    trigger: str = ""
    begin: str = ""
    end: str = ""
    is_once: bool = False


class CallForm(Struct, frozen=True):
    """How a family of models writes calls. mark: what begins them; empty: an answer is calls or text.

    begin, end: around each call, or around all of them where they are a list. arguments: the key of a call's arguments.
    between: of calls one after the other. divider: between a name and its arguments, in place of JSON around both.
    """

    mark: str
    begin: str
    end: str
    arguments: str = "arguments"
    between: str = "\n"
    is_list: bool = False
    divider: str = ""

    def call(self, name: str, arguments: Piece) -> Piece:
        """Return one call."""
        if self.divider:
            return joined(name + self.divider, arguments)
        return joined(f'{{"name": {json.dumps(name)}, {json.dumps(self.arguments)}: ', arguments, "}")


HERMES = CallForm("<tool_call>", "<tool_call>\n", "\n</tool_call>")
"""Of Hermes and Qwen; the form in which a model calls whose template knows no tools."""

_FORMS: tuple[tuple[str, CallForm], ...] = (
    ("[ARGS]", CallForm("[TOOL_CALLS]", "[TOOL_CALLS]", "", between="", divider="[ARGS]")),
    ("[TOOL_CALLS]", CallForm("[TOOL_CALLS]", "[TOOL_CALLS][", "]", is_list=True, between=", ")),
    ("<|/tool_call|>", CallForm("<|tool_call|>", "<|tool_call|>[", "]<|/tool_call|>", is_list=True, between=", ")),
    ("<|tool_call|>", CallForm("<|tool_call|>", "<|tool_call|>[", "]", is_list=True, between=", ")),
    ("<tool_call>", HERMES),
    ("<|python_tag|>", CallForm("", "", "", arguments="parameters", between="; ")),
)
"""By what a template shows: Mistral since 2025, Mistral before, Phi-4-mini, Granite, Hermes and Qwen, Llama 3."""

_OTHER_FORMS = ("<function=", "<arg_key>", "tool\u2581calls\u2581begin")
"""Forms in which arguments are not JSON, or that are not known well enough: the prompt has the Hermes form instead."""


def call_form(template: str) -> CallForm | None:
    """Return the form that a chat template shows; None where it shows none that is read here."""
    if "tools" not in template or any(each in template for each in _OTHER_FORMS):
        return None
    return next((form for sign, form in _FORMS if sign in template), None)


class ToolChoice(Struct, frozen=True):
    """The tools of a chat: their definitions as they came, names that may be called, and how many calls there are."""

    definitions: tuple[dict[str, Any], ...]
    callable: tuple[str, ...]
    is_required: bool = False
    is_parallel: bool = True


def read_tools(chat: Mapping[str, Any]) -> ToolChoice | None:
    """Return the tools that a chat lets its model call, or None. Raises DecodeFailed: what is wrong with them."""
    given = chat.get("tools") or []
    choice = chat.get("tool_choice") or "auto"
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise DecodeFailed(f"tools is {_described(given)}, wanted a list of at most {MAX_TOOLS}")
    names = [_name_of(each, at) for at, each in enumerate(given)]
    if len(set(names)) < len(names):
        raise DecodeFailed("tools: two have the same name; give each its own")
    if isinstance(choice, dict):
        function = choice.get("function")
        wanted = function.get("name") if isinstance(function, dict) else choice.get("name")
        if wanted not in names:
            raise DecodeFailed(
                f"tool_choice names {wanted!r}, which is none of the tools: {', '.join(names) or 'there are none'}"
            )
        return ToolChoice(tuple(given), (str(wanted),), is_required=True, is_parallel=False)
    if choice not in ("none", "auto", "required"):
        raise DecodeFailed(
            f'tool_choice is {choice!r}, wanted "none", "auto", "required" or a function\'s name in its object'
        )
    if not given:
        if choice == "required":
            raise DecodeFailed('tool_choice is "required", and there are no tools; send some')
        return None
    if choice == "none":
        return None
    return ToolChoice(tuple(given), tuple(names), choice == "required", chat.get("parallel_tool_calls") is not False)


def _name_of(tool: object, at: int) -> str:
    if (
        not isinstance(tool, dict)
        or tool.get("type", "function") != "function"
        or not isinstance(tool.get("function"), dict)
    ):
        raise DecodeFailed(
            f'tools[{at}] is {_described(tool)}, wanted {{"type": "function", "function": {{"name", "parameters"}}}}'
        )
    name = tool["function"].get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
        raise DecodeFailed(f"tools[{at}].function.name is {name!r}, wanted 1 to 128 of letters, digits, _, . and -")
    return name


# ---- grammars -------------------------------------------------------------------------------------------------------


class AnswerShape(Struct, frozen=True):
    """The shape that an answer must have: calls of the tools, JSON, or either; at least one of them is there.

    form: of calls. schema: None where no JSON is wanted, True for any object; not checked yet. where: its place in the
    chat.
    """

    tools: ToolChoice | None
    form: CallForm
    schema: Any = None
    where: str = ""

    @property
    def is_forced(self) -> bool:
        """Whether the answer's first character is not free."""
        return self.tools is None or self.tools.is_required

    @property
    def key(self) -> str:
        """Return a text that is the same for what has the same guide."""
        tools = self.tools and [
            self.tools.definitions,
            self.tools.callable,
            self.tools.is_required,
            self.tools.is_parallel,
        ]
        return json.dumps([tools, self.form.mark, self.schema])

    def guide(self) -> Guide:
        """Return the guide. Raises DecodeFailed: a schema is wrong; Unsupported: no grammar can say it."""
        grammar = Grammar()
        answer = ""
        if self.schema is True:
            answer = grammar.any_object()
        elif self.schema is not None:
            answer = grammar.schema(checked(self.schema, self.where), self.where)
        return (
            Guide(grammar.text(answer)) if self.tools is None else _calls_guide(grammar, self.tools, self.form, answer)
        )


def _calls_guide(grammar: Grammar, tools: ToolChoice, form: CallForm, answer: str) -> Guide:
    one = either(*(form.call(name, Rule(_arguments(grammar, tools, name))) for name in tools.callable))
    if not answer and not tools.is_required and form.mark:
        more = Repeated(joined(form.between, one), 0, math.inf if form.is_list and tools.is_parallel else 0)
        is_once = not tools.is_parallel or form.is_list
        return Guide(grammar.text(grammar.piece(joined(one, more))), form.mark, form.begin, form.end, is_once)
    one = Rule(grammar.piece(one))
    most = MAX_CALLS - 1 if tools.is_parallel else 0
    if form.is_list:
        calls = joined(form.begin, one, Repeated(joined(form.between, one), 0, most), form.end)
    else:
        calls = joined(form.begin, one, form.end, Repeated(joined(form.between, form.begin, one, form.end), 0, most))
    if tools.is_required:
        return Guide(grammar.text(grammar.piece(calls)))
    return Guide(grammar.text(grammar.piece(either(calls, Rule(answer) if answer else _UNLIKE_CALLS))))


def _arguments(grammar: Grammar, tools: ToolChoice, name: str) -> str:
    at, function = next(
        (at, each["function"]) for at, each in enumerate(tools.definitions) if each["function"]["name"] == name
    )
    where = f"tools[{at}].function.parameters"
    schema = checked(function.get("parameters") or {"type": "object", "properties": {}}, where)
    if isinstance(schema, bool) or schema.get("type", "object") != "object":
        raise DecodeFailed(f'{where}: its type is not "object", as arguments have names')
    return grammar.schema(schema if "$ref" in schema else {**schema, "type": "object"}, where)


# ---- reading --------------------------------------------------------------------------------------------------------


class AnswerPart(Struct, frozen=True):
    """New text of an answer, and new calls, each whole. finish_reason: empty while it goes on."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""

    def before(self, last: AnswerPart) -> AnswerPart:
        """Return this part and the one behind it as one."""
        return AnswerPart(self.text + last.text, self.calls + last.calls, last.finish_reason)


class _At(Enum):
    """Where in an answer its reader is."""

    TEXT = 0
    CALL = 1
    BEHIND_CALL = 2
    END = 3


class CallReader:
    """Parts the text of one answer into what is said and what is called, as it comes.

    form: None where nothing is called; then all is said. Owns what it holds back: the beginning of what may be a mark,
    spaces before one, and a call that is not whole yet.
    """

    def __init__(
        self,
        form: CallForm | None,
        names: Sequence[str] = (),
        *,
        new_id: Callable[[], str] = lambda: secrets.token_hex(5)[:9],
    ) -> None:
        self._form = form
        self._names = frozenset(names)
        self._new_id = new_id
        self._held = ""
        self._at = _At.TEXT
        self._has_said = False
        self._is_in_list = False
        self._said: list[str] = []
        self._calls: list[ToolCall] = []
        self._has_calls = False

    def read(self, text: str) -> AnswerPart:
        """Take the next text, and return what is new for sure."""
        if self._form is None:
            return AnswerPart(text)
        self._held += text
        steps = {_At.TEXT: self._text, _At.CALL: self._call, _At.BEHIND_CALL: self._behind_call, _At.END: self._end}
        while self._form is not None and steps[self._at](self._form):
            pass
        made = AnswerPart("".join(self._said), tuple(self._calls))
        self._said, self._calls = [], []
        return made

    def close(self, finish: str) -> AnswerPart:
        """Return what is left when the engine has ended an answer by `finish`: "stop" or "length"."""
        text, self._held = self._held, ""
        if self._form is not None:
            if self._at is _At.CALL and finish == "stop" and not self._has_calls:
                text = self._form.mark + ("[" if self._is_in_list else "") + text
            elif self._at is not _At.TEXT or (self._has_calls and not text.strip()):
                text = ""
            elif finish == "length" and self._form.mark:
                text = text[: _end_kept(text, self._form.mark)]
        return AnswerPart(text, (), "tool_calls" if self._has_calls and finish == "stop" else finish)

    # Each step takes what it can from what is held, and returns whether another may follow.

    def _text(self, form: CallForm) -> bool:
        if not form.mark:
            begun = self._held.lstrip()
            if begun.startswith("{") and not self._has_said:
                self._held, self._at = begun, _At.CALL
                return True
            if begun:
                self._has_said = True
                self._say(self._held)
                self._held = ""
            return False
        before, mark, behind = self._held.partition(form.mark)
        if mark:
            self._say(before.rstrip())
            self._held, self._at = behind, _At.CALL
            return True
        kept = _end_kept(self._held, form.mark)
        self._say(self._held[:kept])
        self._held = self._held[kept:]
        return False

    def _call(self, form: CallForm) -> bool:
        rest = self._held.lstrip()
        if rest and form.is_list and not self._is_in_list:
            if rest[0] != "[":
                return self._gives_up(form)
            self._is_in_list = True
            rest = self._held = rest[1:].lstrip()
        name: Any = ""
        if form.divider:
            name, divider, rest = rest.partition(form.divider)
            if not divider:
                return False
        if rest and rest[0] != "{":
            return self._gives_up(form)
        if "}" not in rest:
            return False
        return self._take(form, name, rest)

    def _take(self, form: CallForm, name: Any, rest: str) -> bool:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return False  # not whole yet
        name, arguments = (name.strip(), value) if form.divider else (value.get("name"), value.get(form.arguments))
        if name not in self._names or not isinstance(arguments, dict):
            return self._gives_up(form)
        function = FunctionCall(name, json.dumps(arguments, ensure_ascii=False))
        self._calls.append(ToolCall(self._new_id(), function))
        self._has_calls = True
        self._held, self._at = rest[end:], _At.BEHIND_CALL
        return True

    def _behind_call(self, form: CallForm) -> bool:
        if not form.is_list:
            self._at = _At.END
            return True
        rest = self._held.lstrip()
        if rest:
            self._held, self._at = rest[1:], _At.CALL if rest[0] == "," else _At.END
            self._is_in_list = rest[0] == ","
        return bool(rest)

    def _end(self, form: CallForm) -> bool:
        end = form.end.strip().removeprefix("]") if form.mark else form.between.strip()
        rest = self._held.lstrip()
        if len(rest) < len(end) and end.startswith(rest):
            return False
        self._held, self._at = (rest.removeprefix(end), _At.TEXT) if rest.startswith(end) else (self._held, _At.TEXT)
        return True

    def _say(self, text: str) -> None:
        if text:
            self._said.append(text)

    def _gives_up(self, form: CallForm) -> bool:
        """Take a mark that no call follows as text, and all behind it."""
        self._say(form.mark + ("[" if self._is_in_list else "") + self._held)
        self._held, self._form = "", None
        return False


def _end_kept(text: str, mark: str) -> int:
    """Where the end of a text begins that may belong to a mark: spaces before it, and its first characters."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text[:-length].rstrip())
    return len(text.rstrip())


def _described(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
