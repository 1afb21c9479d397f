"""Runs commands of perfexp on hostile folders, each in a forked process that is watched and ended in time.

    python -P tests/adversarial/driver.py

A line of JSON on stdin for each case: `command` (arguments), `cwd`, `environment`, `out` (a folder for what it prints),
`watch` (see site/sitecustomize.py) and `seconds`. A line on stdout for each: `code`, None where it had to be killed.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "site"))

import mlflow.tracking  # noqa: F401 - imported once, for all cases

from perfexp.cli.composition import compose
from perfexp.report import run_files
from tests.support import composing

sys.modules.pop("sitecustomize", None)  # Debian's Python has one of its own
sitecustomize = importlib.import_module("sitecustomize")


def main():
    # drawing takes longer than everything else, and is the last step: what is drawn has been read by then
    run_files._png = lambda picture: picture and b"a picture"
    with composing.remembered():
        compose(
            ["model=fake", "gpu=fake", "tracking=none", "stopping=fixed"]
        )  # forked processes remember it
        tempfile.tempdir = None  # each case has its own
        for line in sys.stdin:
            case = json.loads(line)
            code = _wait(_forked(case), case["seconds"])
            print(json.dumps({"code": code}), flush=True)


def _forked(case):
    process = os.fork()
    if process == 0:
        code = 99
        try:
            os.setsid()
            code = _child(case)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 98
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
    return process


def _child(case):
    os.chdir(case["cwd"])
    os.environ.update(case["environment"])
    out = Path(case["out"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["perfexp", *case["command"]]
    sitecustomize.watch(case["watch"])
    from perfexp.__main__ import main as entry

    return entry()


def _wait(process, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


if __name__ == "__main__":
    main()
