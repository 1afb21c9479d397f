"""Worker query: one question about a plan, answered by a fresh process that imports torch and measures nothing."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perfexp.errors import PerfexpError, UserError
from perfexp.host.process import MessageError, SilenceError, WorkerProcess, worker_command
from perfexp.orchestration.capabilities import last_line
from perfexp.plan import config, plan_file
from perfexp.records import messages


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
        content, log = plan_file.to_yaml(plain), Path(folder) / "run.log"
        (Path(folder) / "plan.yaml").write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        command = worker_command(folder, f"--what={what}", f"--plan-sha256={sha256}")
        process = WorkerProcess(command, log, imports=config.imports(plain))
        answer, failure = None, None
        try:
            for event in process.events(plain["timeout_seconds"]):
                messages.check(event)
                if event["event"] == what:
                    answer = event["answer"]
                elif event["event"] in ("refused", "failed"):
                    failure = event
                elif event.get("patient"):
                    waiting(event["text"])
        except SilenceError as error:
            failure = {"message": f"The worker sent no progress for {error.seconds:g} s and was terminated."}
        except MessageError as error:
            failure = {"message": f"The worker sent a message that cannot be read ({error})."}
        finally:
            code = process.end()
        if failure is not None:
            raise (UserError if failure.get("exit_code") == 2 else PerfexpError)(failure["message"])
        if answer is None:
            last = last_line(log)
            raise PerfexpError(f"The worker ended with code {code}{f': {last}' if last else ''}.")
        return dict(answer)
