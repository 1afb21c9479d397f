"""Candidates for the word at the cursor, and the shell scripts that query them.

A shell runs `perfexp --complete WORDS…` at each Tab, so nothing heavy is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from perfexp.cli.conf_files import config_values, options_below
from perfexp.cli.usage import COMMANDS
from perfexp.errors import UserError, did_you_mean
from perfexp.host import installation
from perfexp.models import torchvision_names
from perfexp.plan.flags import (
    CONFIG_DIR,
    DRY_RUN,
    JSON,
    MAX_JOBS,
    MULTIRUN,
    OVERWRITE,
    VERBOSE,
    flag_values,
)

#: First word of a shell's query for candidates; the words up to the cursor follow.
QUERY = "--complete"
_FLAGS = (
    *MULTIRUN,
    *VERBOSE,
    *CONFIG_DIR,
    DRY_RUN,
    JSON,
    MAX_JOBS,
    OVERWRITE,
    "--cfg",
    "--help",
    "--version",
    "--hydra-help",
)
#: Keys whose values are folders.
_FOLDERS = ("output_dir", "resume", "data.root", "model.weights_dir", "speed_dir")
#: Folder names that shells and terminals read as they are; bash inserts a candidate unquoted.
_PLAIN = re.compile(r"[\w@%+=:,.-]+")
#: Scripts by shell. Words are passed as the user typed them and never evaluated.
_SCRIPTS = {
    "bash": """_perfexp() {
    local line="${COMP_LINE:0:COMP_POINT}" candidate
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    # bash breaks words at = and : and replaces what follows
    local word="${words[-1]}"
    local prefix="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("${candidate#"$prefix"}")
    done < <(perfexp --complete "${words[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _perfexp perfexp
""",
    "zsh": """#compdef perfexp
_perfexp() {
    local -a candidates
    candidates=("${(@f)$(perfexp --complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -a candidates
    (( ${#candidates} )) || _files
}
compdef _perfexp perfexp
""",
    "fish": """function __perfexp
    perfexp --complete (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null
end
complete -c perfexp -f -a '(__perfexp)'
complete -c perfexp -F -n 'test -z "(__perfexp)"'
""",
}


def script(shell: str) -> str:
    """Return the completion script for a shell, for `perfexp completion SHELL`.

    Raises:
        UserError: there is no script for this shell.
    """
    if shell not in _SCRIPTS:
        raise UserError(f"completion for '{shell}' not found. {did_you_mean(shell, _SCRIPTS)}")
    return _SCRIPTS[shell]


def candidates(words: Sequence[str]) -> list[str]:
    """Return the words that may complete the last word, sorted.

    They are commands, keys, options of groups, flags and folders.

    Args:
        words: words after `perfexp`, up to the cursor; the last one may be empty.
    """
    *before, word = words or [""]
    return sorted({text for text in _candidates(before, word) if text.startswith(word)})


def _candidates(before: Sequence[str], word: str) -> Iterable[str]:
    """Return words that may stand at this place, whatever the word's beginning.

    Args:
        before: words before the cursor's word.
        word: word up to the cursor.
    """
    conf = installation.conf_dir()
    options = options_below([conf, *map(Path, flag_values(before, *CONFIG_DIR))])
    command = before[0] if before else ""
    key, equals, value = word.partition("=")
    if before and before[-1] in CONFIG_DIR:
        return _folders(word)
    if equals and (key in CONFIG_DIR or key in _FOLDERS):
        return [f"{key}={folder}" for folder in _folders(value)]
    if command == "list":
        return ["runs", *options]
    if command in COMMANDS:
        return ["--help", *_folders(word)]
    if equals:
        group = key.lstrip("+~")
        names = list(options.get(group, ()))
        if group == "model":
            names += torchvision_names.names()
        start, comma, _ = value.rpartition(",")  # several options are a sweep
        return [f"{key}={start}{comma}{name}" for name in names]
    if word.startswith("-"):
        return _FLAGS
    keys = [f"{name}=" for name in (*options, *config_values(conf), "resume")]
    if before:
        return keys
    return [*COMMANDS, *keys]


def _folders(word: str) -> list[str]:
    """Return the folders with plain names that complete a path, each with a slash at its end.

    The shell's own completion has the others, in quotes.
    """
    start, slash, _ = word.rpartition("/")
    parent = start + slash
    try:
        paths = filter(Path.is_dir, Path(parent or ".").expanduser().iterdir())
        return [f"{parent}{path.name}/" for path in paths if _PLAIN.fullmatch(path.name)]
    except OSError:
        return []
