from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from perfexp.devices.cpu import CpuDevice
from perfexp.errors import UserError
from perfexp.models import Execution, Precision
from perfexp.models.session import TorchSession
from perfexp.models.torchvision import Torchvision
from perfexp.models.torchvision_import import import_torchvision
from tests.support.selection import first_always

#: One builder of each family, with a size that is small for it, some of them: all builders are in
#: tools/torchvision_models.py.
FAMILIES = {
    "alexnet": 64,
    "convnext_tiny": 32,
    "deeplabv3_mobilenet_v3_large": 32,
    "deeplabv3_resnet50": 32,
    "densenet121": 32,
    "efficientnet_b0": 32,
    "efficientnet_v2_s": 32,
    "fcn_resnet50": 32,
    "googlenet": 32,
    "inception_v3": 299,
    "lraspp_mobilenet_v3_large": 32,
    "maxvit_t": 224,
    "mc3_18": 32,
    "mnasnet0_5": 32,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "quantized_googlenet": 32,
    "quantized_inception_v3": 75,
    "quantized_mobilenet_v2": 32,
    "quantized_mobilenet_v3_large": 32,
    "quantized_resnet18": 32,
    "quantized_shufflenet_v2_x0_5": 32,
    "r2plus1d_18": 32,
    "r3d_18": 32,
    "regnet_y_400mf": 32,
    "resnet18": 32,
    "resnext50_32x4d": 32,
    "s3d": 224,
    "shufflenet_v2_x0_5": 32,
    "squeezenet1_1": 32,
    "swin3d_t": 32,
    "swin_t": 32,
    "swin_v2_t": 32,
    "vgg11_bn": 32,
    "vit_b_32": 64,
    "wide_resnet50_2": 32,
}

#: Settings with which builders take such sizes; inception_v3 keeps its second classifier, which needs 299.
SMALLER: dict[str, dict[str, Any]] = {
    "quantized_inception_v3": {"kwargs": {"aux_logits": False}},
    "vit_b_32": {"kwargs": {"image_size": 64}},
}


def open_model(
    name: str = "resnet18", *, classes: int | None = None, seed: int = 0, **settings: Any
) -> TorchSession:
    return Torchvision(name=name, **settings).open(
        device=CpuDevice(),
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=classes,
        seed=seed,
    )


def scores(session: TorchSession) -> torch.Tensor:
    with session.inferring():
        outputs = session.forward(session.random_batch((32, 32), 1, 0).inputs)
    assert isinstance(outputs, torch.Tensor)
    return outputs


def weights_of(name: str, **settings: Any) -> dict[str, torch.Tensor]:

    torch.manual_seed(7)
    state = import_torchvision().models.get_model(name, weights=None, **settings).state_dict()
    assert isinstance(state, dict)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("name", first_always("README: torchvision", FAMILIES))
def test_a_builder_of_each_family_infers_and_trains(name: str) -> None:
    session = open_model(name, **SMALLER.get(name, {}))
    size = (FAMILIES[name], FAMILIES[name])
    single = session.random_batch(size, 1, 0)
    with session.inferring():
        outputs = session.first_forward(single)
        assert session.correct(outputs, single.targets)[1] == single.targets.numel()
    batch = session.random_batch(size, 2, 0)
    update = session.optimizer({"name": "sgd", "lr": 1e-3})
    with session.training():
        loss = session.loss(session.first_forward(batch), batch.targets)
        session.backward(loss)
        update()
    assert torch.isfinite(loss)


def test_random_weights_follow_the_seed() -> None:
    first, again, other = (scores(open_model(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("settings", "classes", "expected"),
    [({}, None, 1000), ({}, 2, 2), ({"num_classes": 10}, None, 10), ({"num_classes": 10}, 2, 10)],
)
def test_the_classes_are_the_settings_the_datas_or_the_builders(
    settings: dict[str, int], classes: int | None, expected: int
) -> None:
    session = open_model(classes=classes, **settings)
    assert session.num_classes == expected
    assert scores(session).shape == (1, expected)


def test_more_classes_in_the_data_than_in_the_model_are_refused() -> None:
    with pytest.raises(UserError, match="data has 12 classes, resnet18 with these settings has 10"):
        open_model(num_classes=10, classes=12)


def test_video_model_takes_clips_with_the_requested_frame_count() -> None:
    batch = open_model("r3d_18", frames=4).random_batch((32, 48), 2, 0)
    assert batch.inputs.shape == (2, 3, 4, 32, 48)


def test_segmentation_builds_offline_with_targets_per_pixel() -> None:
    session = open_model("lraspp_mobilenet_v3_large")
    assert session.num_classes == 21
    assert session.random_batch((32, 48), 2, 0).targets.shape == (2, 32, 48)


def test_builder_settings_are_passed_on() -> None:
    with_aux = open_model("deeplabv3_mobilenet_v3_large", kwargs={"aux_loss": True})
    with with_aux.inferring():
        assert set(with_aux.forward(with_aux.random_batch((32, 32), 1, 0).inputs)) == {"out", "aux"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet81"}, "no model 'resnet81'. Did you mean resnet18"),
        ({"name": "fasterrcnn_resnet50_fpn"}, "learns from boxes"),
        ({"name": "raft_small"}, "pairs of images"),
        ({"name": "quantized_resnet18", "kwargs": {"quantize": True}}, "int8 is not a precision"),
        (
            {"name": "resnet18", "kwargs": {"depth": 3}},
            "resnet18 does not take these settings: .*depth",
        ),
    ],
)
def test_what_cannot_be_built_is_explained(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_model(**settings)


def test_quantized_builder_is_flagged_as_not_quantized() -> None:
    (doubt,) = open_model("quantized_shufflenet_v2_x0_5").doubts()
    assert (doubt.code, doubt.help) == (
        "not_quantized",
        "read it as shufflenet_v2_x0_5; int8 is not measured",
    )


@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v3_small"])
def test_facts_name_the_model_and_where_its_weights_come_from(name: str) -> None:
    facts = open_model(name, seed=3).facts()
    assert facts["weights"] == "random, seed 3"
    assert facts["kind"] == "classification"
    assert isinstance(facts["torchvision_compiled_operators"], bool)
    assert facts["torchvision"]


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("resnet18.pth", {}),
        ("resnet18-f37072fd.pth", {}),
        ("best.pt", {"weights": "best.pt"}),
    ],
)
def test_weights_come_from_a_folder(tmp_path: Path, file: str, settings: dict[str, str]) -> None:
    state = weights_of("resnet18")
    torch.save(state, tmp_path / file)
    torch.save({}, tmp_path / "resnet182.pth")
    session = open_model(weights_dir=str(tmp_path), **settings)
    assert session.facts()["weights"] == str(tmp_path / file)
    assert not torch.equal(scores(session), scores(open_model()))


def test_weights_come_from_a_path(tmp_path: Path) -> None:
    torch.save(weights_of("resnet18", num_classes=3), tmp_path / "mine.pth")
    assert scores(open_model(weights=str(tmp_path / "mine.pth"), num_classes=3)).shape == (1, 3)


@pytest.mark.parametrize("nested", ["state_dict", "model_state_dict", "model"])
def test_checkpoints_of_training_scripts_are_unwrapped(tmp_path: Path, nested: str) -> None:
    state = weights_of("resnet18")
    torch.save(state, tmp_path / "plain.pth")
    torch.save(
        {nested: {f"module.{name}": value for name, value in state.items()}, "epoch": 3},
        tmp_path / "rich.pth",
    )
    plain, rich = (
        scores(open_model(weights=name, weights_dir=str(tmp_path)))
        for name in ("plain.pth", "rich.pth")
    )
    assert torch.equal(plain, rich)


def test_files_from_before_batch_norm_counted_its_calls_are_read(tmp_path: Path) -> None:
    state = {
        name: value
        for name, value in weights_of("resnet18").items()
        if not name.endswith("num_batches_tracked")
    }
    torch.save(state, tmp_path / "resnet18.pth")
    open_model(weights_dir=str(tmp_path))


def test_torchvisions_published_densenet_names_are_understood(tmp_path: Path) -> None:
    old = {
        name.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): value
        for name, value in weights_of("densenet121").items()
    }
    assert any(".norm.1." in name for name in old)
    torch.save(old, tmp_path / "densenet121.pth")
    open_model("densenet121", weights_dir=str(tmp_path))


def test_weights_that_do_not_fit_are_listed_before_loading(tmp_path: Path) -> None:
    state = weights_of("resnet18", num_classes=3)
    state["head.weight"] = state.pop("conv1.weight")
    torch.save(state, tmp_path / "resnet18.pth")
    with pytest.raises(UserError) as caught:
        open_model(weights_dir=str(tmp_path))
    message = str(caught.value)
    assert "1 missing: conv1.weight;" in message
    assert "1 unexpected: head.weight;" in message
    assert "2 of another shape: fc.weight (file (3, 512), model (1000, 512)), fc.bias" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "resnet19.pth"}, r"no weights resnet19\.pth in .* Did you mean resnet18\.pth"),
        ({"weights": "IMAGENET1K_V9"}, "no weights IMAGENET1K_V9"),
        ({"name": "vgg16"}, r"holds no vgg16\.pth.*model\.weights=FILE"),
        ({"name": "resnet50"}, r"2 files for resnet50: resnet50-1\.pth, resnet50-2\.pth"),
    ],
)
def test_missing_weights_name_what_the_folder_holds(
    tmp_path: Path, settings: dict[str, str], message: str
) -> None:
    for file in ("resnet18.pth", "resnet50-1.pth", "resnet50-2.pth", "notes.txt"):
        (tmp_path / file).touch()
    with pytest.raises(UserError, match=message):
        open_model(**{"name": "resnet18", **settings}, weights_dir=str(tmp_path))


def test_a_missing_folder_of_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"weights_dir is not a folder: .*nowhere"):
        open_model(weights_dir=str(tmp_path / "nowhere"))


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


@pytest.mark.parametrize("content", ["text", "code", "list"])
def test_a_file_that_is_no_weights_is_refused_and_runs_nothing(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "resnet18.pth"
    if content == "text":
        file.write_text("no weights")
    else:
        torch.save(Evil() if content == "code" else [1, 2], file)
    with pytest.raises(UserError, match=r"resnet18\.pth .*Save a state dict"):
        open_model(weights_dir=str(tmp_path))
    assert "this must not run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "weights", ["DEFAULT", "torchvision", "IMAGENET1K_V1", "ResNet18_Weights.IMAGENET1K_V1"]
)
def test_failed_download_of_published_weights_is_explained(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", offline)
    monkeypatch.setattr("torch.hub.urlopen", offline)
    with pytest.raises(
        UserError, match=r"ResNet18_Weights\.IMAGENET1K_V1 could not be downloaded.*weights_dir"
    ):
        open_model(weights=weights)


def test_published_weights_keep_their_classes() -> None:
    with pytest.raises(UserError, match="'num_classes' expected value 1000 but got 10"):
        open_model(weights="DEFAULT", num_classes=10)
    with pytest.raises(
        UserError, match="data has 1001 classes, resnet18 with these settings has 1000"
    ):
        open_model(weights="DEFAULT", classes=1001)


IMPORT = """
import builtins, importlib, sys
import torch
from perfexp.models import torchvision_import
{preparation}
try:
    print(torchvision_import.import_torchvision().__name__, torchvision_import.import_torchvision().models.resnet18)
except RuntimeError as error:
    print("refused:", error)
"""

WITHOUT_OPERATORS = """
torch.ops.load_library = lambda path: (_ for _ in ()).throw(OSError("libcudart.so.13: cannot open shared object file"))
"""

OTHER_ERROR = """
def fail(name):
    raise RuntimeError("something else")
importlib.import_module = fail
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preparation", "output"),
    [(WITHOUT_OPERATORS, "torchvision <function resnet18"), (OTHER_ERROR, "refused: something")],
)
def test_only_missing_compiled_operators_are_worked_around(preparation: str, output: str) -> None:
    script = IMPORT.format(preparation=preparation)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(output), done.stderr


def test_the_stem_for_small_images_neither_strides_nor_pools(tmp_path: Path) -> None:
    usual, small = (open_model("resnet18", classes=10, stem=stem) for stem in ("imagenet", "cifar"))
    sizes: dict[str, torch.Size] = {}
    for name, session in (("usual", usual), ("small", small)):
        module: Any = session.module
        module.layer1.register_forward_pre_hook(
            lambda _, inputs, name=name: sizes.update({name: inputs[0].shape})
        )
        with session.inferring():
            session.forward(torch.zeros(1, 3, 32, 32))
    assert sizes == {"usual": (1, 64, 8, 8), "small": (1, 64, 32, 32)}
    parameters = [
        sum(weight.numel() for weight in session.module.parameters()) for session in (usual, small)
    ]
    assert parameters == [
        11_181_642,
        11_173_962,
    ]  # He et al.'s stem has 3 × 64 × (7² - 3²) weights fewer
    torch.save(small.module.state_dict(), tmp_path / "small.pt")
    again = open_model(
        "resnet18", classes=10, stem="cifar", seed=1, weights=str(tmp_path / "small.pt")
    )
    assert again.module.state_dict()["conv1.weight"].equal(
        small.module.state_dict()["conv1.weight"]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "vgg11"}, "for ResNets"),
        ({"name": "resnet18", "weights": "DEFAULT"}, "leave one of the two out"),
    ],
)
def test_a_stem_that_does_not_fit_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_model(**settings, stem="cifar")
