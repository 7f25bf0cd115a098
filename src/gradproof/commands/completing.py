"""The command that teaches a shell the words of all the others: completion."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

BASH = """_gradproof() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" options=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$current")) ;;
    esac
}}
complete -o default -F _gradproof gradproof
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_completion(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "completion",
        help="commands and options completed by your shell",
        description="Prints what bash, zsh or fish has to read to complete gradproof's commands and options.",
        epilog='example: eval "$(gradproof completion bash)" in ~/.bashrc; '
        "gradproof completion fish > ~/.config/fish/completions/gradproof.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(function=print_completion)


def print_completion(args: argparse.Namespace) -> int:
    from gradproof.cli import build_parser

    words = dict(read_commands(build_parser()))
    print(
        for_fish(words) if args.shell == "fish" else (ZSH * (args.shell == "zsh")) + for_bash(words), end=""
    )
    return 0


Words = dict[str, tuple[str, list[tuple[str, str]]]]  # command -> what it does; its options with their help


def read_commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, tuple[str, list[tuple[str, str]]]]]:
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    said = {action.dest: action.help or "" for action in commands._choices_actions}
    for name, command in commands.choices.items():
        options = [
            (option, (action.help or "").replace("%%", "%"))
            for action in command._actions
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
            if option.startswith("--")
        ]
        yield name, (said.get(name, ""), options)


def for_bash(words: Words) -> str:
    cases = "\n".join(
        f'        {name}) options="{" ".join(option for option, _ in options)}" ;;'
        for name, (_, options) in words.items()
    )
    return BASH.format(commands=" ".join(words), cases=cases)


def for_fish(words: Words) -> str:
    lines = []
    for name, (said, options) in words.items():
        lines.append(f"complete -c gradproof -n __fish_use_subcommand -f -a {name} -d {quoted(said)}")
        for option, text in options:
            seen = quoted(f"__fish_seen_subcommand_from {name}")
            lines.append(f"complete -c gradproof -n {seen} -l {option[2:]} -d {quoted(text)}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
