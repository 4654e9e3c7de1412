"""Print a completion script: verbs, actions, options and their values, and the running daemon's model names.

bash: edge-runtime completion bash > ~/.local/share/bash-completion/completions/edge-runtime
zsh:  edge-runtime completion zsh > ~/.zfunc/_edge-runtime        (fpath+=~/.zfunc before compinit)
fish: edge-runtime completion fish > ~/.config/fish/completions/edge-runtime.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from edge_runtime import plugins
from edge_runtime.cli.main import parser_of, verb_names, verb_summaries
from edge_runtime.cli.screen import Screen
from edge_runtime.operations import MODEL, OPERATIONS

SHELLS = ("bash", "zsh", "fish")
MODEL_VERBS = ("infer", "bench", "tune")
MODEL_ACTIONS = [
    *(tuple(row.command.split()) for row in OPERATIONS.values() if row.command and MODEL in row.parameters),
    ("models", "try"),
]
NAMES = "edge-runtime models list --names 2>/dev/null"
"""The command by which a script gets model names; silent without a daemon."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Print the script."""
    plugins.try_all()  # a broken plug-in costs its own verb alone
    script = script_for(arguments.shell)
    if screen.wants_json:
        screen.json({"shell": arguments.shell, "script": script})
    else:
        screen.line(script)
    return 0


def script_for(shell: str) -> str:
    """Return the script of one of SHELLS; packages install all of them."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](*_words())


Words = Mapping[str, Sequence[str]]


def _words() -> tuple[Words, Words, Words]:
    """Return options and actions by verb, and values by "verb:option", from the parsers."""
    options: dict[str, list[str]] = {}
    actions: dict[str, list[str]] = {}
    values: dict[str, list[str]] = {}
    for verb in verb_names():
        parsers = list(parser_of(verb).all_parsers())
        options[verb] = sorted({option for parser in parsers for option in parser.options()})
        names = [parser.prog.split()[2:] for parser in parsers[1:]]
        actions[verb] = [name[0] for name in names if len(name) == 1]
        for parser in parsers:
            values |= {f"{verb}:{option}": found for option, found in parser.choices().items()}
    actions["completion"] = list(SHELLS)
    return options, actions, values


def _bash(options: Words, actions: Words, values: Words) -> str:
    return f"""\
# edge-runtime completion for bash
_edge_runtime() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}}
  local verb=${{COMP_WORDS[1]}} action=${{COMP_WORDS[2]}} words=
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{" ".join(verb_names())} --help --version"
  elif [[ $cur == -* ]]; then
    case $verb in
{_cases(options)}
    esac
  else
    case $verb:$prev in
{_cases(values)}
    esac
    [ "$words" ] || case $verb:$COMP_CWORD:$action in
{_cases(actions, suffix=":2:*", skip_empty=True)}
      {"|".join(f"{verb}:2:*" for verb in MODEL_VERBS)}) words=$({NAMES});;
      {"|".join(f"{verb}:3:{action}" for verb, action in MODEL_ACTIONS)}) words=$({NAMES});;
      *) compopt -o default 2>/dev/null; return;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -F _edge_runtime edge-runtime"""


def _zsh(options: Words, actions: Words, values: Words) -> str:
    return f"""\
#compdef edge-runtime
# edge-runtime completion for zsh
_edge_runtime() {{
  local verb=$words[2] action=$words[3]
  if (( CURRENT == 2 )); then
    local -a verbs=({" ".join(_quoted(f"{verb}:{summary}") for verb, summary in verb_summaries().items())})
    _describe verb verbs
  elif [[ $PREFIX == -* ]]; then
    case $verb in
{_cases(options, line="compadd -- {words}")}
    esac
  else
    case $verb:$words[CURRENT-1] in
{_cases(values, line="compadd -- {words}; return")}
    esac
    case $verb:$CURRENT:$action in
{_cases(actions, suffix=":3:*", line="compadd -- {words}", skip_empty=True)}
      {"|".join(f"{verb}:3:*" for verb in MODEL_VERBS)}) compadd -- ${{(f)"$({NAMES})"}};;
      {"|".join(f"{verb}:4:{action}" for verb, action in MODEL_ACTIONS)}) compadd -- ${{(f)"$({NAMES})"}};;
      *) _files;;
    esac
  fi
}}
# A file of that name in fpath is called for the first completion; elsewhere, as in .zshrc, it only says what to call.
if [[ $funcstack[1] == _edge-runtime ]]; then
  _edge_runtime "$@"
else
  compdef _edge_runtime edge-runtime
fi"""


def _fish(options: Words, actions: Words, values: Words) -> str:
    lines = ["# edge-runtime completion for fish", "complete -c edge-runtime -n __fish_use_subcommand -f"]
    for verb, summary in verb_summaries().items():
        lines.append(f"complete -c edge-runtime -n __fish_use_subcommand -f -a {verb} -d {_quoted(summary)}")
        seen = _quoted(f"__fish_seen_subcommand_from {verb}")
        for option in options[verb]:
            found = values.get(f"{verb}:{option}")
            taken = f" -x -a {_quoted(' '.join(found))}" if found else ""
            lines.append(f"complete -c edge-runtime -n {seen} -l {option.removeprefix('--')}{taken}")
        if actions[verb]:
            first = _quoted(f"__fish_seen_subcommand_from {verb}; and test (count (commandline -opc)) -eq 2")
            lines.append(f"complete -c edge-runtime -n {first} -f -a {_quoted(' '.join(actions[verb]))}")
    for words in (*MODEL_VERBS, *map(" ".join, MODEL_ACTIONS)):
        place = " ".join(f"__fish_seen_subcommand_from {word};" + " and" for word in words.split())
        where = _quoted(f"{place} test (count (commandline -opc)) -eq {len(words.split()) + 1}")
        lines.append(f"complete -c edge-runtime -n {where} -f -a {_quoted(f'({NAMES})')}")
    return "\n".join(lines)


def _cases(words: Words, *, suffix: str = "", line: str = 'words="{words}"', skip_empty: bool = False) -> str:
    return "\n".join(
        f"      {verb}{suffix}) {line.format(words=' '.join(found))};;"
        for verb, found in words.items()
        if found or not skip_empty
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
