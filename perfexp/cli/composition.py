"""Composition: refuse words without effect, compose a command line, and call a function per job."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from perfexp.cli import meant, own_models
from perfexp.cli.usage import COMMANDS
from perfexp.errors import UserError, did_you_mean
from perfexp.host import credentials, installation
from perfexp.models import torchvision_names
from perfexp.plan import config, validation
from perfexp.plan.flags import CONFIG_DIR, MULTIRUN, flag_values, refuse_no_folders
from perfexp.plan.hydra_errors import FOREIGN_ERRORS, user_error
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
    """Compose the plan for a run's command line as plain data.

    Args:
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
    """Return an option in the group `cluster`.

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
    """Have Hydra call a function with each job's configuration; its result goes to the sweeper.

    Args:
        begun: called with Hydra's settings before the sweeper and the launcher are created.
        composed: called after the last job of a sweep, before Hydra's callbacks for its end.
        ended: called with the temporary folder in which Hydra wrote.
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
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH))
        # Hydra reads sys.argv, and has to raise errors instead of printing them
        stack.enter_context(patch.object(sys, "argv", ["perfexp", *ordered]))
        stack.enter_context(patch.dict(os.environ, {"HYDRA_FULL_ERROR": "1"}))
        if prints:
            stack.enter_context(_masked_stdout())
        nodes = {name: _node(name, arguments) for name in _models_without_file(arguments)}
        config.register(Path(scratch), {**nodes, **own_models.nodes(arguments), **(models or {})})
        create = Plugins.instantiate_sweeper

        def sweeper(plugins: Plugins, *, config: DictConfig, **others: Any) -> Sweeper:
            begun(config.hydra)
            made = create(plugins, config=config, **others)
            call_jobs = made.sweep

            def sweep(arguments: list[str]) -> Any:
                result = call_jobs(arguments)
                composed()
                return result

            made.sweep = sweep  # type: ignore[method-assign]
            return made

        stack.enter_context(patch.object(Plugins, "instantiate_sweeper", sweeper))
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


def _models_without_file(arguments: Sequence[str]) -> list[str]:
    """Return names without a file that are set as model, typed or in a --config-dir file."""
    texts = list(arguments)
    typed = list(map(Path, flag_values(arguments, *CONFIG_DIR)))
    known = set[str]()
    for folder in (installation.conf_dir(), *typed):
        known |= {file.stem for file in folder.glob("model/*.yaml")}
    for folder in typed:
        for file in filter(Path.is_file, folder.glob("*/*.yaml")):
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
    words: set[str] = set()
    for text in texts:
        for line in _MODEL.findall(text):
            words.update(re.findall(r"[\w:-]+", line))
    return [word for word in sorted(words - known) if torchvision_names.is_name(word)]


def _node(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a model without a file.

    A Hugging Face model has the typed configuration keys.
    """
    node = torchvision_names.node(name)
    if not name.startswith(torchvision_names.HF):
        return node
    return {**node, "config": own_models.settings(arguments, "model.config.")}


def _ordered(arguments: Sequence[str]) -> list[str]:
    """Sort flags first: argparse accepts them before or after all overrides, but not between."""
    return sorted(
        arguments, key=lambda text: text not in meant.SWITCHES and not re.match("--[^=]+=", text)
    )


def _prints(arguments: Sequence[str]) -> bool:
    """Return whether flags make Hydra print something instead of measuring.

    Raises:
        UserError: a flag is wrong.
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

    Hydra's errors become UserError.
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
    """Raise UserError for words and flags that are not overrides; suggest the intended command."""
    is_cut = (one[-1:] == "=" and not re.match("-|.*=", two) for one, two in pairwise(arguments))
    if any(is_cut) or any(word[:1] == "=" for word in arguments):
        joined = re.sub(" ?= ?", "=", shlex.join(arguments))
        raise UserError(f"'=' has spaces around it; leave them out: perfexp {joined}")
    if (overrides := meant.command(arguments)) and not set(arguments) & set(COMMANDS):
        meaning = f"Did you mean: perfexp {shlex.join(overrides)}"
        raise UserError(f"settings are KEY=VALUE, with the names of perfexp. {meaning}")
    for before, word in pairwise(["", *arguments]):
        of_flag = before.startswith("-") and "=" not in before and before not in MULTIRUN
        if not of_flag and "=" not in word and word[:1] not in ("-", "~", ""):
            if word in COMMANDS:
                raise UserError(f"'{word}' is a command, and comes first: perfexp {word} …")
            raise UserError(
                f"'{word}' is neither a command nor KEY=VALUE. {did_you_mean(word, COMMANDS)}"
            )


def refuse_no_names(arguments: Sequence[str]) -> None:
    """Raise UserError if a group is set to a number, null or a mapping: Hydra crashes then."""
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
    """Return whether an override sets something in Hydra itself."""
    return re.match(r"~hydra\b|\+*hydra\b[^=]*=", argument) is not None


def refuse_hydra_settings(arguments: Sequence[str]) -> None:
    """Raise UserError for Hydra settings with no effect, or a wrong effect, on a measurement."""
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
    """Raise UserError for code chosen on the command line; only files choose code.

    Nothing is unpickled.
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
