"""Refusals: words and overrides of a command line that have no effect, a wrong one, or choose code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from hydra.core.override_parser.types import Glob, QuotedString, Sweep

from perfexp.cli.flags import MULTIRUN
from perfexp.cli.overrides import parsed
from perfexp.cli.usage import COMMANDS
from perfexp.errors import UserError, did_you_mean
from perfexp.host import installation

#: Accepted settings of Hydra; the others concern output and logs, which perfexp decides on.
_HYDRA_KEYS = re.compile(r"hydra\.(mode|searchpath)|hydra/(launcher|sweeper)|hydra\.(launcher|sweeper|callbacks)\..+")
_SWEEPER_PARAMS = "hydra.sweeper.params"


def refuse_words(arguments: Sequence[str]) -> None:
    """Raise UserError for a word that is neither a flag nor its value nor an override: it was meant as a command."""
    for before, word in pairwise(["", *arguments]):
        of_flag = before.startswith("-") and "=" not in before and before not in MULTIRUN
        if not of_flag and "=" not in word and word[:1] not in ("-", "~", ""):
            if word in COMMANDS:
                raise UserError(f"'{word}' is a command, and comes first: perfexp {word} …")
            raise UserError(f"'{word}' is neither a command nor KEY=VALUE. {did_you_mean(word, COMMANDS)}")


def refuse_no_names(arguments: Sequence[str]) -> None:
    """Raise UserError if a group is set to a number, null or a mapping; Hydra itself crashes on them."""
    for override in parsed(arguments):
        value = override.value()
        names = value if isinstance(value, list) else [value]
        is_name = all(isinstance(name, str | QuotedString) for name in names) or isinstance(value, Sweep | Glob)
        if not is_name and (installation.conf_dir() / override.key_or_group).is_dir():
            raise UserError(f"'{override.input_line}' is not an option: set {override.key_or_group}=NAME.")


def is_of_hydra(argument: str) -> bool:
    """Whether an override sets something of Hydra's own."""
    return re.match(r"~hydra\b|\+*hydra\b[^=]*=", argument) is not None


def refuse_hydra_settings(arguments: Sequence[str]) -> None:
    """Raise UserError for settings of Hydra that would have no effect on a measurement, or a wrong one."""
    for text in filter(is_of_hydra, arguments):
        key = text.lstrip("+~").partition("=")[0]
        if key.startswith(_SWEEPER_PARAMS):
            raise UserError(f"{key} is for configuration files: on a command line use -m KEY=A,B.")
        if not _HYDRA_KEYS.fullmatch(key):
            remedy = "Set output_dir=DIR for results; run.log in there is the log."
            raise UserError(f"{key} is not accepted: perfexp decides where Hydra's output and logs go. {remedy}")


def refuse_targets(arguments: Sequence[str]) -> None:
    """Raise UserError for code chosen on the command line; only files choose code, and nothing is unpickled."""
    for argument in arguments:
        if argument.startswith("--experimental-rerun"):
            raise UserError("--experimental-rerun reads a pickle; repeat the command in record.json instead.")
        if "_target_" in argument:
            raise UserError(f"'{argument}': a _target_ is honored in configuration files only; see --config-dir.")
