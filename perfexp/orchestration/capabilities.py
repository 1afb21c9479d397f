"""Survey: what this machine can measure with; asked of a process of its own, which may import torch, hang or die."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from perfexp.devices import nvml
from perfexp.errors import PerfexpError
from perfexp.host.process import SilenceError, WorkerProcess, worker_command

#: So long the process may take for one part: a first import of torch from a slow disk takes a minute.
_SILENCE_SECONDS = 180.0
#: What is being done while a part is asked for.
_DOING = {
    "boards": "asking NVML",
    "torch": "importing torch",
    "torchvision": "importing torchvision",
    "cuda": "starting CUDA",
    "mps": "looking for Apple's GPU",
    "clocks": "timing the device's clocks",
}

Tell = Callable[..., None]


def answer(index: int | None, tell: Tell) -> None:
    """Find out each part and tell it at once, so that what is known outlives a part that ends the process.

    Args:
        index: number of the CUDA device whose clocks are tried; None for none.
        tell: where to.
    """
    for name, ask in _questions(index):
        tell("block", text=name)
        try:
            found = ask()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}".strip()}
        tell("part", name=name, answer=found)


def conduct(
    index: int | None, *, command: Sequence[str] | None = None, silence_seconds: float = _SILENCE_SECONDS
) -> dict[str, Any]:
    """Have a fresh process answer.

    Args:
        index: number of the CUDA device whose clocks are tried; None for none.
        command: instead of the worker's own.
        silence_seconds: a process that tells nothing for so long is ended.

    Returns:
        `parts` by name, as far as it came, and `failure`: None, or `text` and the part that was under way, `during`.
    """
    chosen = [] if index is None else [f"--gpu-index={index}"]
    command = command or worker_command("--probe", *chosen)
    survey: dict[str, Any] = {"parts": {}, "failure": None}
    try:
        with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
            _listen(command, Path(folder) / "survey.log", silence_seconds, survey)
    except (PerfexpError, OSError) as error:
        survey["failure"] = {"text": str(error), "during": None}
    return survey


def _questions(index: int | None) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The parts in their order: NVML first, which tells of other processes before this one is among them."""
    yield "boards", _boards
    yield "torch", partial(_of_torch, "torch_build")
    yield "torchvision", _torchvision
    yield "cuda", partial(_of_torch, "cuda_devices")
    yield "mps", partial(_of_torch, "apple_gpu")
    if index is not None:
        yield "clocks", partial(_of_torch, "try_clocks", index)
    yield "energy", partial(_of_torch, "try_energy", index)


def _boards() -> dict[str, Any]:
    return nvml.all_boards()


def _of_torch(question: str, *arguments: Any) -> dict[str, Any]:
    from perfexp.diagnosis import detected_devices

    answered: dict[str, Any] = getattr(detected_devices, question)(*arguments)
    return answered


def _torchvision() -> dict[str, Any]:
    from perfexp.models import torchvision_import

    torchvision_import.import_torchvision()
    return torchvision_import.torchvision_facts()


def _listen(command: Sequence[str], log: Path, silence_seconds: float, survey: dict[str, Any]) -> None:
    """Enter what the process tells, then how it ended if that was not well."""
    process = WorkerProcess(command, log)
    during, failure, finished = None, None, False
    try:
        for event in process.events(silence_seconds):
            if event["event"] == "block":
                during = str(event["text"])
            elif event["event"] == "part":
                survey["parts"][str(event["name"])] = dict(event["answer"])
            finished = event["event"] == "finished"
    except SilenceError:
        failure = f"told nothing for {silence_seconds:g} s and was ended"
    except (ValueError, KeyError, TypeError, AttributeError):  # JSON of another shape, or none
        failure = "answered something that is not understood"
    finally:
        code = process.end()
    if failure is None and not finished:
        failure = _ending(code, log)
    if failure is not None:
        doing = f" while {_DOING[during]}" if during in _DOING else ""
        survey["failure"] = {"text": f"the process that asks torch and the driver {failure}{doing}", "during": during}


def _ending(code: int, log: Path) -> str:
    if code < 0:
        return f"was ended by {_signal_name(-code)}"
    said = [line for line in log.read_text(errors="replace").splitlines()[1:] if line.strip()]
    return f"ended with code {code}" + (f" ({said[-1].strip()})" if said else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
