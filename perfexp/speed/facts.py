"""Facts: what the head of a training log says of model, batch size, cards and precision; text that is read, never run.

By `Runner._log_env` and `Config.pretty_text` of mmengine, and by `tools/train.py` and `apis/train.py` of
mmsegmentation 0.x on mmcv 0.x and 1.x, which write `Distributed training: …` and the configuration.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any

#: More is no batch size and no number of cards.
LARGEST = 1_000_000
_LONGEST_STATEMENT = 200_000
#: The settings that say something.
_WANTED = {
    *("data", "train_dataloader", "gpu_ids", "gpus", "work_dir"),
    *("optim_wrapper", "optimizer", "optimizer_config", "fp16"),
}
_STATEMENT = re.compile(r"^(?=[A-Za-z_]\w*\s*=[^=])", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z_]\w*)\s*=")
_CARDS = re.compile(r"\b(?:GPU number|world_size)\s*[:=]\s*(\d{1,7})\b")
_DISTRIBUTED = re.compile(r"\bDistributed training:\s*(True|False)\b")
_EXPERIMENT = re.compile(r"\bExp name:\s*(\S+)")
_TIMESTAMP = re.compile(r"(?:^|_)\d{8}_\d{6}$")
#: The part of a configuration's name at which its schedule begins: `8xb4-160k`, `512x1024`, `40k`, `lr0.12`, `1x`.
_SCHEDULE = re.compile(r"lr[\d.]+|\d+x(?:b?\d+)?(?:-.*)?|\d+[ke](?:-.*)?")


@dataclass(kw_only=True)
class Facts:
    """What is known of a training before it begins; None for what is not.

    Attributes:
        model: bare name.
        batch_size: images per card and step.
        cards: number of them.
        precision: name.
    """

    model: str | None = None
    batch_size: int | None = None
    cards: int | None = None
    precision: str | None = None

    def or_else(self, other: Facts) -> Facts:
        """These facts, and where there is none the other's.

        Args:
            other: facts of the same training.
        """
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        theirs = {each.name: getattr(other, each.name) for each in fields(self)}
        return Facts(**{name: theirs[name] if value is None else value for name, value in mine.items()})


@dataclass(kw_only=True)
class Head:
    """Gathers facts from the lines of a log.

    Attributes:
        config: text of the configuration.
        experiment: name of the experiment, as it was logged.
        cards: as they were logged.
        distributed: whether the training is, as it was logged.
    """

    config: str = ""
    experiment: str | None = None
    cards: int | None = None
    distributed: bool | None = None

    def take(self, text: str) -> None:
        """Take in a line.

        Args:
            text: of the log, without colours.
        """
        if found := _CARDS.search(text):
            self.cards = _count(int(found[1]))
        elif found := _DISTRIBUTED.search(text):
            self.distributed = found[1] == "True"
        elif found := _EXPERIMENT.search(text):
            self.experiment = found[1]

    def take_meta(self, values: Mapping[str, Any]) -> None:
        """Take in the facts at the head of mmcv's JSON.

        Args:
            values: all of them.
        """
        self.config = str(values.get("config") or self.config)
        self.experiment = str(values["exp_name"]) if values.get("exp_name") else self.experiment

    def facts(self) -> Facts:
        """What has been taken in."""
        config = _statements(self.config)
        return Facts(
            model=_model(self.experiment, config.get("work_dir")),
            batch_size=_batch_size(config),
            cards=self.cards or _cards(config, self.distributed),
            precision=_precision(config, self.config),
        )


def _statements(text: str) -> dict[str, Any]:
    """The settings of a configuration that are wanted, as far as they can be read; what can't be is left out."""
    found = {}
    for statement in _STATEMENT.split(text):
        name = _NAME.match(statement)
        if name and name[1] in _WANTED and len(statement) <= _LONGEST_STATEMENT:
            try:
                (node,) = ast.parse(statement).body
                found[name[1]] = _value(node.value) if isinstance(node, ast.Assign) else None
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return found


def _value(node: ast.expr) -> Any:
    """Constants, dictionaries, lists and ranges; anything else is None."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            return {str(name): _value(value) for name, value in zip(names, values, strict=True) if name is not None}
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            return {keyword.arg: _value(keyword.value) for keyword in keywords if keyword.arg}
        case ast.Call(func=ast.Name(id="range"), args=bounds):
            numbers = [bound.value for bound in bounds if isinstance(bound, ast.Constant)]
            known = [number for number in numbers if isinstance(number, int) and 0 <= number <= LARGEST]
            return range(*known) if len(known) == len(bounds) and len(known) in (1, 2) else None
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
    return None


def _get(config: Mapping[str, Any], *names: str) -> Any:
    """A setting by its way through the dictionaries; None where it ends."""
    value: Any = config
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _batch_size(config: Mapping[str, Any]) -> int | None:
    """Images per card: `batch_size` in mmengine; `samples_per_gpu`, in mmcv 0.x `imgs_per_gpu`, in mmcv."""
    ways = (
        *(("train_dataloader", "batch_size"), ("train_dataloader", "batch_sampler", "batch_size")),
        *(("data", "train_dataloader", "samples_per_gpu"), ("data", "samples_per_gpu"), ("data", "imgs_per_gpu")),
    )
    found = (_count(_get(config, *way)) for way in ways)
    return next((size for size in found if size is not None), None)


def _cards(config: Mapping[str, Any], distributed: bool | None) -> int | None:
    """Cards by the configuration: mmcv's `gpu_ids` count the processes only where there is no launcher.

    With one, earlier versions leave `range(0, 1)` there on any number of cards; then the number is not known.
    """
    ids = config.get("gpu_ids")
    named = len(ids) if isinstance(ids, Sequence) and not isinstance(ids, str) else config.get("gpus")
    cards = _count(named)
    if distributed is False:
        return cards or 1
    return cards if cards and cards > 1 else None


def _precision(config: Mapping[str, Any], text: str) -> str | None:
    """The precision that a configuration asks for: fp32 where nothing in it asks for another.

    None where there is no configuration, where it asks for one of another library, or where what asks can't be read.
    """
    wrapper = config.get("optim_wrapper")
    if isinstance(wrapper, dict):
        kind = str(wrapper.get("type", "OptimWrapper")).rsplit(".", 1)[-1]
        if kind == "AmpOptimWrapper":
            return {"None": "amp_fp16", "float16": "amp_fp16", "bfloat16": "amp_bf16"}.get(str(wrapper.get("dtype")))
        return "fp32" if kind == "OptimWrapper" else None
    said = {name[1] for name in map(_NAME.match, _STATEMENT.split(text)) if name}
    unread = said & {"optim_wrapper", "optimizer_config", "fp16"} - config.keys()
    if not said or unread or "optim_wrapper" in config:
        return None
    hook = str(_get(config, "optimizer_config", "type") or "")
    return "fp16" if config.get("fp16") is not None or "Fp16" in hook else "fp32"


def _model(experiment: str | None, work_dir: object) -> str | None:
    """The model by the name of its configuration: what stands before schedule and data.

    An experiment is named after the configuration's file; a folder may have any name, and counts only if a schedule
    is in it, as in the folder that the tools make.
    """
    if experiment:
        stem = _TIMESTAMP.sub("", experiment.removesuffix(".py"))
        if stem and stem != "default":
            return _before_schedule(stem) or None
    folder = PurePosixPath(work_dir.replace("\\", "/")).name if isinstance(work_dir, str) else ""
    name = _before_schedule(folder)
    return name if name and name != folder else None


def _before_schedule(name: str) -> str:
    parts = name.split("_")
    end = next((index for index, part in enumerate(parts) if _SCHEDULE.fullmatch(part)), len(parts))
    return "_".join(parts[:end])


def _count(value: object) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST
    return value if good and isinstance(value, int) else None
