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
from perfexp.host.process import Event, WorkerProcess, worker_command
from perfexp.orchestration.worker_query import last_line, listen

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
    during, finished = None, False

    def take(event: Event) -> None:
        nonlocal during, finished
        if event["event"] == "block":
            during = event["text"]
        elif event["event"] == "part":
            report["parts"][event["name"]] = event["answer"]
        finished = event["event"] == "finished"

    heard = listen(WorkerProcess(command, log), silence_seconds, take)
    if heard.termination or not finished:
        doing = f" while {_DOING[during]}" if during in _DOING else ""
        failure = heard.termination or _ending(heard.code, log)
        text = f"the process that queries torch and the driver {failure}{doing}"
        report["failure"] = {"text": text, "during": during}


def _ending(code: int, log: Path) -> str:
    if code < 0:
        with suppress(ValueError):  # of a number without a name
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    last = last_line(log)
    return f"ended with code {code}" + (f" ({last})" if last else "")
