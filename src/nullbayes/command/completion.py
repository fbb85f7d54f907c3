"""``nullbayes completion``: what a shell needs to complete the command line, made from the parser itself."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from nullbayes.command.frame import Command, Console, Refusal


@dataclass(frozen=True)
class _Option:
    """An option of a command: how it is spelled, what it means, and what may follow it."""

    names: tuple[str, ...]
    about: str
    choices: tuple[str, ...]
    takes_value: bool


@dataclass(frozen=True)
class _Entry:
    """A command with its options, and the words that may stand without an option."""

    name: str
    about: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(options: argparse.Namespace, console: Console) -> int:
    """Print the completion of a shell."""
    from nullbayes.command import build_parser

    entries = list(_entries(build_parser()))
    text = {"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](entries)
    console.result(text, {"shell": options.shell, "script": text})
    return 0


def _entries(parser: argparse.ArgumentParser) -> Iterator[_Entry]:
    """Iterate over the commands of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                options = tuple(_option(each) for each in sub._actions if each.option_strings)
                words = [str(word) for each in sub._actions if not each.option_strings for word in each.choices or ()]
                yield _Entry(name, about.get(name, ""), options, tuple(words) + _names_of(name))
            return
    msg = "The parser has no commands."
    raise Refusal(msg)


def _names_of(command: str) -> tuple[str, ...]:
    """Return the words of a command that its parser does not list."""
    from nullbayes.experiments import names

    return tuple(names()) if command == "reproduce" else ()


def _option(action: argparse.Action) -> _Option:
    about = (action.help or "").replace("%%", "%").partition(" (default")[0]
    return _Option(tuple(action.option_strings), about, tuple(map(str, action.choices or ())), action.nargs != 0)


def _flags(entry: _Entry) -> str:
    return " ".join(name for option in entry.options for name in option.names)


def _chosen(entries: list[_Entry]) -> Iterator[tuple[str, str, str]]:
    """Iterate over the options that have a list of values: the command, the spellings, the values."""
    for entry in entries:
        for option in entry.options:
            if option.choices:
                yield entry.name, "|".join(option.names), " ".join(option.choices)


def _bash(entries: list[_Entry]) -> str:
    cases = "\n".join(f'        {e.name}) words="{" ".join([*e.words, _flags(e)])}" ;;' for e in entries)
    values = "\n".join(
        f'        "{name} "{spelling}) COMPREPLY=($(compgen -W "{words}" -- "$current")); return ;;'
        for name, spellings, words in _chosen(entries)
        for spelling in spellings.split("|")
    )
    return f"""\
# bash: eval "$(nullbayes completion bash)", in ~/.bashrc for example
_nullbayes() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(e.name for e in entries)} --help --version" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _nullbayes nullbayes"""


def _zsh(entries: list[_Entry]) -> str:
    commands = "\n".join(f"        {_quoted(f'{e.name}:{e.about}')}" for e in entries)
    cases = "\n".join(
        "        {}) _arguments {} ;;".format(e.name, " ".join([*_zsh_options(e), _zsh_rest(e)])) for e in entries
    )
    return f"""\
# zsh: eval "$(nullbayes completion zsh)", in ~/.zshrc behind compinit
_nullbayes() {{
    local -a commands
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$command" in
{cases}
    esac
}}
compdef _nullbayes nullbayes"""


def _zsh_options(entry: _Entry) -> Iterator[str]:
    for option in entry.options:
        about = option.about.replace("[", "(").replace("]", ")").replace(":", " -")
        value = f":value:({' '.join(option.choices)})" if option.choices else ":value:_files" * option.takes_value
        yield from (_quoted(f"{name}[{about}]{value}") for name in option.names)


def _zsh_rest(entry: _Entry) -> str:
    return _quoted(f"*:word:({' '.join(entry.words)})" if entry.words else "*:file:_files")


def _fish(entries: list[_Entry]) -> str:
    lines = ["# fish: nullbayes completion fish | source, in ~/.config/fish/config.fish for example"]
    for entry in entries:
        lines.append(f"complete -c nullbayes -n __fish_use_subcommand -f -a {entry.name} -d {_quoted(entry.about)}")
        when = f"complete -c nullbayes -n '__fish_seen_subcommand_from {entry.name}'"
        lines += [f"{when} -f -a {_quoted(' '.join(entry.words))}"] if entry.words else []
        for option in entry.options:
            spelled = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            values = f" -x -a {_quoted(' '.join(option.choices))}" if option.choices else " -r" * option.takes_value
            lines.append(f"{when} {spelled}{values} -d {_quoted(option.about)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "’") + "'"


COMMAND = Command(
    "completion",
    "print what a shell needs to complete this command",
    "Prints a script for bash, zsh or fish that completes commands, options and their values. The shell reads it when "
    "it starts.",
    'eval "$(nullbayes completion bash)"',
    _arguments,
    run,
)
