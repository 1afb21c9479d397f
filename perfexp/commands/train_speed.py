"""perfexp train-speed: train one model, set by six words, and write its speed file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from perfexp.cli.composition import compose
from perfexp.commands.app import LARGEST, MIXED, ConfigDir, app, command_line, echo
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.plan import config, naming
from perfexp.plan.config import Plan
from perfexp.plan.flags import DRY_RUN
from perfexp.plan.override_keys import key_of
from perfexp.plan.speed_folder import default_folder
from perfexp.records.old_names import arguments_of_today
from perfexp.records.record import Record
from perfexp.report.speed import Mode, Speed, placing
from perfexp.report.tables import speed_files
from perfexp.run import worker_query

#: Keys that the six words set.
_SET_BY = {
    "model": "MODEL",
    "mode": "the command: it trains",
    "batch_size": "BATCH_SIZE",
    "stopping": "ITERATIONS",
    "stopping.measure": "ITERATIONS",
    "data.workers": "WORKERS",
}
#: Default, which KEY=VALUE overrides.
_INPUT_SIZE = "512x1024"


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides of a run: data=cityscapes data.root=DIR, input_size=512x512, ….",
    ),
]


# -1 is a number to refuse, not an option
@app.command("train-speed", context_settings={"ignore_unknown_options": True})
def train_speed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in model=MODEL: fastscnn, ….")],
    run_mode: Annotated[
        Mode, typer.Argument(metavar="sp|mp", help="One GPU, or all visible ones.")
    ],
    precision: Annotated[
        str, typer.Argument(metavar="PRECISION", help="fp32, fp16 or amp (mixed), tf32, ….")
    ],
    batch_size: Annotated[
        int,
        typer.Argument(metavar="BATCH_SIZE", min=1, max=LARGEST, help="Images per GPU and step."),
    ],
    iterations: Annotated[
        int,
        typer.Argument(
            metavar="ITERATIONS", min=1, max=LARGEST, help="Timed steps after the warm-up."
        ),
    ],
    workers: Annotated[
        int,
        typer.Argument(
            metavar="WORKERS", min=0, max=LARGEST, help="Processes that load data, per GPU."
        ),
    ],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option(DRY_RUN, help="Print what would be measured.")] = False,
    config_dir: ConfigDir = None,
) -> None:
    """Train a model and write its speed file.

    MODEL_RUNMODE_bsN_PRECISION_GPUS_speed.json goes to the current folder, or to speed_dir=DIR. In
    a container that mounts outputs, it goes to outputs. The command is the same as `perfexp
    model=MODEL mode=train …`, with input_size=512x1024 by default. The exit code is 1 if the
    training failed.

    Example: perfexp train-speed fastscnn sp fp32 4 100 4
    """
    arguments, plan = settle(
        overrides or (),
        config_dir,
        model=model,
        run_mode=run_mode,
        precision=MIXED.get(precision, precision),
        batch_size=batch_size,
        iterations=iterations,
        workers=workers,
    )
    _check_speed_file(plan)
    for note in _notes(overrides or (), precision, workers, plan):
        echo(note)
    if dry_run:
        arguments.append(DRY_RUN)
    code, folder = run_plan(arguments, plan)
    if dry_run:
        raise typer.Exit(code)
    # codes above 1 are usage errors, which leave no record
    raise typer.Exit(code if code > 1 else max(code, _print_speed(folder)))


def run_plan(arguments: Sequence[str], plan: Plan) -> tuple[int, Path]:
    """Measure a plan by its command line; return the exit code and the record folder.

    `selfcheck` and `train-speed` call it after they have settled the command line.
    """
    folder = naming.run_folder(plan)
    words = list(arguments)
    if not (plan.output_dir or plan.stage):
        words.append(f"output_dir={folder}")
    return main(words), folder


def given_keys(overrides: Sequence[str], set_by: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a command's overrides by key.

    Other commands that set keys themselves, such as `ab`, call it as well.

    Args:
        set_by: keys that the command itself sets, with what sets them.

    Raises:
        UserError: a word is not an override, or the command sets its key.
    """
    words = command_line(arguments_of_today(overrides), None)
    values = {key_of(text): text.partition("=")[2] for text in words}
    for key in values:
        if key in set_by:
            raise UserError(f"'{key}' is set by {set_by[key]}; leave it out.")
    return values


def settle(
    overrides: Sequence[str],
    config_dir: Path | None,
    *,
    model: str,
    run_mode: Mode,
    precision: str,
    batch_size: int,
    iterations: int,
    workers: int,
) -> tuple[list[str], Plan]:
    """Return the command line of the run, and its plan.

    `train_speed` calls it before it measures.

    Args:
        overrides: overrides that the user typed.
        config_dir: further folder with options.
        iterations: timed steps after the warm-up.
        workers: loading processes per GPU.

    Raises:
        UserError: the run or its run mode is impossible.
    """
    typed = given_keys(overrides, _SET_BY)
    wanted = {"model": model, "mode": "train", "precision": precision, "batch_size": batch_size}
    wanted |= {"stopping": "fixed", "stopping.measure": iterations, "input_size": _INPUT_SIZE}
    wanted["speed_dir"] = default_folder()
    usual = [f"{key}={value}" for key, value in wanted.items() if key not in typed]
    # an experiment file may request a sweep
    arguments = command_line([*usual, *overrides, "hydra.mode=RUN"], config_dir)
    # the data and the device decide which further keys exist
    plain = compose(arguments)
    if "workers" in plain["data"]:
        arguments.append(f"data.workers={workers}")
    count = _num_gpus(run_mode, plain["gpu"], said="gpu.count" in typed)
    if count is not None and "gpu.count" not in typed:
        arguments.append(f"gpu.count={count}")
    return arguments, config.typed(compose(arguments))


def _num_gpus(run_mode: Mode, gpu: dict[str, Any], *, said: bool) -> int | None:
    """Return the GPU count for a run mode; None if the device has no count.

    Args:
        said: whether the user set gpu.count.

    Raises:
        UserError: the run mode and the GPU count contradict each other.
    """
    count, name = gpu.get("count"), gpu["name"]
    if run_mode is Mode.sp:
        if said and count != 1:
            raise UserError(
                f"sp is one GPU, but gpu.count={count}; use mp, or leave gpu.count out."
            )
        if count is None:
            return None
        return 1
    if count is None:
        raise UserError(f"mp needs several GPUs, but gpu={name} has no gpu.count; use sp.")
    if said:
        if count < 2:
            raise UserError(
                f"mp needs two GPUs or more, but gpu.count={count}; use sp, or leave gpu.count out."
            )
        return int(count)
    if name in ("cpu", "mps"):
        raise UserError(
            f"mp needs visible GPUs, but gpu={name} is not a GPU; "
            "use sp, or gpu.count=N for N processes."
        )
    visible = worker_query.visible_gpus() - int(gpu.get("index") or 0)
    if visible < 2:
        seen = "no GPU is" if visible < 1 else "one GPU is"
        raise UserError(
            f"mp needs two GPUs or more, but {seen} visible; use sp, or check CUDA_VISIBLE_DEVICES."
        )
    return visible


def _check_speed_file(plan: Plan) -> None:
    """Raise UserError before the training if its speed file cannot be written."""
    if not plan.speed_dir:
        return
    count, keys = int(plan.gpu.get("count") or 1), plan.timed_keys()
    if len(keys) == 1:  # several names depend on the record
        speed = Speed(
            log_file="",
            model=plan.model_name,
            mode=Mode.of(count),
            num_gpus=count,
            batch_size=keys[0].batch_size,
            precision=keys[0].precision,
            failed=True,
        )
        file = Path(plan.speed_dir).expanduser() / speed.file_name
        placing.refuse_foreign(file, "Move it away, or choose another folder with speed_dir=DIR.")


def _notes(overrides: Sequence[str], precision: str, workers: int, plan: Plan) -> Iterator[str]:
    """Yield notes about a word that means something else here than elsewhere, or has no effect."""
    if precision in MIXED and "precision" not in given_keys(overrides, _SET_BY):
        half = " Parameters and inputs in half precision are precision=fp16, added at the end."
        meant = f"{precision} is mixed precision here: precision={MIXED[precision]}."
        yield meant + (half if precision == "fp16" else "")
    if "workers" not in plan.data:
        data = plan.choices.get("data", "the data")
        unused = f"{data} has no workers: {workers} is not used, and no loading is in the figure."
        yield f"{unused} data=cityscapes data.root=DIR trains on images."


def _print_speed(folder: Path) -> int:
    """Print path and figure, and return an exit code.

    The code is 1 if a training failed or its file is not in the requested folder.
    """
    record = Record.load(folder)
    speed_dir = record.plan.get("speed_dir")
    wanted, went_wrong = Path(str(speed_dir)).expanduser().resolve() if speed_dir else None, False
    for speed, path in speed_files.where(record, folder):
        echo(speed.line(path))
        echo(f"FINAL_RESULT: {speed.images_per_second:.6g} images/s")
        is_there = path is not None and wanted in (None, path.parent.resolve())
        went_wrong |= speed.failed or not is_there
    return int(went_wrong)
