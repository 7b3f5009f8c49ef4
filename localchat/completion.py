"""Completion in the shell: a script for each, and the hidden command that they ask, `localchat __complete`.

The scripts know nothing themselves, so they stay right when commands and models come and go. What is asked for is read
from the parsers, the registry and the names in the cache; nothing heavy is imported, because it runs at every Tab.

    localchat __complete SHELL INDEX WORD...    words as the shell has them, the program's first; INDEX is the current

One candidate a line, with a tab and a description; the line ":files" asks the shell for its own file names.
"""

import re
from collections.abc import Iterator, Sequence

from localchat import conversations, flags, registry, store
from localchat.arguments import ALIASES, COMMANDS, Parser, parser_for
from localchat.text_safety import one_line

FILES = ":files"
# What a shell inserts it also runs: names with any other character are left to the user's own fingers.
_HARMLESS = re.compile(r"[\w@%+=:,./-]+", re.ASCII)

_BASH = """\
# bash completion of localchat
_localchat() {
    local line
    COMPREPLY=()
    while IFS=$'\\t' read -r line _; do
        if [[ $line == :files ]]; then
            compopt -o default 2>/dev/null
        else
            COMPREPLY+=("$line")
        fi
    done < <("$1" __complete bash "$COMP_CWORD" "${COMP_WORDS[@]}" 2>/dev/null)
}
complete -F _localchat localchat
"""
_ZSH = """\
#compdef localchat
# zsh completion of localchat
_localchat() {
    local line files
    local -a found
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            files=1
        else
            found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
        fi
    done < <("${words[1]}" __complete zsh "$((CURRENT - 1))" "${words[@]}" 2>/dev/null)
    (( $#found )) && _describe localchat found
    [[ -n $files ]] && _files
    return 0
}
if [[ ${funcstack[1]} == _localchat ]]; then
    _localchat "$@"
else
    compdef _localchat localchat
fi
"""
_FISH = """\
# fish completion of localchat
function __localchat_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in ($words[1] __complete fish (count $words) $words "$current" 2>/dev/null)
        if test "$line" = ":files"
            __fish_complete_path "$current"
        else
            echo $line
        end
    end
end
complete -c localchat -f -a "(__localchat_complete)"
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def print_candidates(words: Sequence[str]) -> int:
    """The hidden command. What it does not understand has no candidates: a shell that waits for Tab shows no errors."""
    if len(words) < 2 or not words[1].isdecimal():
        return 0
    shell, line = words[0], list(words[2:])[: int(words[1]) + 1]
    line += [""] * (int(words[1]) + 1 == len(line) + 1)
    prefix = ""
    if shell == "bash":
        line, prefix = _joined(line)
    for value, description in candidates(line[1:]):
        if _HARMLESS.fullmatch(value):
            print(f"{value.removeprefix(prefix)}\t{one_line(description)}" if value != FILES else FILES)
    return 0


def candidates(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(what the last of `words` may become, what that is); FILES where a file's name is wanted.

    `words` are those behind the program's name, the last one unfinished and perhaps empty.
    """
    *before, word = words or [""]
    if not before:
        names = COMMANDS | {alias: f"{command}" for alias, command in ALIASES.items()}
        names |= {"--help": "list the commands", "--version": "say the version"} if word.startswith("-") else {}
        yield from _starting(word, names)
        return
    command = ALIASES.get(before[0], before[0])
    if command not in COMMANDS:
        return
    parser = parser_for(command)
    if "--" not in before:
        flag, given, value = word.partition("=")
        if given and word.startswith("--"):
            yield from ((f"{flag}={v}" if v != FILES else v, text) for v, text in _values(parser, flag, value))
            return
        if word.startswith("-"):
            yield from _starting(word, {name: action.help or "" for name, action in parser.actions.items()})
            return
        if _wants_value(parser, before[-1]):
            yield from _values(parser, before[-1], word)
            return
    yield from _positional(parser, command, before[1:], word)


def _joined(line: list[str]) -> tuple[list[str], str]:
    """bash cuts words at "=": `--color=au` is three. Put together again, and what of the last one bash has already."""
    joined: list[str] = []
    for word in line:
        if joined and (word == "=" or joined[-1].endswith("=")) and joined[-1].startswith("--"):
            joined[-1] += word
        else:
            joined.append(word)
    at_value = joined[-1:] != line[-1:] and "=" in joined[-1]
    return joined, joined[-1].partition("=")[0] + "=" if at_value else ""


def _starting(word: str, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((name, text) for name, text in names.items() if name.startswith(word))


def _wants_value(parser: Parser, flag: str) -> bool:
    action = parser.actions.get(flag)
    return action is not None and action.nargs is None


def _values(parser: Parser, flag: str, word: str) -> Iterator[tuple[str, str]]:
    """What may stand behind `flag`."""
    action = parser.actions.get(flag)
    if flag in parser.takes_file:
        yield FILES, ""
    elif flag == "--session":
        yield from _starting(word, dict.fromkeys(conversations.names(), ""))
    elif action is not None:
        choices = flags.THINK if action.dest == "think" else action.choices or ()
        yield from _starting(word, dict.fromkeys(map(str, choices), ""))


def _positional(parser: Parser, command: str, before: Sequence[str], word: str) -> Iterator[tuple[str, str]]:
    """What the next word without a flag may be."""
    words = [w for at, w in enumerate(before) if not w.startswith("-") and not _wants_value(parser, before[at - 1])]
    action = parser.positionals[len(words)] if len(words) < len(parser.positionals) else None
    if command == "sessions" and words:
        yield from _starting(word, dict.fromkeys(conversations.names(), ""))
    if action is None or action.dest == "names":
        return
    if action.choices:
        yield from _starting(word, dict.fromkeys(map(str, action.choices), ""))
    elif action.dest in ("model", "source"):
        found = list(_starting(word, _models(only_here=command == "rm")))
        yield from found or [(FILES, "")]


def _models(*, only_here: bool) -> dict[str, str]:
    """Names of models, those on this machine first."""
    here = {stored.name: "on this machine" for stored in store.listing() if not stored.name.startswith("/")}
    return (
        here if only_here else here | {e.alias: "to download" for e in registry.MODELS.values() if e.alias not in here}
    )
