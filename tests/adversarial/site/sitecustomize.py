"""Watches the processes of the tests on hostile folders: what they touch outside of allowed folders is written down.

Python imports this module at its start where this folder is on PYTHONPATH. `HOSTILE_WATCH` names a JSON file with
`log` (where violations go) and `allowed` (folders that may be written to).
"""

import json
import os
import sys

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Events whose first arguments are paths that are changed.
_CHANGES = {
    **dict.fromkeys(
        ("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), 1
    ),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), 2),
}
#: Where `perfexp ui` listens: whether it runs decides if its pages are linked.
_UI = ("127.0.0.1", 5000)
_PROGRAMS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}


def watch(settings):
    """Write down each violation, a line each; returns the descriptor of the log.

    Args:
        settings: `log` and `allowed`.
    """
    log = os.open(settings["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    allowed = [os.path.realpath(folder) for folder in settings["allowed"]]
    busy = False

    def is_allowed(path):
        real = os.path.realpath(os.fsdecode(path))
        return any(real == folder or real.startswith(f"{folder}/") for folder in allowed)

    def seen(event, arguments):
        nonlocal busy
        if busy:
            return
        busy = True
        try:
            if found := _violation(event, arguments, is_allowed):
                os.write(log, f"{found}\n".encode(errors="replace"))
        finally:
            busy = False

    sys.addaudithook(seen)
    return log


def _violation(event, arguments, is_allowed):
    if event == "open":
        path, mode, flags = arguments
        writes = (flags or 0) & _WRITES or any(letter in (mode or "") for letter in "wax+")
        if writes and isinstance(path, str | bytes) and not is_allowed(path):
            return f"open {path!r} {mode} {flags}"
    elif event in _CHANGES:
        paths = [path for path in arguments[: _CHANGES[event]] if isinstance(path, str | bytes)]
        to_open_folder = any(
            isinstance(part, int) and part >= 0 for part in arguments[_CHANGES[event] :]
        )
        if not to_open_folder and not all(
            is_allowed(os.path.dirname(os.path.abspath(path)) or ".") for path in paths
        ):
            return f"{event} {paths!r}"
    elif event == "subprocess.Popen":
        program, command = arguments[0], [os.fsdecode(part) for part in arguments[1]]
        ours = program == sys.executable and any(part.startswith("perfexp.") for part in command)
        if not ours and os.path.basename(os.fsdecode(program)) not in ("git", "uname", "ldconfig"):
            return f"subprocess {command!r}"
    elif event in _PROGRAMS or (
        event == "socket.connect" and isinstance(arguments[1], tuple) and arguments[1] != _UI
    ):
        return f"{event} {arguments!r}"
    return None


if (_file := os.environ.get("HOSTILE_WATCH")) is not None:
    with open(_file, encoding="utf-8") as _settings:
        watch(json.load(_settings))
