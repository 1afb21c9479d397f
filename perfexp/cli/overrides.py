"""Overrides: what stands on a command line, as Hydra reads it: values, axes of a sweep, and what is refused there."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import accumulate, pairwise, product
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, QuotedString, RangeSweep, Sweep

from perfexp.cli.flags import MAX_JOBS, MULTIRUN
from perfexp.cli.usage import COMMANDS
from perfexp.errors import UserError, did_you_mean
from perfexp.host import credentials, installation
from perfexp.plan.hydra_errors import FOREIGN_ERRORS, user_error
from perfexp.sweep import MOST_POINTS

#: Hydra's own settings that are taken; the others would say where output and logs go, which perfexp decides.
_HYDRA_KEYS = re.compile(r"hydra\.(mode|searchpath)|hydra/(launcher|sweeper)|hydra\.(launcher|sweeper|callbacks)\..+")
_SWEEPER_PARAMS = "hydra.sweeper.params"
_MOST_JOBS = 1000
#: Where counting ends: a longer range is not told more exactly.
_ENDLESS = 10**15
#: Limits on a stored command, in overrides and characters: a longer one would keep the parser busy for minutes.
_MOST_OVERRIDES, _MOST_STORED = 500, 50_000
#: Limit on the overrides of all runs of a stored sweep together.
_MOST_TEXTS = 200_000
#: Limits on one argument.
_MOST_CHARACTERS, _MOST_NESTED, _MOST_DIGITS = 10_000, 32, 400


def jobs_of(command: Sequence[str], params: Mapping[str, Any]) -> list[list[str]]:
    """The overrides of each run of a sweep, as Hydra hands them to its jobs; nothing is composed.

    Args:
        command: of the sweep.
        params: axes that a configuration file gives to the sweeper.

    Raises:
        UserError: they can't be told from the command.
    """
    given = [f"{key}={value}" for key, value in params.items()] + [text for text in command if text[:1] != "-"]
    refuse_length(given)
    values: dict[str, list[str]] = {}
    try:
        overrides = _parse(given)
        refuse_many(overrides, MOST_POINTS)
        for override in overrides:
            key = override.get_key_element()
            if override.is_sweep_override() and not override.is_hydra_override():
                values[key] = [f"{key}={text}" for text in override.sweep_string_iterator()]
            elif not override.is_hydra_override():
                values[key] = [f"{key}={override.get_value_element_as_str()}"]
    except FOREIGN_ERRORS as error:
        raise user_error(error) from error
    if math.prod(map(len, values.values())) * len(values) > _MOST_TEXTS:
        raise UserError("the stored command has more runs and overrides than can be told apart in a moment")
    return [list(job) for job in product(*values.values())]


def refuse_length(command: Sequence[str]) -> None:
    """Refuse a stored command that would take long to read.

    Args:
        command: its overrides.

    Raises:
        UserError: it is longer than anything that people type.
    """
    if len(command) > _MOST_OVERRIDES or sum(map(len, command)) > _MOST_STORED:
        raise UserError(f"the stored command has {len(command):,} overrides of {sum(map(len, command)):,} characters")


def parsed(arguments: Sequence[str]) -> list[Override]:
    """The arguments that are overrides, parsed; Hydra's own flags are not.

    Args:
        arguments: command line.

    Raises:
        UserError: one is too long, or nested too deeply.
    """
    return _parse([text for text in arguments if "=" in text and text[0] != "-"])


def refuse_no_names(arguments: Sequence[str]) -> None:
    """Refuse what is no name where one of a group's options is wanted, which Hydra itself does not expect.

    Args:
        arguments: command line.

    Raises:
        UserError: a group is given a number, null or a mapping.
    """
    for override in parsed(arguments):
        value = override.value()
        names = value if isinstance(value, list) else [value]
        is_name = all(isinstance(name, str | QuotedString) for name in names) or isinstance(value, Sweep | Glob)
        if not is_name and (installation.conf_dir() / override.key_or_group).is_dir():
            raise UserError(f"'{override.input_line}' names no option: say {override.key_or_group}=NAME.")


def _parse(texts: list[str]) -> list[Override]:
    refuse_unreadable(texts)
    hydra = GlobalHydra.instance()  # while it runs, it knows the options that a glob stands for
    loader: Any = hydra.config_loader() if hydra.is_initialized() else _Offered()
    return OverridesParser.create(config_loader=loader).parse_overrides(texts)


class _Offered:
    """What a glob stands for where Hydra does not run: the options of conf/."""

    def get_group_options(self, group_name: str, **_: Any) -> list[str]:
        """The names of a group's options, as Hydra's loader gives them."""
        return sorted(file.stem for file in installation.conf_dir().glob(f"{group_name}/*.yaml"))


def refuse_unreadable(arguments: Sequence[str]) -> None:
    """An argument that would keep Hydra's parser busy for hours, or overflow its stack.

    Args:
        arguments: command line.

    Raises:
        UserError: one is too long, or nested too deeply.
    """
    for text in arguments:
        shown = f"'{text[:40]}…'"
        if len(text) > _MOST_CHARACTERS:
            raise UserError(f"{shown} has {len(text):,} characters: at most {_MOST_CHARACTERS:,}.")
        if re.search(rf"\d{{{_MOST_DIGITS}}}", text):
            raise UserError(f"{shown} has a number of {_MOST_DIGITS} digits or more.")
        depths = accumulate((character in "[{(") - (character in "]})") for character in text)
        if max(depths, default=0) > _MOST_NESTED:
            raise UserError(f"{shown} is nested more than {_MOST_NESTED} deep.")


def refuse_many(overrides: Sequence[Override], most: int) -> None:
    """Refuse a sweep without any run, or of more runs than a limit; they are counted, not listed.

    Args:
        overrides: of the sweep.
        most: the limit.

    Raises:
        UserError: it has none, or more.
    """
    swept = [override for override in overrides if override.is_discrete_sweep()]
    counts = {override.get_key_element(): _count(override) for override in swept}
    if empty := [override.input_line for override in swept if not counts[override.get_key_element()]]:
        raise UserError(f"The sweep has no runs: '{empty[0]}' matches no value.")
    if (jobs := math.prod(counts.values())) > most:
        counted = " × ".join(f"{key}: {count:,}" for key, count in counts.items() if count != 1)
        raise UserError(f"The sweep has {jobs:,} runs ({counted}): at most {most:,}. {MAX_JOBS} N raises the limit.")


def _count(override: Override) -> int:
    """How many values an override has, by arithmetic where it is a range.

    Raises:
        UserError: there is no end to them.
    """
    swept = override.value()
    if not isinstance(swept, RangeSweep):
        return sum(1 for _ in override.sweep_iterator())
    if not all(math.isfinite(bound) for bound in (swept.start or 0, swept.stop or 0, swept.step)) or not swept.step:
        raise UserError(f"'{override.input_line}' has no end: start and stop have to be finite, step not 0.")
    start, stop, step = (Fraction(bound) for bound in (swept.start or 0, swept.stop or 0, swept.step))
    return min(max(0, math.ceil((stop - start) / step)), _ENDLESS)


@contextmanager
def limited_jobs(most: int) -> Iterator[None]:
    """While entered, Hydra counts the runs of a sweep before it lists them; what a file makes vary is counted too.

    Args:
        most: the limit.
    """
    from hydra.core.plugins import Plugins
    from hydra.plugins.sweeper import Sweeper

    # its module is loaded anew when plugins are looked for: an import may give another class than the one in use
    [basic] = [kind for kind in Plugins.instance().discover(Sweeper) if kind.__name__ == "BasicSweeper"]
    sweeper: Any = basic
    split = sweeper.split_arguments

    def counted(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        refuse_many(overrides, most)
        batches: list[list[list[str]]] = split(overrides, max_batch_size)
        return batches

    sweeper.split_arguments = staticmethod(counted)
    try:
        yield
    finally:
        sweeper.split_arguments = staticmethod(split)


def without_max_jobs(arguments: Sequence[str]) -> tuple[list[str], int]:
    """A command line without perfexp's own flag, `--max-jobs N` or `--max-jobs=N`, and its value or the default.

    Args:
        arguments: as the user typed them.

    Raises:
        UserError: the value is no number.
    """
    others: list[str] = []
    most, words = _MOST_JOBS, iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != MAX_JOBS:
            others.append(word)
            continue
        value = value if equals else next(words, "")
        if not re.fullmatch("[1-9][0-9]{0,6}", value):
            raise UserError(f"{MAX_JOBS} {value[:40]}: a whole number from 1 to 9,999,999.")
        most = int(value)
    return others, most


def axes_of(arguments: Sequence[str]) -> dict[str, int]:
    """The overrides that vary, each with how many values it has; 0 where that can't be known.

    Args:
        arguments: command line.
    """
    return {
        override.key_or_group: _count(override) if override.is_discrete_sweep() else 0
        for override in parsed(arguments)
        if override.is_sweep_override() and not override.is_hydra_override()
    }


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """The values of one job's overrides, as they are written.

    Args:
        overrides: of the job.
    """
    pairs = zip(overrides, parsed(overrides), strict=True)
    return {override.key_or_group: text.partition("=")[2] for text, override in pairs}


def refuse_words(arguments: Sequence[str]) -> None:
    """A word that is neither an override nor a flag, nor the value of one, was meant as a command.

    Args:
        arguments: command line.

    Raises:
        UserError: there is such a word.
    """
    for before, word in pairwise(["", *arguments]):
        of_flag = before.startswith("-") and "=" not in before and before not in MULTIRUN
        if not of_flag and "=" not in word and word[:1] not in ("-", "~", ""):
            if word in COMMANDS:
                raise UserError(f"'{word}' is a command, and comes first: perfexp {word} …")
            raise UserError(f"'{word}' is neither a command nor KEY=VALUE. {did_you_mean(word, COMMANDS)}")


def is_of_hydra(argument: str) -> bool:
    """Whether an argument sets something of Hydra's own.

    Args:
        argument: an override.
    """
    return re.match(r"~hydra\b|\+*hydra\b[^=]*=", argument) is not None


def refuse_hydra_settings(arguments: Sequence[str]) -> None:
    """Refuse settings of Hydra's own that would have no effect on a measurement, or a wrong one.

    Args:
        arguments: command line.

    Raises:
        UserError: there is one.
    """
    for text in filter(is_of_hydra, arguments):
        key = text.lstrip("+~").partition("=")[0]
        if key.startswith(_SWEEPER_PARAMS):
            raise UserError(f"{key} is for configuration files: on a command line say -m KEY=A,B.")
        if not _HYDRA_KEYS.fullmatch(key):
            raise UserError(
                f"{key} is not taken: perfexp decides where Hydra's own output and logs go. "
                "output_dir=DIR says where results go; run.log in there is the log."
            )


def refuse_targets(arguments: Sequence[str]) -> None:
    """Code is chosen by files of conf/ and of --config-dir, never on the command line, and never unpickled.

    Args:
        arguments: command line.

    Raises:
        UserError: one of them chooses code.
    """
    for argument in arguments:
        if argument.startswith("--experimental-rerun"):
            raise UserError("--experimental-rerun reads a pickle; the command in record.json repeats a run.")
        if "_target_" in argument:
            raise UserError(f"'{argument}': a _target_ is honoured in configuration files only; see --config-dir.")


def alternatives(override: Override) -> list[Any]:
    """The values that an override gives a key, one for each run of a sweep, as plain data.

    A range and an interval are numbers, of which 0 stands for all. A glob has none: it chooses among options only.

    Args:
        override: from `parsed`.
    """
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return list(map(_plain, value.list))
    if isinstance(value, Glob):
        return []
    return [0 if isinstance(value, Sweep) else _plain(value)]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return list(map(_plain, value))
    return value.text if isinstance(value, QuotedString) else value


def without_credentials(arguments: Sequence[str]) -> list[str]:
    """A command line in which no URL carries a credential: everything that is written, printed or sent comes from it.

    Args:
        arguments: as the user typed them.

    Raises:
        UserError: a credential stands where it cannot be taken out of.
    """
    return [_without_credentials(text) if "://" in text else text for text in arguments]


def _without_credentials(argument: str) -> str:
    try:
        [override] = parsed([argument])
        values = alternatives(override)
    except Exception:  # Hydra reports what is wrong with it
        return re.sub(r"(?s)(?<=://).*@", "***@", credentials.mask(argument))
    key = override.key_or_group
    if any(isinstance(value, str) and "@" in value and "://" not in value for value in values):
        raise UserError(f"{key}: quote a URL whose password has a comma: {key}='…'.")
    resolved = [value for value in values if "${" not in str(value)]  # what is interpolated is hidden in the plan
    hidden = {str(value): credentials.hide(value) for value in resolved}
    if all(hidden[str(value)] == value for value in resolved):
        return argument
    if not all(isinstance(value, str) for value in values):
        raise UserError(f"{key}: a URL with a credential must be a value of its own.")
    return f"{argument.partition('=')[0]}={','.join(quoted(hidden.get(value, value)) for value in values)}"


def quoted(text: str) -> str:
    """Any text as one value of Hydra's grammar.

    Args:
        text: the value.
    """
    escaped = re.sub(r"(\\*)('|$)", r"\1\1\2", text).replace("'", "\\'")
    return f"'{escaped}'"
