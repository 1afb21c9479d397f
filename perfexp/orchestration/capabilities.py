"""Capabilities: the measuring equipment of this machine, from a fresh process that may import torch, hang or die."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from perfexp.devices import nvml
from perfexp.errors import PerfexpError
from perfexp.host.process import MessageError, SilenceError, WorkerProcess, worker_command
from perfexp.records import messages

#: Limit for one part: a first import of torch from a slow disk takes a minute.
_SILENCE_SECONDS = 180.0
#: Activities while the parts are determined, for error messages.
_DOING = {
    "boards": "querying NVML",
    "torch": "importing torch",
    "torchvision": "importing torchvision",
    "cuda": "starting CUDA",
    "mps": "looking for Apple's GPU",
    "clocks": "timing the device's clocks",
}

Send = Callable[..., None]


def answer(index: int | None, send: Send) -> None:
    """Determine each part and send it at once: a later part may end the process. See `conduct` for the index."""
    for name, determine in _parts(index):
        send("block", text=name)
        try:
            facts = determine()
        except Exception as error:
            facts = {"error": f"{type(error).__name__}: {error}".strip()}
        send("part", name=name, answer=facts)


def conduct(
    index: int | None, *, command: Sequence[str] | None = None, silence_seconds: float = _SILENCE_SECONDS
) -> dict[str, Any]:
    """Determine all parts in a fresh process: `parts` by name as far as they are known, and `failure`.

    A failure is None, or its `text` and the part `during` which it happened. Clocks are those of the CUDA device of
    this index, if any.
    """
    command = command or worker_command("--probe", *([] if index is None else [f"--gpu-index={index}"]))
    report: dict[str, Any] = {"parts": {}, "failure": None}
    try:
        with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
            _listen(command, Path(folder) / "survey.log", silence_seconds, report)
    except (PerfexpError, OSError) as error:
        report["failure"] = {"text": str(error), "during": None}
    return report


@cache
def visible_gpus() -> int:
    """Count the CUDA devices that `CUDA_VISIBLE_DEVICES` leaves; raises PerfexpError if that is impossible."""
    report = conduct(None)
    cuda = report["parts"].get("cuda", {})
    if "devices" not in cuda:
        why = cuda.get("error") or (report["failure"] or {}).get("text") or "no answer"
        raise PerfexpError(f"Cannot count the visible GPUs: {why}. Run `perfexp doctor` for details.")
    return len(cuda["devices"])


def _parts(index: int | None) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the parts in order: NVML first, which lists other processes before this one is among them."""
    yield "boards", nvml.all_boards
    yield "torch", partial(_of_torch, "torch_build")
    yield "torchvision", _torchvision
    yield "cuda", partial(_of_torch, "cuda_devices")
    yield "mps", partial(_of_torch, "apple_gpu")
    if index is not None:
        yield "clocks", partial(_of_torch, "try_clocks", index)
    yield "energy", partial(_of_torch, "try_energy", index)


def _of_torch(function: str, *arguments: Any) -> dict[str, Any]:
    from perfexp.diagnosis import detected_devices

    facts: dict[str, Any] = getattr(detected_devices, function)(*arguments)
    return facts


def _torchvision() -> dict[str, Any]:
    from perfexp.models import torchvision_import

    torchvision_import.import_torchvision()
    return torchvision_import.torchvision_facts()


def _listen(command: Sequence[str], log: Path, silence_seconds: float, report: dict[str, Any]) -> None:
    process = WorkerProcess(command, log)
    during, failure, finished = None, None, False
    try:
        for event in process.events(silence_seconds):
            messages.check(event)
            if event["event"] == "block":
                during = event["text"]
            elif event["event"] == "part":
                report["parts"][event["name"]] = event["answer"]
            finished = event["event"] == "finished"
    except SilenceError:
        failure = f"sent nothing for {silence_seconds:g} s and was terminated"
    except MessageError:
        failure = "sent a message that cannot be read"
    finally:
        code = process.end()
    if failure is None and not finished:
        failure = _ending(code, log)
    if failure is not None:
        doing = f" while {_DOING[during]}" if during in _DOING else ""
        text = f"the process that queries torch and the driver {failure}{doing}"
        report["failure"] = {"text": text, "during": during}


def _ending(code: int, log: Path) -> str:
    if code < 0:
        with suppress(ValueError):  # of a number without a name
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    last = last_line(log)
    return f"ended with code {code}" + (f" ({last})" if last else "")


def last_line(log: Path) -> str:
    """Return the last line of a worker's log that is not blank, after that of its command."""
    lines = log.read_text(errors="replace").splitlines()[1:]
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
