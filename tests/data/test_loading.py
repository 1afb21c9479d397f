"""Loading: how long a batch stays on the host; the processes that load pictures end with the one that started them."""

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfexp.data.loading import LoadedBatches, Order
from perfexp.models import Batch

#: A loader's process that comes to its first line after its parent was killed: torch's own look takes whoever is its
#: parent by then for the one to watch.
ORPHAN = """
import os, signal, time, torch
from perfexp.data.loading import Loading, Samples
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))
class Data(Loading):
    def samples(self, *_, **__):
        return Samples([(torch.ones(1), None)] * 2)
data = Data(workers=1, pin_memory=False, prefetch_factor=1)
batches = data.open(session=None, input_size=(1, 1), batch_size=1, training=False, seed=0).__enter__()
iterator = iter(batches._loader)
print("begun", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's own look is all there is")
def test_loader_ends_if_its_parent_died_before_it_looked():
    root = Path(__file__).parent.parent.parent
    command, pipe = [sys.executable, "-c", ORPHAN], subprocess.PIPE
    parent = subprocess.Popen(command, stdout=pipe, cwd=root, text=True, start_new_session=True)
    try:
        printed, _ = parent.communicate(timeout=60)  # until no process holds the pipe any more
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    assert (parent.returncode, printed) == (-signal.SIGKILL, "begun\n")


#: A loader whose process hands over one batch.
BATCH = """
import torch
from types import SimpleNamespace
from perfexp.data.loading import Loading, Samples
class Data(Loading):
    def samples(self, *_, **__):
        return Samples([(torch.ones(2), None)])
session = SimpleNamespace(place=lambda batch: batch)
data = Data(workers=1, pin_memory=False, prefetch_factor=1)
with data.open(session=session, input_size=(1, 1), batch_size=1, training=False, seed=0) as batches:
    print(batches.next().inputs.tolist())
"""


@pytest.mark.slow
def test_batches_arrive_with_a_temp_path_too_long_for_sockets(tmp_path):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    command = [sys.executable, "-c", BATCH]
    root = Path(__file__).parent.parent.parent
    ended = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "[[1.0, 1.0]]\n"), ended.stderr


class Loader:
    """Gives three batches, and notes which of those before are still there."""

    def __init__(self) -> None:
        self._given: list[weakref.ref[Any]] = []
        self.loading: list[list[bool]] = []
        self.placing: list[list[bool]] = []

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[tuple[torch.Tensor, None]]:
        for _ in range(len(self)):
            self.loading.append(self._alive())
            yield self._batch(), None

    def place(self, batch: Batch) -> Batch:
        self.placing.append(self._alive())
        return Batch(inputs=batch.inputs.clone(), targets=None)

    def _batch(self) -> torch.Tensor:
        inputs = torch.zeros(2, 3)
        self._given.append(weakref.ref(inputs))
        return inputs

    def _alive(self) -> list[bool]:
        return [given() is not None for given in self._given]


def test_host_batch_lives_until_the_next_is_loaded() -> None:
    loader = Loader()
    batches = LoadedBatches(loader, Order(6, None), 2, SimpleNamespace(place=loader.place))  # type: ignore[arg-type]
    for _ in range(3):
        batches.next()
    assert loader.loading == [[], [True], [False, True]]
    assert loader.placing == [[True], [False, True], [False, False, True]]
