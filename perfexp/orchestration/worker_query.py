"""Conversations with a worker: its events until it has ended, and its answers about this machine or a plan."""

from __future__ import annotations

import hashlib
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from perfexp.errors import PerfexpError, UserError
from perfexp.host.process import Event, MessageError, SilenceError, WorkerProcess, worker_command
from perfexp.plan import config, plan_file
from perfexp.records import messages
from perfexp.records.paths import RunPaths

#: Limit for one part of a survey: a first import of torch from a slow disk takes a minute.
_SILENCE_SECONDS = 180.0
#: Activities while the parts of a survey are determined, for error messages.
_DOING = {
    "boards": "querying NVML",
    "torch": "importing torch",
    "torchvision": "importing torchvision",
    "cuda": "starting CUDA",
    "mps": "looking for Apple's GPU",
    "clocks": "timing the device's clocks",
}


class Heard(NamedTuple):
    """How a conversation ended: the worker's exit code, or minus the number of the signal that ended it.

    A worker that was terminated has the reason, as a verb and its object; `garbled` if its message cannot be read.
    `last` has the last event of each kind.
    """

    code: int
    last: dict[str, Event]
    termination: str | None = None
    garbled: bool = False

    @property
    def ending(self) -> str:
        """How the worker ended, as a verb and its object."""
        if self.termination is None and self.code < 0:
            return f"was ended by {signal_name(-self.code)}"
        return self.termination or f"ended with code {self.code}"


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def listen(
    process: WorkerProcess, silence_seconds: float | None, take: Callable[[Event], None]
) -> Heard:
    """Pass on the events of a worker until it has ended, and end what it started.

    Args:
        silence_seconds: longest time without an event, or None for any.
    """
    last: dict[str, Event] = {}
    termination, garbled = None, False
    try:
        for event in process.events(silence_seconds):
            messages.check(event)
            last[event["event"]] = event
            take(event)
    except SilenceError as error:
        if not error.finished:
            termination = f"sent no progress for {error.seconds:g} s and was terminated"
    except MessageError as error:
        termination, garbled = f"sent a message that cannot be read ({error})", True
    finally:
        code = process.end()
    return Heard(code, last, termination, garbled)


def error_of(event: Event) -> PerfexpError:
    """Return the error of a worker that refused or failed, by its event."""
    return (UserError if event.get("exit_code") == UserError.exit_code else PerfexpError)(
        event["message"]
    )


def _ask(
    command: Sequence[str],
    folder: str,
    silence_seconds: float | None,
    imports: Sequence[str] | None = None,
    waiting: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], dict[str, Event], str | None]:
    """Start a worker, whose log is in a folder, and return its answers by name, and the last event of each kind.

    If the worker has not finished, how it ended comes third.
    """
    parts: dict[str, Any] = {}

    def take(event: Event) -> None:
        if event["event"] == "part":
            parts[event["name"]] = event["answer"]
        elif event.get("patient"):
            waiting(event["text"])

    log = RunPaths(Path(folder)).log
    heard = listen(WorkerProcess(command, log, imports=imports), silence_seconds, take)
    if "finished" in heard.last and not heard.termination:
        return parts, heard.last, None
    lines = [
        line.strip() for line in log.read_text(errors="replace").splitlines()[1:] if line.strip()
    ]
    why = f" ({lines[-1]})" if lines and not heard.termination and heard.code >= 0 else ""
    return parts, heard.last, f"{heard.ending}{why}"


def query(plain: Mapping[str, Any], what: str, *, waiting: Callable[[str], None]) -> dict[str, Any]:
    """Return a worker's answer about a plan; raises PerfexpError if it ends without one.

    Args:
        plain: plan as plain data.
        what: `algorithms` or `memory`.
        waiting: called with the reason why the worker waits.
    """
    if config.typed(plain).seeks_batch:
        raise UserError("batch_size=max is found by trials on the device: set batch_size=N.")
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        content = plan_file.to_yaml(plain)
        paths = RunPaths(Path(folder))
        paths.details.mkdir()
        paths.plan.write_bytes(content)
        command = worker_command(
            folder, f"--what={what}", f"--plan-sha256={hashlib.sha256(content).hexdigest()}"
        )
        parts, last, ending = _ask(
            command, folder, plain["timeout_seconds"], config.imports(plain), waiting
        )
    if event := last.get("refused") or last.get("failed"):
        raise error_of(event)
    if ending or what not in parts:
        raise PerfexpError(f"The worker {ending or 'ended without an answer'}.")
    return dict(parts[what])


def survey(index: int | None) -> dict[str, Any]:
    """Determine the measuring equipment of this machine: `parts` by name as far as they are known, and `failure`.

    A failure is None, or its `text` and the part `during` which it happened. Clocks are those of the CUDA device of
    this index, if any.
    """
    command = worker_command("--what=survey", *([] if index is None else [f"--gpu-index={index}"]))
    try:
        with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
            parts, last, ending = _ask(command, folder, _SILENCE_SECONDS)
    except (PerfexpError, OSError) as error:
        return {"parts": {}, "failure": {"text": str(error), "during": None}}
    during, failure = last.get("block", {}).get("text"), None
    if ending:
        doing = f" while {_DOING[during]}" if during in _DOING else ""
        text = f"the process that queries torch and the driver {ending}{doing}"
        failure = {"text": text, "during": during}
    return {"parts": parts, "failure": failure}


@cache
def visible_gpus() -> int:
    """Count the CUDA devices that `CUDA_VISIBLE_DEVICES` leaves; raises PerfexpError if that is impossible."""
    surveyed = survey(None)
    cuda = surveyed["parts"].get("cuda", {})
    if "devices" not in cuda:
        why = cuda.get("error") or (surveyed["failure"] or {}).get("text") or "no answer"
        raise PerfexpError(
            f"Cannot count the visible GPUs: {why}. Run `perfexp doctor` for details."
        )
    return len(cuda["devices"])
