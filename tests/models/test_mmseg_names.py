"""Names of mmsegmentation's configurations: a wrong one is told early, without torch and without mmsegmentation."""

import importlib.machinery
import subprocess
import sys

import pytest

from perfexp.errors import UserError
from perfexp.models import mmseg_names

TARGET = "perfexp.models.mmseg.Mmseg"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package mmseg with two configurations and a base, of which nothing can be imported."""
    folder = tmp_path / "site" / "mmseg"
    for name in (
        "unet/unet_fcn_4xb4.py",
        "pspnet/pspnet_r50-d8_0.5x.py",
        "_base_/models/fcn_unet.py",
    ):
        path = folder / ".mim" / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError")
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "mmseg", raising=False)
    return folder


def check(config):
    mmseg_names.check({"_target_": TARGET, "config": config})


@pytest.mark.parametrize(
    "config",
    [
        "unet_fcn_4xb4",
        "unet_fcn_4xb4.py",
        "unet/unet_fcn_4xb4",
        "unet/unet_fcn_4xb4.py",
        "pspnet_r50-d8_0.5x",
    ],
)
def test_what_there_is_passes(installed, config):
    check(config)


def test_a_file_of_ones_own_passes(installed, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("model = {}")
    check(str(tmp_path / "mine.py"))
    monkeypatch.chdir(tmp_path)
    check("mine.py")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("unet_fcn_4xb8", "one of mmsegmentation's 2 configurations. Did you mean unet_fcn_4xb4?"),
        ("pspnet/unet_fcn_4xb4.py", "With that in their names: unet_fcn_4xb4"),
        ("/nowhere/mine.py", "is neither a file nor"),
        ("fcn_unet", "is neither a file nor"),  # a base is a part of others
    ],
)
def test_what_there_is_not_is_refused_with_the_nearest_names(installed, config, told):
    with pytest.raises(UserError, match=r"model\.config=") as refused:
        check(config)
    assert told in str(refused.value)


def test_without_mmsegmentation_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"needs mmsegmentation, which is not installed\. pip install 'perfexp\[seg\]'",
    ):
        check("unet_fcn_4xb4")


def test_checkout_without_the_folder_passes_the_name_check(tmp_path, monkeypatch):
    spec = importlib.machinery.ModuleSpec(
        "mmseg", None, origin=str(tmp_path / "mmseg" / "__init__.py")
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    check("whatever")
    mmseg_names.check({"_target_": "perfexp.models.torchvision.Torchvision", "config": "whatever"})
    mmseg_names.check({"_target_": TARGET})


def test_it_takes_neither_torch_nor_mmsegmentation():
    script = (
        "import sys; from perfexp.models import mmseg_names\n"
        f"node = {{'_target_': '{TARGET}', 'config': 'no such thing'}}\n"
        "try: mmseg_names.check(node)\nexcept mmseg_names.UserError as error: print(error)\n"
        "assert not {'torch', 'mmseg', 'mmengine'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("model.config=no such thing ")
