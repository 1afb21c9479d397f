"""Processes that perfexp starts, forked from one that has imported everything: most of a short run is its imports.

What runs is the same module with the same arguments, streams, descriptors and session, in a process of its own. What
a new interpreter would find differently is not tested in this way: its path, its environment, and which modules it
imports by itself.
"""

import atexit
import gc
import importlib.util
import io
import os
import signal
import subprocess
import sys
import traceback
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

from perfexp.host import credentials

#: Descriptors that forked processes keep beside those that they are given.
KEPT = set()
#: Whether processes are forked at all.
enabled = True
#: Modules that are run in a forked process. One that has opened a database of SQLite's may not fork the sender: see
#: sqlite.org/howtocorrupt.html.
modules = {"perfexp.worker.entry", "perfexp"}


def module_of(command):
    """The module and its arguments of `python [-P] -m MODULE …`; None for anything that is not to be forked.

    A worker with torch is not: its threads do not survive a fork.
    """
    words = [os.fsdecode(word) for word in command]
    rest = words[1:]
    if rest[:1] == ["-P"]:
        rest = rest[1:]
    if words[0] != sys.executable or rest[:1] != ["-m"] or rest[1] not in modules:
        return None
    if rest[1] == "perfexp.worker.entry":
        plan = Path(rest[2]) / "plan.yaml"
        if not plan.is_file() or b"perfexp.models.fake." not in plan.read_bytes():
            return None
    return rest[1], rest[2:]


class Forked(subprocess.Popen):
    """A process that is forked where its command is a module of perfexp's, and started as ever otherwise."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        found = module_of(args) if enabled and isinstance(args, list) else None
        if found is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            return
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[3:9]
        new_session = rest[-2]
        sys.audit("subprocess.Popen", args[0], args, cwd, env)
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # a collection in the new process would copy everything
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads, which do not matter
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                if new_session:
                    os.setsid()
                _take_over((p2cread, c2pwrite, errwrite), pass_fds, cwd, env)
                code = _run(*found)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def start(*arguments, **options):
    """Start perfexp with a new process's streams and session: for tests that signal it, or look at what it leaves.

    Args:
        arguments: of the command.
        options: of `subprocess.Popen`.
    """
    return Forked([sys.executable, "-m", "perfexp", *arguments], **options)


def run(*arguments, seconds=120, **options):
    """Run perfexp to its end: a `subprocess.CompletedProcess` with what it printed, as text."""
    with start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


#: In place of the module `subprocess`, where processes are to be forked.
forking = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})


def _take_over(streams, pass_fds, cwd, env):
    """What `exec` does: streams, descriptors, signals, folder and environment."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    for number, stream in enumerate(streams):
        if stream != -1:
            os.dup2(stream, number)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - it lists its own descriptor as well
        if int(name) > 2 and int(name) not in {*pass_fds, *KEPT}:
            try:
                os.close(int(name))
            except OSError:  # the one of this list
                continue
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115 - a descriptor
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
        for number in (1, 2)
    )
    atexit._clear()
    if cwd is not None:
        os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)


def _run(module, arguments):
    """Run a module as `-m` does, and return its exit code."""
    if module == "perfexp":
        module = "perfexp.__main__"
        credentials._hidden.clear()  # as in another process
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `-m` does
    spec = importlib.util.find_spec(module)
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = spec.origin, spec
    sys.modules["__main__"], sys.argv = main, [spec.origin, *arguments]
    sys.orig_argv = [sys.executable, "-m", module, *arguments]
    try:
        exec(spec.loader.get_code(module), main.__dict__)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            return 1
        return code or 0
    finally:
        atexit._run_exitfuncs()
    return 0
