"""Loading: the processes that load pictures end with the one that started them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

#: A loader's process that comes to its first line after its parent was killed: torch's own look takes whoever is its
#: parent by then for the one to watch.
ORPHAN = """
import os, signal, time
from perfexp.data.loading import Loading
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))
loading = Loading(workers=1, pin_memory=False, prefetch_factor=1)
iterator = iter(loading.loader([1, 2], 1, list, training=False, seed=0))
print("begun", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's own look is all there is")
def test_a_process_that_loads_ends_though_its_parent_was_killed_before_it_could_look():
    root = Path(__file__).parent.parent.parent
    command, pipe = [sys.executable, "-c", ORPHAN], subprocess.PIPE
    parent = subprocess.Popen(command, stdout=pipe, cwd=root, text=True, start_new_session=True)
    try:
        printed, _ = parent.communicate(timeout=60)  # until no process holds the pipe any more
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    assert (parent.returncode, printed) == (-signal.SIGKILL, "begun\n")
