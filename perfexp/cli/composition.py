"""Check a command line, and let Hydra compose a configuration from it for each run.

Hydra accepts many words that would have no effect on a measurement, or the wrong one; the
`refuse_…` functions raise errors for them first. `intended_overrides` translates words from other
tools, such as `resnet50 --batch-size 8`, for a suggestion. A *job* is Hydra's word for one run of a
sweep.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig

from perfexp.cli import own_models
from perfexp.cli.conf_files import config_values, options_below
from perfexp.cli.usage import COMMANDS
from perfexp.errors import UserError, did_you_mean, nearest
from perfexp.host import credentials, installation
from perfexp.models import torchvision_names
from perfexp.plan import config, validation
from perfexp.plan.flags import (
    CONFIG_DIR,
    DRY_RUN,
    JSON,
    MAX_JOBS,
    MULTIRUN,
    OF_SWEEP,
    OVERWRITE,
    PARENT,
    REQUEUE,
    VERBOSE,
    flag_values,
    refuse_no_folders,
)
from perfexp.plan.hydra_errors import FOREIGN_ERRORS, OF_TORCH, user_error
from perfexp.plan.overrides import alternatives, parsed, refuse_unreadable, without_credentials
from perfexp.plan.schema import Cluster
from perfexp.records.old_names import arguments_of_today

#: Prefix of the temporary folders in which Hydra writes its own files.
SCRATCH = "perfexp-hydra-"

#: Accepted settings of Hydra; the others concern output and logs, which perfexp decides on.
_HYDRA_KEYS = re.compile(
    r"hydra\.(mode|searchpath)|hydra/(launcher|sweeper)(/.+)?"
    r"|hydra\.(launcher|sweeper|callbacks)\..+"
)
#: Values of the group `model`, on a command line or in a file.
_MODEL = re.compile(r"(?:^|[\s/])model\s*[=:](.*)")
_SWEEPER_PARAMS = "hydra.sweeper.params"


def compose(arguments: Sequence[str], models: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Compose the plan for one run's command line, as plain data.

    The Python interface and commands that need a plan call it; `main` composes with its own
    function.

    Args:
        arguments: overrides as typed.
        models: nodes for models without a file, by option name.

    Raises:
        UserError: the run would refuse the command line before it starts.
    """
    results: list[tuple[DictConfig, dict[str, Any]]] = []

    def collect(composed: DictConfig) -> None:
        results.append((composed, dict(HydraConfig.get().runtime.choices)))

    try:
        arguments = without_credentials(arguments_of_today(arguments))
        # an experiment's file may set a sweep
        call_with_hydra([*arguments, "hydra.mode=RUN"], collect, models)
        plain = config.plan_of(*results[0], arguments)
    except FOREIGN_ERRORS as error:
        raise user_error(error) from error
    validation.check(config.typed(plain))
    return plain


def cluster_of(name: str, config_dir: Path | None = None) -> Cluster:
    """Return a site's settings: an option of the group `cluster`.

    The `perfexp cluster` commands call it.

    Args:
        name: name of the option.
        config_dir: further folder with options; None for conf/ alone.

    Raises:
        UserError: the option does not exist.
    """
    results: list[Cluster] = []
    folder = [f"--config-dir={config_dir}"] if config_dir else []
    try:
        arguments = [*folder, f"cluster={name}", "hydra.mode=RUN"]
        call_with_hydra(arguments, lambda composed: results.append(config.cluster_of(composed)))
    except FOREIGN_ERRORS as error:
        raise user_error(error) from error
    return results[0]


def call_with_hydra(
    arguments: Sequence[str],
    function: Callable[[DictConfig], Any],
    models: Mapping[str, Any] | None = None,
    *,
    begun: Callable[[HydraConf], None] = lambda _: None,
    composed: Callable[[], None] = lambda: None,
    ended: Callable[[Path], None] = lambda _: None,
) -> None:
    """Have Hydra call a function with each run's configuration; its result goes to the sweeper.

    Args:
        arguments: overrides and Hydra's flags.
        function: called once for a single run, or for each run of a sweep.
        models: nodes for models without a file, by option name.
        begun: called with Hydra's settings before the sweeper and the launcher are created.
        composed: called after the last run of a sweep, before Hydra's callbacks for its end.
        ended: called with the temporary folder in which Hydra wrote.

    Raises:
        UserError: the command line is refused.
    """
    for refuse in (
        refuse_unreadable,
        refuse_targets,
        refuse_hydra_settings,
        refuse_no_names,
        refuse_no_folders,
    ):
        refuse(arguments)
    ordered = _ordered(arguments)
    prints = _prints(ordered)
    ordered = _with_keys_in_runs(ordered)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH))
        # Hydra reads sys.argv, and has to raise errors instead of printing them
        stack.enter_context(patch.object(sys, "argv", ["perfexp", *ordered]))
        stack.enter_context(patch.dict(os.environ, {"HYDRA_FULL_ERROR": "1"}))
        if prints:
            stack.enter_context(_masked_stdout())
        nodes = {name: _node(name, arguments) for name in _models_without_file(arguments)}
        config.register(Path(scratch), {**nodes, **own_models.nodes(arguments), **(models or {})})
        stack.enter_context(_hooked_sweeper(begun, composed))
        try:
            hydra.main(
                version_base="1.3", config_path=str(installation.conf_dir()), config_name="config"
            )(function)()
            ended(Path(scratch))
        # Hydra has no class for these mistakes
        except (ValueError, AttributeError, AssertionError) as error:
            typed = [
                text for text in arguments if is_of_hydra(text) or (prints and text[:1] == "-")
            ]
            if isinstance(error, FOREIGN_ERRORS) or not typed:
                raise
            raise UserError(f"Hydra refuses {' '.join(typed)}: {error}".rstrip(": ")) from error


@contextmanager
def _hooked_sweeper(
    begun: Callable[[HydraConf], None], composed: Callable[[], None]
) -> Iterator[None]:
    """While entered, Hydra calls `begun` before it creates a sweeper and `composed` after its jobs.

    See `call_with_hydra`.
    """
    create = Plugins.instantiate_sweeper

    def sweeper(plugins: Plugins, *, config: DictConfig, **others: Any) -> Sweeper:
        """Create Hydra's sweeper, whose jobs are followed by `composed`."""
        begun(config.hydra)
        created = create(plugins, config=config, **others)
        call_jobs = created.sweep

        def sweep(arguments: list[str]) -> Any:
            """Run the sweep's jobs, then call `composed`."""
            result = call_jobs(arguments)
            composed()
            return result

        created.sweep = sweep  # type: ignore[method-assign]
        return created

    with patch.object(Plugins, "instantiate_sweeper", sweeper):
        yield


def _models_without_file(arguments: Sequence[str]) -> list[str]:
    """Return models from the command line, or from a file of the user, that have no file in conf/.

    They are names of libraries, such as `hf:bert` or a model of torchvision.
    """
    texts = list(arguments)
    typed = list(map(Path, flag_values(arguments, *CONFIG_DIR)))
    named_options = set[str]()
    for folder in (installation.conf_dir(), *typed):
        named_options |= {file.stem for file in folder.glob("model/*.yaml")}
    for folder in typed:
        for file in filter(Path.is_file, folder.glob("*/*.yaml")):
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
    words: set[str] = set()
    for text in texts:
        for line in _MODEL.findall(text):
            words.update(re.findall(r"[\w:-]+", line))
    return [word for word in sorted(words - named_options) if torchvision_names.is_name(word)]


def _node(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a model without a file.

    For a Hugging Face model it has the keys below `model.config.` that the user typed.
    """
    node = torchvision_names.node(name)
    if not name.startswith(torchvision_names.HF):
        return node
    return {**node, "config": own_models.settings(arguments, "model.config.")}


def _ordered(arguments: Sequence[str]) -> list[str]:
    """Sort flags first: argparse accepts them before or after all overrides, but not between."""
    return sorted(
        arguments, key=lambda text: text not in SWITCHES and not re.match("--[^=]+=", text)
    )


def _with_keys_in_runs(arguments: list[str]) -> list[str]:
    """Let the keys of several own or Hugging Face models be set in a sweep's runs only.

    Hydra composes the sweep itself with the default model, which lacks them. For example,
    `model.width=16` becomes a sweep over one value, `model.width=choice(16)`.
    """
    single, swept = set[str](), list[str]()
    for override in parsed(arguments):
        text = override.input_line or ""
        if not override.is_sweep_override():
            single.add(text)
        elif override.key_or_group == "model":
            swept.append(text)
    has_keys = own_models.named(swept) or any(torchvision_names.HF in text for text in swept)
    if set(MULTIRUN).isdisjoint(arguments) or not has_keys:
        return arguments
    words = []
    for text in arguments:
        key, _, value = text.partition("=")
        is_key = key.startswith("model.") and text in single
        words.append(f"{key}=choice({value})" if is_key else text)
    return words


def _prints(arguments: Sequence[str]) -> bool:
    """Return whether flags make Hydra print something instead of measuring, such as `--cfg`.

    Raises:
        UserError: a flag is wrong, or two exclude one another.
    """
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            flags = get_args_parser().parse_args(list(arguments))
    except SystemExit as end:
        reason = stderr.getvalue().rpartition("error: ")[2].strip()
        raise UserError(f"{reason}. perfexp --help lists the flags.") from end
    chosen = {"--run": flags.run, "-m": flags.multirun, "--cfg": flags.cfg, "--info": flags.info}
    chosen["--shell-completion"] = flags.shell_completion
    names = list(filter(chosen.get, chosen))
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)} exclude one another: leave out {names[0]}.")
    for name, value in (("--package", flags.package), ("--resolve", flags.resolve)):
        if value and not flags.cfg:
            raise UserError(f"{name} is for --cfg: set --cfg job {name} …, or leave it out.")
    return any(name not in ("--run", "-m") for name in names)


@contextmanager
def _masked_stdout() -> Iterator[None]:
    """Delay output until the block ends, and mask its credentials.

    Hydra prints the composition itself, and exits after an error: that becomes a `UserError`.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            yield
    except SystemExit as end:
        if not end.code:
            raise
        raise UserError(" ".join(stderr.getvalue().split())) from end
    finally:
        print(credentials.mask(stdout.getvalue()), end="")


def refuse_words(arguments: Sequence[str]) -> None:
    """Raise `UserError` for words and flags that are not overrides.

    The message suggests the intended command.
    """
    ends_in_equals = (
        word[-1:] == "=" and not re.match("-|.*=", following)
        for word, following in pairwise(arguments)
    )
    if any(ends_in_equals) or any(word[:1] == "=" for word in arguments):
        joined = re.sub(" ?= ?", "=", shlex.join(arguments))
        raise UserError(f"'=' has spaces around it; leave them out: perfexp {joined}")
    if (overrides := intended_overrides(arguments)) and not set(arguments) & set(COMMANDS):
        meaning = f"Did you mean: perfexp {shlex.join(overrides)}"
        raise UserError(f"settings are KEY=VALUE, with the names of perfexp. {meaning}")
    for before, word in pairwise(["", *arguments]):
        is_flag_value = before.startswith("-") and "=" not in before and before not in MULTIRUN
        if not is_flag_value and "=" not in word and word[:1] not in ("-", "~", ""):
            if word in COMMANDS:
                raise UserError(f"'{word}' is a command, and comes first: perfexp {word} …")
            raise UserError(
                f"'{word}' is neither a command nor KEY=VALUE. {did_you_mean(word, COMMANDS)}"
            )


def refuse_no_names(arguments: Sequence[str]) -> None:
    """Raise `UserError` if a group is set to a number, null or a mapping: Hydra crashes then.

    `call_with_hydra` calls it first.
    """
    for override in parsed(arguments):
        names: list[Any] = []
        for value in alternatives(override):
            names += value if isinstance(value, list) else [value]
        is_group = (installation.conf_dir() / override.key_or_group).is_dir()
        if is_group and not all(isinstance(name, str) for name in names):
            raise UserError(
                f"'{override.input_line}' is not an option: set {override.key_or_group}=NAME."
            )


def is_of_hydra(argument: str) -> bool:
    """Return whether an override sets something in Hydra itself, such as `hydra/launcher=slurm`."""
    return re.match(r"~hydra\b|\+*hydra\b[^=]*=", argument) is not None


def refuse_hydra_settings(arguments: Sequence[str]) -> None:
    """Raise `UserError` for Hydra settings with no effect, or a wrong effect, on a measurement.

    `call_with_hydra` calls it first.
    """
    for text in filter(is_of_hydra, arguments):
        key = text.lstrip("+~").partition("=")[0]
        if key.startswith(_SWEEPER_PARAMS):
            raise UserError(f"{key} is for configuration files: on a command line use -m KEY=A,B.")
        if not _HYDRA_KEYS.fullmatch(key):
            remedy = "Set output_dir=DIR for results; details/run.log in there is the log."
            raise UserError(
                f"{key} is not accepted: perfexp decides where Hydra's output and logs go. {remedy}"
            )


def refuse_targets(arguments: Sequence[str]) -> None:
    """Raise `UserError` for code chosen on the command line: only files choose code.

    This includes a Hydra flag that reads a pickle, which can run code.
    """
    for argument in arguments:
        if argument.startswith("--experimental-rerun"):
            raise UserError(
                "--experimental-rerun reads a pickle; repeat the command in record.json instead."
            )
        if "_target_" in argument:
            raise UserError(
                f"'{argument}': a _target_ is honored in configuration files only; "
                "see --config-dir."
            )


#: Flags of perfexp and Hydra without a value, and with one.
SWITCHES, _VALUED_FLAGS = (
    {*VERBOSE, DRY_RUN, OVERWRITE, JSON, REQUEUE},
    {MAX_JOBS, OF_SWEEP, PARENT},
)
for _action in get_args_parser()._actions:
    (SWITCHES if _action.nargs == 0 else _VALUED_FLAGS).update(_action.option_strings)
#: Keys, each with its names in other tools.
_ALIASES = {
    "batch_size": "batch b bs",
    "input_size": "size image_size img_size resolution",
    "gpu": "device",
    "precision": "dtype",
    "model": "arch net",
    "output_dir": "output out o",
}
_KEY_OF_ALIAS = {alias: key for key, aliases in _ALIASES.items() for alias in aliases.split()}
#: Options by the names that torch gives them, if there is one for each.
_VALUE_OF_ALIAS = {"cuda": "auto", "gpu": "auto"}
_VALUE_OF_ALIAS |= {name: same for name, (same, *others) in OF_TORCH.items() if not others}


def intended_overrides(arguments: Sequence[str]) -> list[str] | None:
    """Return a command line in which each word and flag has become an override.

    None if the meaning of a word is unclear, or if nothing changes.
    """
    conf = installation.conf_dir()
    options = options_below([conf, *map(Path, flag_values(arguments, *CONFIG_DIR))])
    keys = {*options, *config_values(conf)}
    words = iter(arguments)
    translated: list[str] = []
    is_clear = True
    for word in words:
        if word in _VALUED_FLAGS:
            translated += [word, next(words, "")]
            continue
        if word.startswith("-") and "=" not in word and word not in SWITCHES:
            word = f"{word}={next(words, '')}"
        override = _intended_override(word, options, keys)
        is_clear &= override is not None
        translated.append(override or "")
    if is_clear and translated != list(arguments):
        return translated
    return None


def _intended_override(
    word: str, options: Mapping[str, Collection[str]], keys: Collection[str]
) -> str | None:
    """Return a word as perfexp accepts it; None if its meaning is unclear.

    Args:
        options: options by group.
        keys: names of groups and keys.
    """
    name, equals, value = word.partition("=")
    if name in SWITCHES | _VALUED_FLAGS or word.startswith("~"):
        return word
    if not equals:
        return _option_override(word, options)
    group, dot, subkey = name.lstrip("-").replace("-", "_").partition(".")
    if not word.startswith("-") and (group in keys or group not in _KEY_OF_ALIAS):
        return word
    exact = _KEY_OF_ALIAS.get(group, group)
    key = exact if exact in keys else next(iter(nearest(group, keys, 1)), None)
    if not key:
        return None
    return f"{key}{dot}{subkey}={_VALUE_OF_ALIAS.get(value.lower(), value)}"


def _option_override(word: str, options: Mapping[str, Collection[str]]) -> str | None:
    """Return the override for a word that is an option's name, such as `model=resnet50`.

    The word may be several names with commas between them, or resemble a model's name. None if
    several groups have such an option, or none has.
    """
    names = word.split(",")
    groups = [
        group for group, names_of_group in options.items() if set(names) <= set(names_of_group)
    ]
    if len(groups) == 1:
        return f"{groups[0]}={word}"
    models = [*options["model"], *torchvision_names.names()]
    similar = [nearest(name, models, 1) for name in names]
    if groups or nearest(word, COMMANDS) or not all(similar):
        return None
    return f"model={','.join(name for [name] in similar)}"
