"""Talk with workers: pass on their events, and ask one about this machine or a plan.

The supervisor calls `listen`. Commands call `survey` (what can this machine measure?) and `query`
(which algorithms, or how much memory, does this plan use?), which start a worker for the answer.
"""

from __future__ import annotations

import hashlib
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
#: Activity during each survey part, for error messages.
_DOING = {
    "boards": "querying NVML",
    "torch": "importing torch",
    "torchvision": "importing torchvision",
    "cuda": "starting CUDA",
    "mps": "looking for Apple's GPU",
    "clocks": "timing the device's clocks",
}


class Heard(NamedTuple):
    """How a conversation with a worker ended.

    Attributes:
        code: the worker's exit code; a negative signal number if a signal ended it.
        last: the last event of each kind.
        termination: why the worker was terminated, as a verb phrase; None if it was not.
        garbled: whether its message could not be read.
    """

    code: int
    last: dict[str, Event]
    termination: str | None = None
    garbled: bool = False

    @property
    def ending(self) -> str:
        """Return how the worker ended, as a verb phrase."""
        if self.termination is None and self.code < 0:
            return f"was ended by {signal_name(-self.code)}"
        return self.termination or f"ended with code {self.code}"


def signal_name(number: int) -> str:
    """Return a signal's name."""
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"signal {number}"


def listen(
    process: WorkerProcess, silence_seconds: float | None, take: Callable[[Event], None]
) -> Heard:
    """Pass on a worker's events until it has ended, then end its child processes.

    The supervisor and queries share it.

    Args:
        process: a started worker.
        silence_seconds: longest time without an event; None for no limit. A worker that exceeds it
            is terminated.
        take: called with each event.
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
    """Return a worker's error from the event that reports it.

    It has the class, and so the exit code, that the worker meant.
    """
    if event.get("exit_code") == UserError.exit_code:
        return UserError(event["message"])
    return PerfexpError(event["message"])


def _ask(
    command: Sequence[str],
    log: Path,
    silence_seconds: float | None,
    imports: Sequence[str] | None = None,
    waiting: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], dict[str, Event], str | None]:
    """Start a worker with a log file and collect its answers.

    Args:
        command: command line of the worker.
        silence_seconds: longest time without an event; None for no limit.
        imports: modules that a forked worker finds imported; None for a new interpreter.
        waiting: called with the reason when the worker waits.

    Returns:
        Answers by name, the last event of each kind, and how the worker ended. The last is None if
        the worker finished normally.
    """
    parts: dict[str, Any] = {}

    def take(event: Event) -> None:
        """Store a part of the answer, or show what the worker waits for."""
        if event["event"] == "part":
            parts[event["name"]] = event["answer"]
        elif event.get("patient"):
            waiting(event["text"])

    heard = listen(WorkerProcess(command, log, imports=imports), silence_seconds, take)
    if "finished" in heard.last and not heard.termination:
        return parts, heard.last, None
    lines = [
        line.strip() for line in log.read_text(errors="replace").splitlines()[1:] if line.strip()
    ]
    why = ""
    if lines and not heard.termination and heard.code >= 0:
        why = f" ({lines[-1]})"
    return parts, heard.last, f"{heard.ending}{why}"


@contextmanager
def _scratch() -> Iterator[RunPaths]:
    """Yield a temporary run folder, for a worker that only answers."""
    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        paths = RunPaths(Path(folder))
        paths.details.mkdir()
        yield paths


def query(
    plain: Mapping[str, Any], question: str, *, waiting: Callable[[str], None]
) -> dict[str, Any]:
    """Return a worker's answer about a plan, without measuring it.

    `perfexp list` asks for algorithms, and `perfexp predict` for memory.

    Args:
        plain: plan as plain data.
        question: `algorithms` or `memory`.
        waiting: called with the reason when the worker waits.

    Raises:
        PerfexpError: the worker ended without an answer.
    """
    if config.typed(plain).seeks_batch:
        raise UserError("batch_size=max is found by trials on the device: set batch_size=N.")
    with _scratch() as paths:
        content = plan_file.to_yaml(plain)
        paths.plan.write_bytes(content)
        plan_hash = hashlib.sha256(content).hexdigest()
        command = worker_command(
            str(paths.root), f"--what={question}", f"--plan-sha256={plan_hash}"
        )
        parts, last, ending = _ask(
            command, paths.log, plain["timeout_seconds"], config.imports(plain), waiting
        )
    if event := last.get("refused") or last.get("failed"):
        raise error_of(event)
    if ending or question not in parts:
        raise PerfexpError(f"The worker {ending or 'ended without an answer'}.")
    return dict(parts[question])


def survey(index: int | None) -> dict[str, Any]:
    """Determine this machine's measuring equipment.

    `perfexp doctor` calls it, since this process may not import torch.

    Args:
        index: CUDA device for the clock test; None for no test.

    Returns:
        `parts`, the known parts by name, and `failure`. A failure is None, or its `text` and the
        part `during` which it happened.
    """
    command = worker_command("--what=survey", *([] if index is None else [f"--gpu-index={index}"]))
    try:
        with _scratch() as paths:
            parts, last, ending = _ask(command, paths.log, _SILENCE_SECONDS)
    except (PerfexpError, OSError) as error:
        return {"parts": {}, "failure": {"text": str(error), "during": None}}
    during, failure = last.get("block", {}).get("text"), None
    if ending:
        doing = ""
        if during in _DOING:
            doing = f" while {_DOING[during]}"
        text = f"the process that queries torch and the driver {ending}{doing}"
        failure = {"text": text, "during": during}
    return {"parts": parts, "failure": failure}


@cache
def visible_gpus() -> int:
    """Count the CUDA devices that `CUDA_VISIBLE_DEVICES` leaves visible.

    Commands that use all GPUs ask for their number.

    Raises:
        PerfexpError: they cannot be counted.
    """
    surveyed = survey(None)
    cuda = surveyed["parts"].get("cuda", {})
    if "devices" not in cuda:
        why = cuda.get("error") or (surveyed["failure"] or {}).get("text") or "no answer"
        raise PerfexpError(
            f"Cannot count the visible GPUs: {why}. Run `perfexp doctor` for details."
        )
    return len(cuda["devices"])
