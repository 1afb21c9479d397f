"""Conversations with a worker: its events until it has ended, and the answer to one question about a plan."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from perfexp.errors import PerfexpError, UserError
from perfexp.host.process import Event, MessageError, SilenceError, WorkerProcess, worker_command
from perfexp.plan import config, plan_file
from perfexp.records import messages


class Heard(NamedTuple):
    """How a conversation ended.

    Attributes:
        code: exit code of the worker, minus the number of the signal that ended it.
        silence: its silence, after which it was terminated; None without.
        garbled: why a message of it could not be read, after which it was terminated; None if all were.
    """

    code: int
    silence: SilenceError | None = None
    garbled: str | None = None

    @property
    def termination(self) -> str | None:
        """Why it was terminated, as a verb and its object; None if it was not."""
        if self.silence is not None and not self.silence.finished:
            return f"sent no progress for {self.silence.seconds:g} s and was terminated"
        return None if self.garbled is None else f"sent a message that cannot be read ({self.garbled})"


def listen(process: WorkerProcess, silence_seconds: float | None, take: Callable[[Event], None]) -> Heard:
    """Pass on the events of a worker until it has ended, and end what it started.

    Args:
        silence_seconds: longest time without an event, or None for any.
    """
    silence, garbled = None, None
    try:
        for event in process.events(silence_seconds):
            messages.check(event)
            take(event)
    except SilenceError as error:
        silence = error
    except MessageError as error:
        garbled = str(error)
    finally:
        code = process.end()
    return Heard(code, silence, garbled)


def query(plain: Mapping[str, Any], what: str, *, waiting: Callable[[str], None]) -> dict[str, Any]:
    """Return a worker's answer about a plan; raises PerfexpError if it ends without one.

    Args:
        plain: plan as plain data.
        what: `algorithms` or `memory`.
        waiting: called with the reason why the worker waits.
    """
    if config.typed(plain).seeks_batch:
        raise UserError("batch_size=max is found by trials on the device: set batch_size=N.")
    answers: dict[str, Event] = {}

    def take(event: Event) -> None:
        answers[event["event"]] = event
        if event.get("patient"):
            waiting(event["text"])

    with tempfile.TemporaryDirectory(prefix="perfexp-") as folder:
        content, log = plan_file.to_yaml(plain), Path(folder) / "run.log"
        (Path(folder) / "plan.yaml").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        command = worker_command(folder, f"--what={what}", f"--plan-sha256={sha256}")
        heard = listen(WorkerProcess(command, log, imports=config.imports(plain)), plain["timeout_seconds"], take)
        if (failure := answers.get("refused") or answers.get("failed")) is not None:
            raise (UserError if failure.get("exit_code") == 2 else PerfexpError)(failure["message"])
        if heard.termination:
            raise PerfexpError(f"The worker {heard.termination}.")
        if what not in answers:
            last = last_line(log)
            raise PerfexpError(f"The worker ended with code {heard.code}{f': {last}' if last else ''}.")
        return dict(answers[what]["answer"])


def last_line(log: Path) -> str:
    """Return the last line of a worker's log that is not blank, after that of its command."""
    lines = log.read_text(errors="replace").splitlines()[1:]
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
