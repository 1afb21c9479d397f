"""Model, batch size, GPUs and precision from the head of a training log.

The text is parsed, never run. `Runner._log_env` and `Config.pretty_text` in mmengine write the
head. In mmsegmentation 0.x on mmcv 0.x and 1.x it comes from `tools/train.py` and `apis/train.py`
(`Distributed training: …` and the configuration).
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import Any

#: Largest plausible batch size and number of GPUs.
LARGEST = 1_000_000
_LONGEST_STATEMENT = 200_000
#: Settings of a configuration that contain facts.
_WANTED = {
    "data",
    "train_dataloader",
    "gpu_ids",
    "gpus",
    "work_dir",
    "optim_wrapper",
    "optimizer",
    "optimizer_config",
    "fp16",
}
_STATEMENT = re.compile(r"^(?=[A-Za-z_]\w*\s*=[^=])", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z_]\w*)\s*=")
_GPUS = re.compile(r"\b(?:GPU number|world_size)\s*[:=]\s*(\d{1,7})\b")
_DISTRIBUTED = re.compile(r"\bDistributed training:\s*(True|False)\b")
_EXPERIMENT = re.compile(r"\bExp name:\s*(\S+)")
_TIMESTAMP = re.compile(r"(?:^|_)\d{8}_\d{6}$")
#: Start of the schedule in a configuration name, such as `8xb4-160k`, `512x1024`, `40k`, `lr0.12`
#: or `1x`.
_SCHEDULE = re.compile(r"lr[\d.]+|\d+x(?:b?\d+)?(?:-.*)?|\d+[ke](?:-.*)?")


@dataclass(kw_only=True)
class Facts:
    """Facts about a training that its steps do not show; None for unknown facts.

    Attributes:
        model: model name.
        batch_size: images per GPU and step.
        num_gpus: number of GPUs that trained together.
        precision: precision name, for example `amp_fp16`.
    """

    model: str | None = None
    batch_size: int | None = None
    num_gpus: int | None = None
    precision: str | None = None

    def or_else(self, other: Facts) -> Facts:
        """Return these facts, with unknown facts taken from others about the same training.

        Facts from the command line come first, then the log's, then those of neighboring files.
        """
        own_facts = {name: value for name, value in asdict(self).items() if value is not None}
        return replace(other, **own_facts)


@dataclass(kw_only=True)
class Head:
    """Collects facts from log lines: the configuration text and separately logged facts.

    Attributes:
        config: text of the configuration, Python code.
        experiment: experiment name.
        distributed: whether a launcher started several processes; None if unknown.
    """

    config: str = ""
    experiment: str | None = None
    num_gpus: int | None = None
    distributed: bool | None = None

    def take(self, text: str) -> None:
        """Add a log line, as returned by `training_log.plain`; most lines contain no fact."""
        if match := _GPUS.search(text):
            self.num_gpus = _count(int(match[1]))
        elif match := _DISTRIBUTED.search(text):
            self.distributed = match[1] == "True"
        elif match := _EXPERIMENT.search(text):
            self.experiment = match[1]

    def take_meta(self, values: Mapping[str, Any]) -> None:
        """Add the facts at the head of mmcv's JSON."""
        self.config = str(values.get("config") or self.config)
        if values.get("exp_name"):
            self.experiment = str(values["exp_name"])

    def facts(self) -> Facts:
        """Return the facts from all lines so far."""
        config = _statements(self.config)
        return Facts(
            model=_model(self.experiment, config.get("work_dir")),
            batch_size=_batch_size(config),
            num_gpus=self.num_gpus or _num_gpus(config, self.distributed),
            precision=_precision(config, self.config),
        )


def _statements(text: str) -> dict[str, Any]:
    """Return the values of `_WANTED` settings in a configuration; unreadable ones are left out.

    The configuration is Python code; it is parsed statement by statement, never run.
    """
    settings = {}
    for statement in _STATEMENT.split(text):
        name = _NAME.match(statement)
        if name and name[1] in _WANTED and len(statement) <= _LONGEST_STATEMENT:
            try:
                (node,) = ast.parse(statement).body
                settings[name[1]] = _value(node.value) if isinstance(node, ast.Assign) else None
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return settings


def _value(node: ast.expr) -> Any:
    """Return the value of a parsed expression without running it; None for anything but literals.

    `dict(…)` and `range(…)` count as literals.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Dict(keys=keys, values=values):
            settings = {}
            for key, element in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and key.value is not None:
                    settings[str(key.value)] = _value(element)
            return settings
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            return {keyword.arg: _value(keyword.value) for keyword in keywords if keyword.arg}
        case ast.Call(func=ast.Name(id="range"), args=bounds):
            limits = []
            for bound in bounds:
                number = bound.value if isinstance(bound, ast.Constant) else None
                if not isinstance(number, int) or not 0 <= number <= LARGEST:
                    return None
                limits.append(number)
            if len(limits) in (1, 2):
                return range(*limits)
            return None
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
    return None


def _get(config: Mapping[str, Any], *names: str) -> Any:
    """Return a value in nested dictionaries; None if there is none."""
    value: Any = config
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _batch_size(config: Mapping[str, Any]) -> int | None:
    """Return the images per GPU and step; None if the configuration does not say.

    The setting is `batch_size` in mmengine, `samples_per_gpu` in mmcv, `imgs_per_gpu` in mmcv 0.x.
    """
    return (
        _count(_get(config, "train_dataloader", "batch_size"))
        or _count(_get(config, "train_dataloader", "batch_sampler", "batch_size"))
        or _count(_get(config, "data", "train_dataloader", "samples_per_gpu"))
        or _count(_get(config, "data", "samples_per_gpu"))
        or _count(_get(config, "data", "imgs_per_gpu"))
    )


def _num_gpus(config: Mapping[str, Any], distributed: bool | None) -> int | None:
    """Return the number of GPUs in the configuration; None if unknown.

    mmcv's `gpu_ids` counts processes only without a launcher. With a launcher, earlier versions
    write `range(0, 1)` for any number of GPUs, so the number is unknown.
    """
    ids = config.get("gpu_ids")
    num_gpus = _count(config.get("gpus"))
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        num_gpus = _count(len(ids))
    if distributed is False:
        return num_gpus or 1
    if num_gpus and num_gpus > 1:
        return num_gpus
    return None


def _precision(config: Mapping[str, Any], text: str) -> str | None:
    """Return the precision set by a configuration, by default fp32.

    None without a configuration, or if the precision is unknown.
    """
    wrapper = config.get("optim_wrapper")
    if isinstance(wrapper, dict):
        kind = str(wrapper.get("type", "OptimWrapper")).rsplit(".", 1)[-1]
        if kind == "AmpOptimWrapper":
            return {"None": "amp_fp16", "float16": "amp_fp16", "bfloat16": "amp_bf16"}.get(
                str(wrapper.get("dtype"))
            )
        if kind == "OptimWrapper":
            return "fp32"
        return None
    names = {name[1] for name in map(_NAME.match, _STATEMENT.split(text)) if name}
    unparsed = names & {"optim_wrapper", "optimizer_config", "fp16"} - config.keys()
    if not names or unparsed or "optim_wrapper" in config:
        return None
    hook = str(_get(config, "optimizer_config", "type") or "")
    if config.get("fp16") is not None or "Fp16" in hook:
        return "fp16"
    return "fp32"


def _model(experiment: str | None, work_dir: object) -> str | None:
    """Return the model: the part of the configuration's name before schedule and data, or None.

    An experiment is named after its configuration file. A folder may have any name, so it counts
    only if it has a schedule, as in folders created by the tools.
    """
    if experiment:
        stem = _TIMESTAMP.sub("", experiment.removesuffix(".py"))
        if stem and stem != "default":
            return _before_schedule(stem) or None
    folder = ""
    if isinstance(work_dir, str):
        folder = PurePosixPath(work_dir.replace("\\", "/")).name
    name = _before_schedule(folder)
    if name and name != folder:
        return name
    return None


def _before_schedule(name: str) -> str:
    """Return a configuration's name before its schedule: `fcn_r50` for `fcn_r50_4xb2-40k_voc`."""
    parts = itertools.takewhile(lambda part: not _SCHEDULE.fullmatch(part), name.split("_"))
    return "_".join(parts)


def _count(value: object) -> int | None:
    """Return a plausible batch size or number of GPUs; None for anything else."""
    if type(value) is int and 1 <= value <= LARGEST:
        return value
    return None
