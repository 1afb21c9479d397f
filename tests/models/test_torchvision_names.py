"""Models without a configuration file: each name of torchvision, and `timm:NAME`."""

import sys

import pytest

from perfexp.models import torchvision_names
from perfexp.models.torchvision_import import import_torchvision

FAKE = ("gpu=fake", "tracking=none")


def test_the_names_are_those_that_torchvision_lists():
    models = import_torchvision().models
    listed = {name: str(models.get_model_builder(name).__module__) for name in models.list_models()}
    packages = tuple(f"torchvision.models.{package}." for package in torchvision_names.REFUSED)
    assert set(torchvision_names.names()) == {
        n for n, module in listed.items() if not module.startswith(packages)
    }


def test_without_torchvision_there_are_no_names(monkeypatch):
    torchvision_names.names.cache_clear()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert torchvision_names.names() == ()
    torchvision_names.names.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("model=efficientnet_b0",), "efficientnet_b0 · inference"),
        (("model=timm:convnext_atto",), "timm:convnext_atto · inference"),
        (
            ("-m", "model=alexnet,swin_t,timm:vit_tiny_patch16_224"),
            "timm:vit_tiny_patch16_224-default-inference",
        ),
    ],
)
def test_a_name_needs_no_file(run, arguments, printed):
    code, text, _ = run(*arguments, *FAKE, "--dry-run")
    assert (code, printed in text) == (0, True), text


def test_an_experiment_of_the_users_may_choose_a_name(run, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    content = "# @package _global_\ndefaults:\n  - override /model: mnasnet0_5\n"
    (tmp_path / "own" / "experiment" / "small.yaml").write_text(content, encoding="utf-8")
    code, text, _ = run(f"--config-dir={tmp_path / 'own'}", "experiment=small", *FAKE, "--dry-run")
    assert (code, "mnasnet0_5 · inference" in text) == (0, True), text


@pytest.mark.parametrize(
    ("name", "hint"),
    [("efficientnet_bo", "Did you mean efficientnet_b"), ("xyzzy", "perfexp list model")],
)
def test_a_wrong_name_is_an_error_with_the_nearest_ones(run, name, hint):
    code, text, _ = run(f"model={name}", *FAKE)
    assert (code, hint in text) == (2, True), text


@pytest.mark.parametrize(
    ("name", "is_own"), [("timm:resnet18", True), ("timm:hf-hub:a/b", False), ("resnet51", False)]
)
def test_a_name_of_timm_is_one_word(name, is_own):
    assert torchvision_names.is_name(name) is is_own


def test_timm_model_has_as_many_classes_as_the_data():
    from perfexp.models.torchvision_import import import_torchvision

    import_torchvision()  # timm imports it, too
    pytest.importorskip("timm")
    from perfexp.devices.cpu import CpuDevice
    from perfexp.errors import UserError
    from perfexp.models import Execution, Precision
    from perfexp.models.timm_models import Timm

    settings = {
        "device": CpuDevice(),
        "precision": Precision(name="fp32"),
        "execution": Execution(),
        "seed": 0,
    }
    session = Timm(name="timm:test_resnet").open(num_classes=7, **settings)
    assert session.module(session.random_batch((64, 64), 2, 0).inputs).shape == (2, 7)
    with pytest.raises(UserError, match="Did you mean test_resnet"):
        Timm(name="test_resnett").open(num_classes=None, **settings)


@pytest.mark.parametrize(
    "key", ["checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay"]
)
def test_a_model_of_timm_loads_no_file(key):
    from perfexp.errors import UserError
    from perfexp.models.timm_models import Timm

    with pytest.raises(UserError, match=f"model.kwargs.{key}: .* leave it out"):
        Timm(name="resnet18", kwargs={key: "x.pth"})
