"""The Python interface: compose a plan, measure a model, and load results as tables.

It does what the command line does, by the same functions, and returns objects. Users call it as
`perfexp.measure`, `perfexp.compose` and `perfexp.load`.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from perfexp.cli import composition
from perfexp.errors import UserError
from perfexp.host import installation, interrupts
from perfexp.models import torchvision_names
from perfexp.plan import config, naming, prerequisites, sources
from perfexp.plan.overrides import quoted
from perfexp.records.analysis import Analysis
from perfexp.records.paths import RunPaths
from perfexp.records.record import Record, read_points
from perfexp.records.remarks import failures
from perfexp.report.console import Console, lines_of
from perfexp.run import driver
from perfexp.run.preparation import Assignment, refuse_other_plan

if TYPE_CHECKING:
    import pandas as pd

#: `_target_` for a model object that only this process has.
_LIVE = "perfexp.models.module.LiveModule"

# `records` may not import `report`, which can print a record
Record.text = staticmethod(
    lambda record: "\n".join(lines_of(lambda console: console.results(Analysis.of(record))))
)


def compose(*arguments: str, **overrides: Any) -> config.Plan:
    """Return the plan for some overrides, as the command line composes it.

    >>> plan = compose("model=fake", gpu="fake", batch_size=[1, 8], stopping__max_seconds=10)
    >>> plan.model_name, plan.mode.name, plan.batch_size, plan.stopping["max_seconds"]
    ('fake', 'inference', [1, 8], 10.0)

    Args:
        arguments: overrides as text, such as `"model=resnet50"`.
        overrides: keys with their values; two underscores are a dot (`stopping__max_seconds=10`).

    Raises:
        UserError: a key, a value or their combination is wrong.
    """
    return config.typed(composition.compose([*arguments, *_texts(overrides)]))


def measure(
    model: str | Callable[..., Any], *arguments: str, inputs: Any = None, **overrides: Any
) -> Record:
    """Measure a model and return its record, which is also on disk.

    Worker processes measure a model given by name. The name is a model option, such as `resnet50`,
    `timm:convnext_atto` or `hf:bert`. It may also be `module:name` for a class or function that
    makes a torch module.

    This process measures a model object once, and the record is marked `in_process`. The object is
    a torch module, a module class, or a function that takes a batch.

    >>> record = measure("fake", gpu="fake", tracking="none", processes=2)
    >>> print(record.status.value, record.points[0].key)
    ok inference 224 batch 1

    Args:
        arguments: overrides as text.
        inputs: inputs of a model object, as CPU tensors: one, a tuple of positional arguments, or a
            dictionary of named ones. Their first dimension is the batch. By default images.
        overrides: keys with their values, as for `compose`; `quiet=False` prints progress and
            results.

    Raises:
        UserError: the model or an override is wrong.
        PerfexpError: nothing could be measured.
    """
    if not (isinstance(model, str) or callable(model) or hasattr(model, "open")):
        raise UserError(
            f"{model!r} is not a model; pass a name, such as 'resnet50', a torch module, or a "
            "function."
        )
    quiet = overrides.setdefault("quiet", True)
    console = Console(quiet=quiet, out=io.StringIO() if quiet else None)
    own, others = {}, {}
    for key, value in overrides.items():
        if key.startswith("model__"):
            own[key.removeprefix("model__")] = value
        else:
            others[key] = value
    texts = [*arguments, *_texts(others)]
    with interrupts.handled():
        if not isinstance(model, str):
            record = _measured_here(model, inputs, texts, console)
        elif inputs is not None:
            raise UserError(
                f"inputs: other processes measure '{model}'; give its class a method "
                "example_inputs(batch_size)."
            )
        else:
            module, colon, _ = model.partition(":")
            is_own = colon and not torchvision_names.is_name(model)
            words = [f"model={model}", *texts, *_texts(own, "model.")]
            with _importable(module) if is_own else nullcontext():
                record = driver.run(_assignment(words), console)
    for line in failures(record) if quiet else ():
        console.warning(line)
    return record


def load(*places: str | os.PathLike[str], what: str = "points") -> pd.DataFrame:
    """Return a table of all runs in and below folders.

    >>> record = measure("fake", gpu="fake", tracking="none", processes=2, output_dir="runs/a")
    >>> table = load("runs")
    >>> table.model.unique().tolist(), table.batch_size.tolist()
    (['fake'], [1])

    Args:
        places: run folders, sweep folders, any folders above them, or records.
        what: `points`, with a row for each measurement; `layers`, or `samples`.

    Raises:
        UserError: there is no run.
    """
    from perfexp.commands.export import Collected  # with pandas

    return Collected.of(
        list(map(Path, places)), samples=what == "samples", layers=what == "layers"
    ).frame(what)


def _assignment(words: list[str], models: Mapping[str, Any] | None = None) -> Assignment:
    """Compose a run and choose its folder.

    Args:
        words: overrides.
        models: model options added to conf/ for this run, by name.

    Raises:
        UserError: the configuration is wrong, the folder holds another plan, or this machine cannot
            measure it.
    """
    plain = composition.compose(words, models or {})
    plan = config.typed(plain)
    name = naming.run_name((plan.model_name, plan.algorithm_name, plan.mode.name), {})
    folder = naming.run_folder(plan)
    refuse_other_plan(RunPaths(folder), plain)
    prerequisites.check_here(plan)
    return Assignment(plan=plan, plain=plain, folder=folder, name=name)


def _measured_here(
    model: Callable[..., Any], inputs: Any, texts: list[str], console: Console
) -> Record:
    """Measure a model object in this process, and return its record.

    Args:
        model: torch module, module class, or function.
        inputs: inputs of the model; None for images.
        texts: overrides.

    Raises:
        UserError: the folder has the results of another object, or an override is wrong.
    """
    from perfexp.worker.in_process import measure_points  # with torch

    name = _free_name(getattr(model, "__name__", type(model).__name__))
    # an object exists in this process only, so other processes cannot repeat the measurement
    defaults = ["processes=1", "cold_start=false"]
    if inputs is not None:
        defaults.append(f"batch_size={_batch_of(inputs)}")
    typed = {text.partition("=")[0] for text in texts}
    defaults = [text for text in defaults if text.partition("=")[0] not in typed]
    words = [f"model={name}", *defaults, *texts]
    assignment = _assignment(words, {name: {"_target_": _LIVE}})
    module = getattr(model, "__module__", type(model).__module__)
    assignment.plain["sources"] = sources.hashes([str(module)])
    paths = RunPaths(assignment.folder)
    if read_points(paths.points):  # equal plans do not mean equal objects
        raise UserError(
            f"{assignment.folder} has the results of an earlier object: choose another output_dir."
        )
    measured = partial(measure_points, assignment.plan, paths, model, inputs, console.warning)
    return driver.run(assignment, console, measured)


def _batch_of(inputs: Any) -> int:
    """Return the batch size of inputs: the length of their first tensor.

    Raises:
        UserError: there is no tensor with a batch.
    """
    tensors = inputs if isinstance(inputs, tuple | list) else [inputs]
    if isinstance(inputs, Mapping):
        tensors = list(inputs.values())
    lengths = (len(tensor) for tensor in tensors if getattr(tensor, "ndim", 0))
    if (length := next(lengths, 0)) == 0:
        raise UserError("inputs: give a tensor, a tuple or a dictionary of tensors with a batch.")
    return length


def _texts(overrides: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return keyword arguments as overrides; two underscores are a dot."""
    return [f"{prefix}{key.replace('__', '.')}={_text(value)}" for key, value in overrides.items()]


def _text(value: Any) -> str:
    """Return a Python value in Hydra's grammar, for example `[1,8]` or `null`."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_text(part)}" for key, part in value.items()) + "}"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = str(value)
    if re.fullmatch(r"[A-Za-z]\w*", text):
        return text
    return quoted(text)


def _free_name(name: str) -> str:
    """Return an option name for the user's model that does not hide a file in conf/."""
    word = re.sub(r"\W", "_", name)
    if (installation.conf_dir() / "model" / f"{word}.yaml").exists():
        return f"own_{word}"
    return word


@contextmanager
def _importable(module: str) -> Iterator[None]:
    """Let workers import a module from where this process finds it, while entered.

    Raises:
        UserError: another process could not find the module.
    """
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top != "__main__" else None
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(
            f"module '{module}' not found by another process; write the model into a file on the "
            "path."
        )
    folder = Path(spec.origin).parent
    if spec.submodule_search_locations:  # a package, whose origin is its __init__.py
        folder = folder.parent
    current_folder = [str(folder)] if str(folder) in sys.path or "" in sys.path else []
    path = os.pathsep.join([*current_folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, {"PYTHONPATH": path}):
        yield
