"""Sources: changed code of a user's own is another plan, and comparisons name its files."""

import sys

import pytest

from perfexp import commands
from perfexp.main import main
from perfexp.plan import sources

pytestmark = pytest.mark.usefixtures("quick_commands")

NET = """
import torch
from pieces.heads import Head

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = Head()

    def forward(self, x):
        return self.head(x)
"""
HEAD = """
import torch

class Head(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, {outputs})
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "netfile.py").write_text(NET)
    (tmp_path / "pieces").mkdir()
    (tmp_path / "pieces" / "__init__.py").write_text("")
    (tmp_path / "pieces" / "heads.py").write_text(HEAD.format(outputs=3))
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "net.yaml").write_text("_target_: netfile.Net\n")
    return tmp_path


def test_imports_of_user_files_are_followed_without_running(here):
    found = sources.hashes(
        ["netfile.Net", "perfexp.models.fake.FakeModel", "torch.nn.Linear", "nothing.there"]
    )
    assert list(found) == ["netfile.py", "pieces/__init__.py", "pieces/heads.py"]
    assert not {"netfile", "pieces"} & sys.modules.keys()


def test_packages_without_an_init_file_are_searched(here):
    (here / "space" / "inner").mkdir(parents=True)
    (here / "space" / "inner" / "net.py").write_text("import torch\n")
    assert list(sources.hashes(["space.inner.net.Net"])) == ["space/inner/net.py"]


def test_relative_imports_loops_and_broken_files_are_read(here):
    (here / "pieces" / "heads.py").write_text(
        "from . import tails\nfrom .tails import x\nimport netfile\n"
    )
    (here / "pieces" / "tails.py").write_text("def broken(:\n")
    assert list(sources.hashes(["netfile.Net"])) == [
        "netfile.py", "pieces/__init__.py", "pieces/heads.py", "pieces/tails.py",
    ]  # fmt: skip


@pytest.mark.slow
def test_results_of_changed_code_are_not_reused_file_is_named(here, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(here))
    command = [
        "--config-dir=conf",
        "model=net",
        "input_size=8",
        "gpu=cpu",
        "stopping=fixed",
        "stopping.measure=3",
    ]
    command += ["tracking=none"]
    assert main([*command, "output_dir=a"]) == 0
    (here / "pieces" / "heads.py").write_text(HEAD.format(outputs=4))
    for again in ([*command, "output_dir=a"], ["resume=a", "--config-dir=conf"]):
        capsys.readouterr()
        assert main(again) == 2
        assert "has results of other code: pieces/heads.py changed" in capsys.readouterr().err
    assert main([*command, "output_dir=b"]) == 0
    capsys.readouterr()
    commands.run(["compare", "a", "b"])
    assert "B against A: pieces/heads.py differs" in capsys.readouterr().out


@pytest.mark.slow
def test_sweep_of_changed_code_has_no_table_and_names_the_file(here, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(here))
    command = [
        "--config-dir=conf",
        "model=net",
        "input_size=8",
        "gpu=cpu",
        "stopping=fixed",
        "stopping.measure=3",
    ]
    command += ["tracking=none", "-m", "batch_size=1,2", "output_dir=s"]
    assert main(command) == 0
    (here / "pieces" / "heads.py").write_text(HEAD.format(outputs=4))
    capsys.readouterr()
    assert main(command) == 2
    told = capsys.readouterr()
    assert told.err.count("has results of other code: pieces/heads.py changed") == 1
    assert "samples/s" not in told.out
    [run] = (path.parent for path in here.glob("s/0*/record.json"))
    assert commands.run(["reproduce", str(run), "--config-dir", "conf"]) == 2
    assert "was measured with other code: pieces/heads.py changed" in capsys.readouterr().err
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(here))])
    assert main(command) == 2
    assert "pieces/heads.py can't be found here" in capsys.readouterr().err


@pytest.mark.parametrize("further", [[], ["resume=a"]])
def test_a_run_that_failed_continues_with_fixed_code(here, monkeypatch, capsys, further):
    monkeypatch.setenv("PYTHONPATH", str(here))
    command = ["--config-dir=conf", "model=net", "input_size=8", "gpu=cpu", "stopping=fixed"]
    command += ["stopping.measure=3", "tracking=none", "output_dir=a", "probes.layers=true"]
    heads = here / "pieces" / "heads.py"
    heads.write_text(
        f"{HEAD.format(outputs=3)}\n    def forward(self, x):\n        return unknown\n"
    )
    assert main(command) == 1
    heads.write_text(HEAD.format(outputs=3))
    assert main([*further, "--config-dir=conf"] if further else command) == 0
    record = (here / "a" / "record.json").read_bytes()
    assert b'"failed"' not in record
    heads.write_text(HEAD.format(outputs=4))
    (here / "a" / "details" / "points.jsonl").unlink()  # the record has the results
    assert main(command) == 2
    assert "has results of other code: pieces/heads.py changed" in capsys.readouterr().err
    assert (here / "a" / "record.json").read_bytes() == record
