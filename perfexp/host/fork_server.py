"""Client for the fork server, which forks workers that have already imported their modules.

Importing torch takes seconds. The parent process therefore starts a server
(`perfexp.worker.server`) that imports it once, and each worker is a fork of that server.
`host.process` calls `fork`; if forking is impossible (`Unforkable`), it starts a new interpreter
instead.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from perfexp.host import interrupts
from perfexp.host.installation import is_here_on_path, python_command

#: First byte from a forked process, and format of the exit code that follows at its end.
READY, STATUS = b"r", "=i"
#: Time limits for imports, and until a forked process begins.
_IMPORT_SECONDS, _FORK_SECONDS = 600.0, 15.0
#: Variables that change between runs but do not matter to workers: perfexp sets the first while
#: Hydra composes, pytest the second for each test.
_IGNORED = {"HYDRA_FULL_ERROR", "PYTEST_CURRENT_TEST"}

#: How this worker was started, `forked` or `fresh`; None in other processes.
process_start: str | None = None
#: Resident server memory that a forked process does not count: library pages that the server has
#: touched.
uncounted_bytes = 0
#: In-memory file for random model weights, inherited by all workers of a server; None without a
#: server.
weights_file: int | None = None


class Unforkable(Exception):
    """Raised with the reason why a worker must be a new interpreter."""


class ForkedProcess:
    """A forked process with the `subprocess.Popen` methods that `WorkerProcess` uses.

    The process is a child of the server, so this process cannot wait for it as for its own
    children.

    Args:
        pidfd: descriptor of the process, readable at its end (see pidfd_open(2)).
        status: pipe that first has `READY`, and at the end the exit code as `STATUS`.
    """

    returncode: int | None = None

    def __init__(self, pid: int, pidfd: int, status: int) -> None:
        self.pid, self.pidfd, self._status = pid, pidfd, status

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal number; None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the end of the process and return its exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self.pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("worker", timeout)
            data = self._read(4)  # empty if the server ended and took the process along
            self.returncode = struct.unpack(STATUS, data)[0] if data else -signal.SIGKILL
            self._close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def begin(self) -> None:
        """Wait until the process runs.

        `fork` calls it.

        Raises:
            Unforkable: the process hangs, because another thread held a lock at the fork.
        """
        if self._read(1) != READY:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self._close()
            raise Unforkable("a forked process did not begin")

    def _read(self, size: int) -> bytes:
        """Return up to `size` bytes from the status pipe.

        They are empty at the pipe's end, or after 15 s of silence.
        """
        if select.select([self._status], [], [], _FORK_SECONDS)[0]:
            return os.read(self._status, size)
        return b""

    def _close(self) -> None:
        os.close(self._status)
        os.close(self.pidfd)


class _Server:
    """A running fork server, and the socket for its requests.

    Its forks inherit the environment and the folder in which the server was started
    (`surroundings`).
    """

    def __init__(self) -> None:
        self.surroundings = _surroundings()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *python_command("perfexp.worker.server"),
                    f"--socket={theirs.fileno()}",
                    f"--parent={os.getpid()}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a request: modules to import, and for a fork also the module to run.

        `prepare` and `fork` call it.

        Args:
            descriptors: descriptors that the forked process inherits.

        Raises:
            OSError: the server has ended.
        """
        socket.send_fds(self.connection, [json.dumps(request).encode()], descriptors)

    def answer(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for the answer to a fork request; return it with the new process's descriptor.

        An answer has the process id, or the reason for a refusal.

        Raises:
            OSError: the server has ended or hangs, or too many files are open.
            KeyboardInterrupt: an interrupt came.
        """
        waited_for, ready = [self.connection.fileno(), *interrupts.descriptors()], list[int]()
        while self.connection.fileno() not in ready:
            ready = select.select(waited_for, [], [], _IMPORT_SECONDS)[0]
            interrupts.check()
            if not ready:
                raise TimeoutError("the fork server imports for too long")
        data, descriptors, _, _ = socket.recv_fds(self.connection, 1 << 16, 1)
        if not data:
            raise ConnectionResetError("the fork server has ended")
        answer = json.loads(data)
        if not ("refusal" in answer or descriptors):
            raise OSError("too many open files")
        return answer, descriptors


_server: _Server | None = None


def prepare(imports: Sequence[str] = ()) -> None:
    """Start the server unless it runs, and let it import modules in the background.

    The driver calls this while it composes the plan, so that the imports are done by the first
    fork. Without a server nothing happens.
    """
    with suppress(OSError, Unforkable):
        _running_server().ask({"imports": list(imports)})


def fork(
    module: str, arguments: Sequence[str], imports: Sequence[str], *, log: int, events: int
) -> ForkedProcess:
    """Fork a process that runs a module as `python -m` does, in its own session.

    It ends with this process. After its arguments it gets `--events-fd` (its event descriptor) and
    `--parent` (the process id of the server).

    Args:
        imports: modules that the server imports before forking.
        log: descriptor for output.
        events: descriptor for events.

    Raises:
        Unforkable: the process must be a new interpreter.
    """
    receive, status = os.pipe()
    request = {
        "imports": list(imports),
        "module": module,
        "arguments": list(arguments),
        "folder": str(Path.cwd()),
    }
    try:
        server = _running_server()
        server.ask(request, [log, events, status])
        answer, descriptors = server.answer()
    except BaseException as error:
        os.close(receive)
        _discard()  # a late answer must not be taken for the next
        if isinstance(error, OSError):
            raise Unforkable(str(error)) from error
        raise
    finally:
        os.close(status)
    if "refusal" in answer:
        os.close(receive)
        raise Unforkable(answer["refusal"])
    process = ForkedProcess(answer["process"], descriptors[0], receive)
    process.begin()
    return process


def _running_server() -> _Server:
    """Return the server; start it if it is missing, has ended, or has other surroundings than now.

    Raises:
        Unforkable: this operating system cannot fork a process with loaded frameworks.
    """
    global _server
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        raise Unforkable(f"{sys.platform} forks no process with loaded frameworks")
    if _server is not None and (
        _server.process.poll() is not None or _server.surroundings != _surroundings()
    ):
        _discard()
    _server = _server or _Server()
    return _server


@atexit.register
def _discard() -> None:
    """End the server and all processes forked from it."""
    global _server
    if _server is not None:
        _server.connection.close()
        _server.process.kill()
        _server.process.wait()
    _server = None


def _surroundings() -> tuple[Any, ...]:
    """Return what a forked process inherits, to find out whether the server must be started again.

    These are the environment, the module folder, the file mode, cores, priority and limits.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _IGNORED}
    status = Path("/proc/self/status").read_text().splitlines()
    inherited = [line for line in status if line.startswith(("Umask:", "Cpus_allowed:"))]
    folder = Path.cwd() if is_here_on_path() else None
    return environment, folder, inherited, os.nice(0), Path("/proc/self/limits").read_text()


def _forked() -> None:
    """Leave the server to the parent; called in each fork of this process."""
    global _server
    if _server is not None:
        _server.connection.close()
    _server = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
