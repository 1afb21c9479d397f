"""A private SLURM for tests, and the site file of its two nodes."""

import tempfile

import pytest

from perfexp.run.cluster import slurm as commands
from tests.run.cluster import private_slurm

SITE = """\
defaults: [/schema/cluster@_here_, _self_]
name: test
partition: gpu
gpus:
  fake: {constraint: gpul40s, gres: "gpu:l40s"}
  cpu: {gres: ""}
  h100: {constraint: gpuh100}
"""


def write_site(folder):
    """Write the site file of the private cluster into a folder of the user's."""
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / "test.yaml").write_text(SITE)


def start(*, accounting=False, **options):
    if names := private_slurm.missing(accounting=accounting):
        pytest.skip(f"not installed: {', '.join(names)}")
    folder = tempfile.TemporaryDirectory(prefix="perfexp-slurm-", ignore_cleanup_errors=True)
    return folder, private_slurm.PrivateSlurm(folder.name, accounting=accounting, **options)


@pytest.fixture(scope="module")
def cluster():
    """A cluster without accounting."""
    folder, private = start()
    with folder, private:
        yield private


@pytest.fixture(scope="module", params=[False, True], ids=["without accounting", "with accounting"])
def each_cluster(request):
    """A cluster without accounting, then one with it."""
    folder, private = start(accounting=request.param)
    with folder, private:
        yield private


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """The queue of a private cluster may be listed at any time."""
    monkeypatch.setattr(commands, "QUEUE_SECONDS", 0.3)
