"""The command that teaches a shell the words of all the others: completion."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

BASH = """_gradproof() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" options="" file
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$current")); return ;;
    esac
    case "${{COMP_WORDS[1]}}" in
        {readers})
            for file in runs/*/run.json "$current"*/run.json; do
                [[ -e "$file" && "$file" == "$current"* ]] && COMPREPLY+=("${{file%/run.json}}")
            done ;;
    esac
}}
complete -o default -F _gradproof gradproof
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = """function __gradproof_is
    set -l words (commandline -opc)
    contains -- "$words[2]" $argv
end
function __gradproof_runs
    for file in runs/*/run.json (commandline -ct)*/run.json
        string replace /run.json '' -- $file
    end
end
"""


def add_completion(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "completion",
        help="commands, options and runs completed by your shell",
        description="Prints what bash, zsh or fish has to read to complete gradproof's commands, options and runs.",
        epilog='example: eval "$(gradproof completion bash)" in ~/.bashrc, zsh in ~/.zshrc; '
        "gradproof completion fish > ~/.config/fish/completions/gradproof.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(function=print_completion)


def print_completion(args: argparse.Namespace) -> int:
    from gradproof.cli import build_parser

    commands = list(read_commands(build_parser()))
    if args.shell == "fish":
        print(for_fish(commands), end="")
    else:
        print(ZSH * (args.shell == "zsh") + for_bash(commands), end="")
    return 0


@dataclass(frozen=True)
class Command:
    """What a shell knows of a command."""

    name: str
    does: str
    options: dict[str, str]  # each with its help
    reads_runs: bool  # its arguments are runs


def read_commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    said = {action.dest: action.help or "" for action in commands._choices_actions}
    for name, command in commands.choices.items():
        options = {
            option: (action.help or "").replace("%%", "%")
            for action in command._actions
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
            if option.startswith("--")
        }
        reads_runs = any(str(action.metavar).startswith("RUN") for action in command._actions)
        yield Command(name, said.get(name, ""), options, reads_runs)


def for_bash(commands: list[Command]) -> str:
    cases = "\n".join(f'        {c.name}) options="{" ".join(c.options)}" ;;' for c in commands)
    readers = "|".join(c.name for c in commands if c.reads_runs)
    return BASH.format(commands=" ".join(c.name for c in commands), cases=cases, readers=readers)


def for_fish(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        chosen = quoted(f"__gradproof_is {command.name}")
        lines.append(
            f"complete -c gradproof -n __fish_use_subcommand -f -a {command.name} -d {quoted(command.does)}"
        )
        if command.reads_runs:
            lines.append(f"complete -c gradproof -n {chosen} -a '(__gradproof_runs)' -d run")
        for option, text in command.options.items():
            lines.append(f"complete -c gradproof -n {chosen} -l {option[2:]} -d {quoted(text)}")
    return FISH + "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
