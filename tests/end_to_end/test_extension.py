"""A user's own model, data, probe and metric, from outside the package: a class and a file each, nothing else."""

import subprocess
import sys
import textwrap

import pytest

from perfexp.errors import UserError
from perfexp.plan import config
from perfexp.records.record import Record, Status
from tests.support.selection import first_always

CODE = '''
"""What a user writes."""

from contextlib import contextmanager

import torch

import perfexp
from perfexp.models import Batch


class TinyNet(torch.nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, width, 3)
        self.head = torch.nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.conv(x).mean(dim=(2, 3)))


class Stripes:
    """Data of one's own: a batch of stripes."""

    labelled = False
    num_classes = None
    num_samples = 64
    held_out = False
    workers = 0

    @contextmanager
    def open(self, *, session, input_size, batch_size, training, seed):
        yield StripeBatches(session, input_size, batch_size)


class StripeBatches:
    constant = False

    def __init__(self, session, input_size, batch_size):
        self.session, self.size, self.batch_size = session, input_size, batch_size
        self.per_epoch = 64 // batch_size

    def next(self):
        height, width = self.size
        stripes = (torch.arange(width) % 2).float().expand(self.batch_size, 3, height, width)
        return self.session.place(Batch(inputs=stripes.clone(), targets=torch.zeros(self.batch_size, dtype=torch.long)))

    def epoch(self):
        for _ in range(self.per_epoch):
            yield self.next()


class OutputNorm:
    """A probe of one's own."""

    def __init__(self, order: float = 2.0):
        self.order = order

    @contextmanager
    def around(self, context):
        yield
        perfexp.metric("output_norm", context.step.state.outputs.norm(self.order), "1")
'''

FILES = {
    "model/tiny.yaml": "_target_: mine.TinyNet\nwidth: 8\n",
    "data/stripes.yaml": "_target_: mine.Stripes\n",
    "probe/output_norm.yaml": "output_norm:\n  _target_: mine.OutputNorm\n  order: 2.0\n",
}


@pytest.fixture
def home(tmp_path):
    """A folder as a user has it: a module and some configuration."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(CODE))
    for name, text in FILES.items():
        file = tmp_path / "myconf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def perfexp(folder, *arguments):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "perfexp",
            "--config-dir",
            "myconf",
            "tracking=none",
            "output_dir=x",
            *arguments,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", first_always("README: add a model", ["inference", "train"]))
def test_own_model_data_and_probe(home, mode):
    done = perfexp(
        home,
        "model=tiny",
        "data=stripes",
        "probe=output_norm",
        f"mode={mode}",
        "input_size=16",
        "stopping=fixed",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = Record.load(home / "x")
    point = record.points[0]
    assert point.status is Status.OK
    assert record.name.startswith("tiny-default")
    assert point.metric("custom/output_norm").value > 0
    assert point.find_series("phase/data") is not None


@pytest.mark.slow
def test_a_key_that_an_own_file_does_not_have_is_an_error(home):
    done = perfexp(home, "model=tiny", "model.widht=16")
    assert done.returncode == 2
    assert "width" in done.stderr


@pytest.mark.slow
def test_a_class_that_can_not_be_imported_is_told(home):
    (home / "myconf" / "model" / "lost.yaml").write_text("_target_: mine.LostNet\n")
    done = perfexp(home, "model=lost", "input_size=16")
    assert done.returncode == 2
    assert "mine.LostNet" in done.stderr
    assert "Traceback" not in done.stderr


def test_module_off_the_path_is_reported_with_the_fix(home, monkeypatch):
    (home / "nearby.py").write_text("class Net:\n    pass\n")
    monkeypatch.chdir(home)
    remedy = r"^nearby.Net can't be {}: nearby.py is in this folder, .*: run python -m perfexp, or set PYTHONPATH=\.$"
    for use, done in ((config.build, "built"), (config.locate, "imported")):
        with pytest.raises(UserError, match=remedy.format(done)):
            use({"_target_": "nearby.Net"})
        with pytest.raises(UserError, match=r"Are you sure that module .faraway. is installed"):
            use({"_target_": "faraway.Net"})
    monkeypatch.syspath_prepend(home)
    assert type(config.build({"_target_": "nearby.Net"})).__name__ == "Net"
