"""perfexp speed: write speed JSON files from mmengine and mmcv logs or from run folders."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from perfexp.commands.app import LARGEST, MIXED, RECORD, Json, app, echo, emit, one_of, options
from perfexp.errors import UserError
from perfexp.plan.speed_folder import default_folder, refuse_no_folder
from perfexp.records import folders
from perfexp.records.record import Record
from perfexp.report.speed import Facts, Mode, Speed, of_log, of_record, placing

_REMEDY = "Choose another folder with --out DIR."


Places = Annotated[
    list[Path],
    typer.Argument(
        metavar="LOG|DIR", help="Logs of mmengine or mmcv, text or JSON; runs' folders."
    ),
]
Skip = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Skip the first N lines about steps; by default until they are steady.",
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(metavar="N", min=1, max=LARGEST, help="Images per GPU and step.")
]
Gpus = Annotated[int | None, typer.Option(metavar="N", min=1, max=LARGEST, help="Number of GPUs.")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Bare name of the model.")]
RunMode = Annotated[
    Mode | None,
    typer.Option(metavar="sp|mp", help="One GPU or several; by default by their number."),
]
Precision = Annotated[
    str | None,
    typer.Option(metavar="P", help="fp32, tf32, fp16, bf16, amp_fp16, amp_bf16 or amp."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Output folder, created if missing; this one, or outputs in a container.",
    ),
]


@app.command()
def speed(
    places: Places,
    skip: Skip = None,
    batch_size: BatchSize = None,
    gpus: Gpus = None,
    model: Model = None,
    run_mode: RunMode = None,
    precision: Precision = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Write a speed file for each training, with its images/s over all GPUs.

    The file name is MODEL_RUNMODE_bsN_PRECISION_GPUS_speed.json. Batch size, GPUs, model and
    precision come from the log. Options fill in missing values and take precedence. The exit code
    is 1 if a training failed.

    Example: perfexp speed work_dirs/fastscnn/20261128_100000.log --batch-size 4
    """
    if model is not None and not model.strip():
        raise UserError("--model is empty.")
    if precision is not None:
        one_of("precision", precision, [*options("precision"), *MIXED])
    out = Path(default_folder()) if out is None else out
    if out.exists():
        refuse_no_folder(out, "choose another with --out DIR.")
    facts = Facts(model=model, batch_size=batch_size, num_gpus=gpus, precision=precision)
    written: dict[Path, Speed] = {}
    exit_code = 0
    for source in places:
        try:
            for training in _found(source, facts, run_mode, skip):
                written[_write(training, out, written, places)] = training
        except UserError as error:
            echo(f"error: {error}", err=True)
            exit_code = error.exit_code
    documents = []
    lines = []
    for path, training in written.items():
        exit_code = exit_code or int(training.failed)
        documents.append({"file": path, "remark": training.remark, **training.document()})
        lines.append(training.line(path))
    emit({"trainings": documents}, lines, as_json=as_json)
    raise typer.Exit(exit_code)


def _found(path: Path, facts: Facts, mode: Mode | None, skip: int | None) -> Iterator[Speed]:
    """Yield the trainings in one place.

    Raises:
        UserError: there is no training, or it is unreadable.
    """
    if path.is_dir() or path.name == RECORD:
        if facts != Facts() or mode or skip is not None:
            raise UserError(f"{path}: options are for logs; a record has all values itself.")
        yield from _of_runs(path)
    else:
        yield of_log(path, facts, mode=mode, skip=skip)


def _of_runs(path: Path) -> Iterator[Speed]:
    """Yield the trainings in the records in and below a folder.

    Raises:
        UserError: there is no record, or no training.
    """
    refused: list[OSError] = []
    files = [path]
    if path.is_dir():
        files = list(folders.below(path, RECORD, refused=refused.append))
    if refused:
        raise UserError(f"{refused[0].filename} can't be read: {refused[0].strerror}.")
    if not files:
        raise UserError(
            f"There is no {RECORD} in or below {path}. Of mmengine and mmcv, name the log itself: "
            "TIMESTAMP.log, vis_data/scalars.json or TIMESTAMP.log.json."
        )
    trainings: list[Speed] = []
    for file in files:
        trainings += of_record(Record.load(file), file.parent)
    if not trainings:
        raise UserError(
            f"{path} holds no training: only mode=train and mode=train_inference have one."
        )
    yield from trainings


def _write(training: Speed, out: Path, written: Collection[Path], places: Sequence[Path]) -> Path:
    """Write a training's speed file and return its path.

    Args:
        training: training.
        out: output folder, created if missing.
        written: files of this command so far.
        places: input files, which are not overwritten.

    Raises:
        UserError: the file cannot be written.
    """
    # several trainings may have the same name
    numbered = next(
        named for named in placing.numbered(training) if out / named.file_name not in written
    )
    path = out / numbered.file_name
    if path.resolve() in {source.resolve() for source in places}:
        raise UserError(f"{path} is an input file. {_REMEDY}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} can't be created: {error.strerror}. {_REMEDY}") from error
    return placing.put(numbered, out, remedy=_REMEDY)
