"""Translate errors from Hydra and OmegaConf into messages with the nearest valid name.

`as_perfexp_error` is the last step before an error is printed: it turns any exception of a command
or run into a `PerfexpError`.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import Container, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from perfexp.errors import PerfexpError, UserError, did_you_mean, nearest
from perfexp.host import crash_report
from perfexp.host.files import disk_error
from perfexp.host.installation import is_here_on_path
from perfexp.models import torchvision_names

#: Beginning of Hydra's error for a value with commas, and part of OmegaConf's for a single value
#: instead of a list.
_SEVERAL, _NO_LIST = "Ambiguous value", "is not a ListConfig"
#: Hydra's errors for a group that is added though it is among the defaults.
_TWICE = re.compile(
    r"^Multiple values for \S+\. .*'override (\S+): (\S+)'"
    r"|^force-add of config groups .*'\+\+([^=]+)=(.*)'"
)
#: Least similarity for suggesting a section's key: there are many, and short words resemble some.
_SIMILAR = 0.75
#: Options of the group precision by names of torch and of other tools.
OF_TORCH = {
    **dict.fromkeys(("float32", "float", "single", "full"), ("torch", "fp32")),
    **dict.fromkeys(("float16", "half"), ("fp16",)),
    **dict.fromkeys(("bfloat16", "brain"), ("bf16",)),
    **dict.fromkeys(("amp", "autocast", "mixed"), ("amp_fp16", "amp_bf16")),
    **dict.fromkeys(("tensorfloat32", "high"), ("tf32",)),
    "highest": ("fp32",),
}
#: OmegaConf's errors for a value of another type, each with perfexp's message.
_WRONG = {
    r"Value '(.*)' of type .* could not be converted to Float": "{key}={0}: set a number.",
    r"Value '(.*)' of type .* could not be converted to Integer": "{key}={0}: set an integer.",
    r"Value '(.*)' is not a valid bool": "{key}={0}: set true or false.",
    r"Cannot convert '(.*)' to string": "{key}: set a text, not a {0}.",
    r"[Ff]ield '.*' is not Optional": "{key}=null: set a value.",
    r"Invalid type assigned: \w+ is not a subclass": "{key}: set {key}.KEY=VALUE; "
    "perfexp help {key} lists its keys.",
}
_NO_MEMBER = re.compile(r"Invalid value '(.*)', expected one of \[(.*)\]")
#: Errors in the user's command line or configuration files.
FOREIGN_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError)


def user_error(error: BaseException) -> UserError:
    """Translate an error that Hydra or OmegaConf raised while composing.

    The first error in its chain of causes that has a translation counts.
    """
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, yaml.YAMLError):
            return UserError(f"A configuration file is not YAML: {_place_in_file(link)}.")
        if isinstance(link, UnicodeDecodeError):
            return UserError(
                "A configuration file in --config-dir is not UTF-8 text: save it as UTF-8."
            )
        if isinstance(link, MissingConfigException):
            return _missing_option(link)
        if isinstance(link, (ConfigAttributeError, ConfigKeyError)) and link.full_key:
            return _unknown_key(link)
        if isinstance(link, OverrideParseException):
            override = str(link.override)
            if override.partition("=")[0].endswith("tracking.uri"):  # it may hold a password
                override = "tracking.uri=…"
            reason = re.sub("^Lexer.*", "a character in it needs quotes", _first_line(link))
            return UserError(f"'{override}' can't be read: {reason}. {_quoted(override)}")
        if isinstance(link, OmegaConfBaseException) and link.full_key and _NO_LIST in str(link):
            return UserError(f"{link.full_key} is a list, also of one value: {link.full_key}=[…].")
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return UserError(_wrong_value(str(link.full_key), _first_line(link)))
    text = _first_line(chain[-1] if isinstance(error, ConfigCompositionException) else error)
    if twice := _TWICE.search(text):
        group, option = twice[1] or twice[3], twice[2] or twice[4]
        return UserError(f"{group} has an option already. Leave + out: {group}={option}")
    if text.startswith(_SEVERAL):
        text += ". Several values are a sweep: add -m; or one list: KEY=[A,B]"
    return UserError(text)


def _wrong_value(key: str, text: str) -> str:
    """Return the message for a value that OmegaConf refuses, with the remedy.

    Args:
        key: dotted key.
        text: OmegaConf's message.
    """
    if match := _NO_MEMBER.match(text):
        return f"{key}={match[1]}: {did_you_mean(match[1], match[2].split(', '))}"
    for pattern, answer in _WRONG.items():
        if match := re.match(pattern, text):
            return answer.format(*match.groups(), key=key)
    return f"{key}: {text}."


def _quoted(override: str) -> str:
    """Return advice on how to type an override: quotes of Hydra inside quotes of the shell.

    If that does not make it readable, the advice is general.
    """
    key, _, value = override.partition("=")
    text = f"{key}={QuotedString(value, Quote.double).with_quotes()}"
    try:
        if value[:1] not in ("[", "{", '"', "'") and not re.search(r",|\$\{", value):
            OverridesParser.create().parse_override(text)
            return f"In a shell, type: {shlex.quote(text)}"
    except HydraException:  # the key is wrong
        pass
    return "Quote texts with other characters, as in 'key=\"a=b\"' and 'key=[\"a#b\",c]'."


def as_perfexp_error(error: Exception, log: Path | None = None) -> PerfexpError:
    """Return the error to print; an unexpected exception leaves a crash report in the log.

    `main` calls it for whatever composing or measuring raises.

    Args:
        log: run log; None if there is no run.

    Raises:
        KeyboardInterrupt: an interrupt is among the causes.
    """
    if any(isinstance(link, KeyboardInterrupt) for link in _chain(error)):
        # Python 3.11 wraps an interrupt that arrives during a class definition
        raise KeyboardInterrupt from error
    if isinstance(error, PerfexpError):
        return error
    if isinstance(error, FOREIGN_ERRORS):
        return user_error(error)
    if isinstance(error, OSError):
        return disk_error(error)
    if isinstance(error, MemoryError):
        return PerfexpError(f"The host ran out of memory. {error}".rstrip())
    return crash_report.failure(error, log)


def why_not_imported(error: BaseException) -> str:
    """Return why a `_target_` can't be imported or built, in one line.

    If its module is in the current folder, which Python does not search, it says how to search it.
    """
    missing = ""
    for link in _chain(error):
        if isinstance(link, ModuleNotFoundError):
            missing = missing or link.name or ""
    outer, _, name = missing.rpartition(".")
    parent = sys.modules.get(outer)
    if parent is not None:
        public_names = [word for word in vars(parent) if word[0] != "_"]
        return f"module {parent.__name__} has no {name}. {did_you_mean(name, public_names)}".rstrip(
            ". "
        )
    top = missing.partition(".")[0]
    file_name = next((name for name in (f"{top}.py", top) if top and Path(name).exists()), "")
    if file_name and not is_here_on_path():
        return (
            f"{file_name} is in this folder, which perfexp does not search: "
            "run python -m perfexp, or set PYTHONPATH=."
        )
    if isinstance(error, InstantiationException) and error.__cause__:
        return str(error.__cause__)
    return str(error)


def _place_in_file(error: yaml.YAMLError) -> str:
    """Return file, line and problem of a YAML error."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    position = f"{mark.name}, line {mark.line + 1}: " if mark else ""
    return f"{position}{problem or _first_line(error)}"


def _missing_option(error: MissingConfigException) -> UserError:
    """Translate an option that does not exist, such as `model=resnet51`, with the nearest name."""
    missing = error.missing_cfg_file or ""
    group, _, option = missing.rpartition("/")
    options = [name for name in (error.options or []) if isinstance(name, str)]
    if not options:
        return UserError(f"configuration '{missing}' not found: {_first_line(error)}.")
    if group == "precision":
        same = [f"precision={name}" for name in OF_TORCH.get(option, ()) if name in options]
        if same:
            chosen = " or ".join(same)
            return UserError(
                f"precision={option}: set {chosen}; perfexp help precision explains them."
            )
    advice = ""
    if group == "model":
        options += torchvision_names.names()
        advice = " Of Hugging Face: model=hf:NAME; your class in mine.py: model=mine:CLASS."
    elif group == "probe":
        advice = " Energy, layers and others are keys: probes.energy=true (perfexp help probes)."
    hint = did_you_mean(option, options)
    return UserError(
        f"{group}={option}: option not found. {hint or f'perfexp list {group} lists them.'}{advice}"
    )


def _unknown_key(error: OmegaConfBaseException) -> UserError:
    """Translate a key that does not exist, with the nearest key.

    Keys in sections and groups count, too, since users may leave out the prefix: `energy` stands in
    `probes`.
    """
    full_key = str(error.full_key)
    parent, _, key = full_key.rpartition(".")
    node = error.parent_node
    keys = list(map(str, node)) if isinstance(node, Container) and hasattr(node, "keys") else []
    valid = [name for name in keys if not name.startswith("_") and name not in ("hydra", "choices")]
    nested = _nested(node) if isinstance(node, Container) and not parent else []
    # a key that was set without its section, or a section that only command lines have
    exact = [name for name in nested if key in name.split(".")]
    similar = [
        name
        for name in nested
        if SequenceMatcher(None, key, name.rpartition(".")[2]).ratio() >= _SIMILAR
    ]
    close = exact or ([] if nearest(key, valid) else similar)
    hint = f"Did you mean {' or '.join(sorted(close)[:3])}?" if close else did_you_mean(key, valid)
    reason = f"{parent} has no key '{key}'" if parent else f"there is no key or group '{key}'"
    return UserError(f"{full_key}: {reason}. {hint}".rstrip())


def _nested(node: Container) -> list[str]:
    """Return the dotted keys `SECTION.KEY` of a whole configuration."""
    plain = OmegaConf.to_container(node)
    keys = ["decode.context"]  # of command lines alone
    if isinstance(plain, dict):
        for section, below in plain.items():
            if isinstance(below, dict):
                keys += [f"{section!s}.{key!s}" for key in below]
    return [key for key in keys if "._" not in key]


def _first_line(error: BaseException) -> str:
    """Return an error's first line, without OmegaConf's key and without a period."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"\s*full_key:.*", "", text).strip().rstrip(".")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once: an error raised again may be its own cause."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__
