"""A list of commands within a limit of time, for a device that is lent by the minute.

    python tools/sequence.py tools/sequences/energy.txt --seconds 590 --out results

A line of the list is a name, the seconds that it takes about, and a command of bash:

    windows  70  $PYTHON $ROOT/validation/energy_repeat.py --windows 8

They run one after the other, in the list's order, each in `out/NAME` with what it prints in `out/NAME/printed.txt`;
`$PERFEXP` is `$PYTHON -m perfexp`, `$ROOT` the project's folder, `$STEP` the step's. A command whose seconds do not fit
into what is left is left out, one that takes twice its seconds, or longer than what is left, is ended with all its
processes. A table at the end says which ended how. `--only NAME…` takes some of them, `--list` says what they would
take. The lists in `tools/sequences` are those behind the tables of docs/ that need a GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
#: What is ended gets so long to write what it has.
GRACE_SECONDS = 5.0
#: … and so long to vanish when it is killed: a driver may hold it.
STUCK_SECONDS = 60.0


@dataclass(frozen=True)
class Step:
    """A command of the list.

    Attributes:
        name: of it and of its folder.
        seconds: that it takes about.
        command: of bash.
    """

    name: str
    seconds: float
    command: str


def read(path: Path) -> list[Step]:
    """The steps of a list: of lines that are not empty and no comments; a backslash at the end joins two of them.

    Args:
        path: of the list.

    Raises:
        ValueError: a line is no step, or a name stands there twice.
    """
    steps: list[Step] = []
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, seconds, command = line.split(maxsplit=2)
            steps.append(Step(name, float(seconds), command))
        except ValueError:
            raise ValueError(f"{path}: no name, seconds and command: {line}") from None
    names = [step.name for step in steps]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: there twice: {', '.join(sorted(twice))}")
    return steps


def run(step: Step, folder: Path, seconds: float) -> int | None:
    """A step's exit code; None where it had to be ended.

    Args:
        step: of the list.
        folder: for it, made here.
        seconds: that are left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "PYTHONUNBUFFERED": "1",
        "PYTHON": sys.executable,
        "PERFEXP": f"{sys.executable} -m perfexp",
        "ROOT": str(ROOT),
        "STEP": str(folder),
    }
    with (folder / "printed.txt").open("ab") as printed:
        printed.write(f"$ {step.command}\n".encode())
        printed.flush()
        process = subprocess.Popen(
            ["bash", "-c", step.command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a step: nothing of it may work beside the next one.

    Args:
        process: that began it, first of its group.
    """
    for number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, STUCK_SECONDS)):
        late = time.monotonic() + patience
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        while works(process.pid) and time.monotonic() < late:
            process.poll()
            time.sleep(0.05)
    process.wait()


def works(group: int) -> bool:
    """Whether a process of a group is there that has not ended but for its parent's notice.

    Args:
        group: number of it.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the list; 0 if every step of it ended well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("list", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--list", dest="listing", action="store_true", help="run nothing")
    arguments = parser.parse_args(argv)
    try:
        steps = read(arguments.list)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if unknown := set(arguments.only) - {step.name for step in steps}:
        parser.error(f"{arguments.list} has no {', '.join(sorted(unknown))}")
    steps = [step for step in steps if not arguments.only or step.name in arguments.only]
    table = Table("step", "ended", "took, s", "expected, s", title=str(arguments.list))
    end, well = time.monotonic() + arguments.seconds, True
    for step in steps:
        begun, code, ended = time.monotonic(), None, "would run"
        if not arguments.listing:
            left = end - begun
            fits = step.seconds <= left
            code = (
                run(step, arguments.out.absolute() / step.name, min(left, 2 * step.seconds))
                if fits
                else None
            )
            ended = "left out" if not fits else "out of time" if code is None else f"code {code}"
            well = well and code == 0
        took = f"{time.monotonic() - begun:.0f}"
        table.add_row(step.name, ended, took, f"{step.seconds:.0f}")
        print(f"{step.name}: {ended}, {took} s", flush=True)
    Console(width=100).print(table)
    print(f"{sum(step.seconds for step in steps):.0f} s expected in all")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
