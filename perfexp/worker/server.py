"""Fork server: imports workers' modules once, then forks each worker in place of a new interpreter.

It never initializes a device and starts no threads, since neither survives a fork.
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
_MOST_BYTES = 1 << 20


class Server:
    """Server for a single client, until the client has ended.

    Args:
        connection: socket to the client. Requests and answers are JSON, with file descriptors
            alongside.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # this starts OpenBLAS threads, like numpy does; a forked process starts its own
        distributions.preload()
        with suppress(
            AttributeError, OSError
        ):  # a Python built for an old glibc, too many open files
            fork_server.weights_file = os.memfd_create("random weights")
        self._children: dict[
            int, tuple[int, int]
        ] = {}  # process and pipe for its status, by its pidfd
        # sitecustomize may have started a debugger or a tracer
        self._spoilt = (
            "this process has further threads" if threading.active_count() > 1 else self._opened()
        )

    def serve(self) -> None:
        """Answer requests until the client has ended."""
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
        """Import modules; return the reason if an import fails.

        A module that starts threads or opens a device makes this process unusable for forks.
        """
        for name in names:
            if name in sys.modules:
                continue
            before = _threads()
            try:
                importlib.import_module(name)
            except BaseException as error:  # SystemExit, too
                return f"{name} cannot be imported: {error}"
            if self._spoilt is None:
                started = _threads() - before
                self._spoilt = (
                    f"{name} starts threads ({started})" if started > 0 else self._opened()
                )
        return None

    @staticmethod
    def _opened() -> str | None:
        """Return a text that names a device opened by an imported module; None without one."""
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the listing's own descriptor is closed by now
                if (target := str(link.readlink())).startswith(_DEVICES):
                    return f"an imported module has opened {target}"
        return None

    def _answer(self, request: dict[str, Any], descriptors: list[int], refusal: str | None) -> None:
        """Fork a process and send its process id and pidfd, or the reason for a failure."""
        answer: dict[str, Any] = {"refusal": refusal or "too many open files"}
        opened: list[int] = []
        if refusal is None and len(descriptors) == 3:
            gc.collect()
            gc.freeze()  # otherwise a collection in the new process would copy every page
            resident, parent = _resident_bytes(), os.getpid()
            log, events, status = descriptors
            with warnings.catch_warnings(
                action="ignore", category=DeprecationWarning
            ):  # the warning is about OpenBLAS threads
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
        _send(self._connection, answer, opened)
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
        """Run a module in this process as `python -m` does, then exit."""
        code = 1
        try:
            os.setsid()
            lifeline.die_with(parent)
            for stream in (1, 2):
                os.dup2(log, stream)
            others = (
                descriptor
                for child, (_, end) in self._children.items()
                for descriptor in (child, end)
            )
            for descriptor in (self._connection.detach(), log, *others):
                os.close(descriptor)
            os.chdir(request["folder"])
            np.random.seed()  # forked processes would share the random numbers of their server
            if (torch := sys.modules.get("torch")) is not None:
                torch.default_generator.seed()
            fork_server.process_start, fork_server.uncounted_bytes = (
                "forked",
                resident - _resident_bytes(),
            )
            os.write(status, READY)
            os.close(status)
            module = request["module"]
            arguments = [*request["arguments"], f"--events-fd={events}", f"--parent={parent}"]
            sys.argv, sys.orig_argv = (
                [module, *arguments],
                [sys.executable, "-m", module, *arguments],
            )
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

    def _reap(self, child: int) -> None:
        process, status = self._children.pop(child)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(BrokenPipeError):  # the client does not wait for it any more
            os.write(status, struct.pack(STATUS, code))
        os.close(status)
        os.close(child)


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _send(connection: socket.socket, answer: dict[str, Any], descriptors: Sequence[int]) -> None:
    socket.send_fds(connection, [json.dumps(answer).encode()], descriptors)


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
