"""Fork server: imports workers' modules once, then forks each worker in place of a new interpreter.

A forked worker starts in about a second, because torch is imported already. The client is the
parent process of a run (`host/fork_server`), which starts this program and sends requests through a
socket. The server never initializes a device and starts no threads, since neither survives a fork.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from perfexp.host import fork_server, lifeline
from perfexp.host.fork_server import READY, STATUS
from perfexp.statistics import distributions

#: Device files that drivers open on initialization.
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
#: Limit on a request.
_MOST_BYTES = 1 << 20


class Server:
    """Server for a single client, until the client has ended.

    A request names modules to import and, for a worker, the module to run with its arguments and
    folder. It brings three file descriptors: log, events and exit status. The answer is a process
    id with a pidfd, or a refusal with its reason; the client then starts a new interpreter instead.

    Args:
        connection: socket to the client. Requests and answers are JSON, with file descriptors
            alongside.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # OpenBLAS threads start here, as with numpy; they are no obstacle, since a forked process
        # starts its own
        distributions.preload()
        # file in which a worker saves random weights for later workers; creating it fails with a
        # Python built for an old glibc, and with too many open files
        with suppress(AttributeError, OSError):
            fork_server.weights_file = os.memfd_create("random weights")
        #: For each forked worker, by its pidfd: process id, and the pipe for its exit status.
        self._children: dict[int, tuple[int, int]] = {}
        #: Why this process can no longer fork workers; None while it can.
        self._spoilt = self._opened_device()
        if threading.active_count() > 1:  # sitecustomize may have started a debugger or a tracer
            self._spoilt = "this process has further threads"

    def serve(self) -> None:
        """Answer requests and report the exit of workers, until the client has ended."""
        while True:
            ready = select.select([self._connection.fileno(), *self._children], [], [])[0]
            for ended in self._children.keys() & set(ready):
                self._reap(ended)
            if self._connection.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(self._connection, _MOST_BYTES, 3)
                if not data:
                    return
                request = json.loads(data)
                failure = self._import(request["imports"])
                if "module" in request:
                    self._answer(request, descriptors, self._spoilt or failure)

    def _import(self, names: Sequence[str]) -> str | None:
        """Import modules; return the reason if an import fails, otherwise None.

        A module that starts threads or opens a device makes this process unusable for forks.
        """
        for name in names:
            if name in sys.modules:
                continue
            before = _num_threads()
            try:
                importlib.import_module(name)
            except BaseException as error:  # SystemExit, too
                return f"{name} cannot be imported: {error}"
            if self._spoilt is None:
                started = _num_threads() - before
                self._spoilt = self._opened_device()
                if started > 0:
                    self._spoilt = f"{name} starts threads ({started})"
        return None

    @staticmethod
    def _opened_device() -> str | None:
        """Return a text that names a device opened by an imported module; None without one."""
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the listing's own descriptor is closed by now
                if (target := str(link.readlink())).startswith(_DEVICES):
                    return f"an imported module has opened {target}"
        return None

    def _answer(self, request: dict[str, Any], descriptors: list[int], refusal: str | None) -> None:
        """Fork a worker and send its process id and pidfd, or the reason for a failure.

        Args:
            request: module to run, its arguments and folder.
            descriptors: log, events and exit status of the worker; fewer if this process has too
                many open files.
            refusal: why this process cannot fork; None if it can.
        """
        answer: dict[str, Any] = {"refusal": refusal or "too many open files"}
        opened: list[int] = []
        if refusal is None and len(descriptors) == 3:
            gc.collect()
            gc.freeze()  # otherwise a collection in the new process would copy every page
            resident, parent = _resident_bytes(), os.getpid()
            log, events, status = descriptors
            # the warning is about OpenBLAS threads
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                process = os.fork()
            if process == 0:
                self._become(request, log, events, status, resident, parent)
            try:
                opened.append(os.pidfd_open(process))
                self._children[opened[0]] = process, os.dup(status)
                answer = {"process": process}
            except OSError as error:  # too many files are open
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                answer = {"refusal": str(error)}
                while opened:
                    os.close(opened.pop())
        socket.send_fds(self._connection, [json.dumps(answer).encode()], opened)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become(
        self,
        request: dict[str, Any],
        log: int,
        events: int,
        status: int,
        resident: int,
        parent: int,
    ) -> None:
        """Turn this forked copy into a worker: run the module as `python -m` does, then exit.

        Args:
            request: module to run, its arguments and folder.
            log: descriptor for standard output and error.
            events: descriptor for messages to the client.
            status: pipe on which the worker reports that it runs; the server writes its exit code.
            resident: resident bytes of the server before the fork.
            parent: process id of the server.
        """
        code = 1
        try:
            os.setsid()
            lifeline.die_with(parent)
            for stream in (1, 2):
                os.dup2(log, stream)
            of_others = (
                descriptor
                for pidfd, (_, pipe) in self._children.items()
                for descriptor in (pidfd, pipe)
            )
            for descriptor in (self._connection.detach(), log, *of_others):
                os.close(descriptor)
            os.chdir(request["folder"])
            np.random.seed()  # forked processes would share the random numbers of their server
            if (torch := sys.modules.get("torch")) is not None:
                torch.default_generator.seed()
            fork_server.process_start = "forked"
            fork_server.uncounted_bytes = resident - _resident_bytes()
            os.write(status, READY)
            os.close(status)
            module = request["module"]
            arguments = [*request["arguments"], f"--events-fd={events}", f"--parent={parent}"]
            sys.argv = [module, *arguments]
            sys.orig_argv = [sys.executable, "-m", module, *arguments]
            sys.modules.pop(module, None)  # it is run as __main__, as in a new interpreter
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if not isinstance(end.code, int | None):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            try:
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    def _reap(self, pidfd: int) -> None:
        """Send the exit code of an ended worker through its status pipe and forget the worker."""
        process, status = self._children.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(BrokenPipeError):  # the client does not wait for it any more
            os.write(status, struct.pack(STATUS, code))
        os.close(status)
        os.close(pidfd)


def _num_threads() -> int:
    """Return this process's number of threads, including threads of libraries."""
    return len(list(Path("/proc/self/task").iterdir()))


def _resident_bytes() -> int:
    """Return the memory of this process in bytes, to tell a worker's own from its server's."""
    return int(psutil.Process().memory_info().rss)


def main() -> None:
    """Serve the client at the other end of the socket given on the command line."""
    parser = argparse.ArgumentParser(prog="perfexp.worker.server", description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument(
        "--parent", type=int, required=True, help="process that this one must not outlive"
    )
    arguments = parser.parse_args()
    lifeline.die_with(arguments.parent)
    with socket.socket(fileno=arguments.socket) as connection:
        Server(connection).serve()


if __name__ == "__main__":
    main()
