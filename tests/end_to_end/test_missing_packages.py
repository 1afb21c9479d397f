"""Without a package that perfexp needs, each command ends with one line that says how to install it."""

import subprocess
import sys

import pytest

from tests.support.faults import ROOT

_START = "import sys; sys.modules[sys.argv.pop(1)] = None; from perfexp.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("package", "install", "command"),
    [
        ("msgspec", "msgspec", "--help"),
        ("msgspec", "msgspec", "help busy_host"),
        ("yaml", "pyyaml", "help busy_host"),
        ("hydra", "hydra-core", "model=fake"),
        ("omegaconf", "omegaconf", "model=fake"),
        ("rich", "rich", "model=fake"),
        ("typer", "typer", "list models"),
        ("hydra", "hydra-core", "list models"),
        ("rich", "rich", "show x"),
    ],
)
def test_a_missing_package_is_named_with_its_installation(package, install, command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _START, package, *command.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == f"error: the package {package} is not installed: pip install {install}\n"
    assert done.returncode == 2
