"""Models of mmsegmentation: published sizes, their own training, both outputs, and what they refuse."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.models import Batch, Execution, Precision
from perfexp.models import mmseg_config as room
from perfexp.models.mmseg import Mmseg, MmsegSession, masked_losses
from perfexp.models.torchvision_import import import_torchvision
from tests.support.selection import first_always

import_torchvision()
pytest.importorskip("mmseg")
pytestmark = pytest.mark.filterwarnings("ignore")

OCRNET = "ocrnet_hr48_4xb2-160k_cityscapes-512x1024"
FASTSCNN = "fast_scnn_8xb4-160k_cityscapes-512x1024"
SEGFORMER = "segformer_mit-b0_8xb1-160k_cityscapes-1024x1024"
SIZE = (64, 128)


def opened(config: str, *, num_classes: int | None = None, **settings: Any) -> MmsegSession:
    model = Mmseg(name="model", config=config, **settings)
    precision, execution = Precision(name="fp32"), Execution()
    return model.open(
        device=CpuDevice(),
        precision=precision,
        execution=execution,
        num_classes=num_classes,
        seed=1,
    )


def step(session: MmsegSession, update: Any, batch: Batch) -> float:
    loss = session.loss(session.learn(batch), batch.targets)
    session.backward(loss)
    update()
    return session.number(loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "parameters", "gigaflops"),
    [(OCRNET, 70.371e6, 648.9), (FASTSCNN, 1.457e6, 3.62), (SEGFORMER, 3.720e6, 35.5)],
)
def test_parameters_and_flops_are_those_that_are_published(
    config: str, parameters: float, gigaflops: float
) -> None:
    """Forward at 512 × 1024; two FLOPs for each multiply-accumulate of convolutions and matrix products."""
    session = opened(config)
    assert session.facts()["parameters"] == pytest.approx(parameters, rel=0.01)
    work = session.work(torch.empty(1, 3, 512, 1024), training=False)
    assert 2e-9 * sum(row.macs for row in work.rows) == pytest.approx(gigaflops, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", first_always("README: mmsegmentation", [OCRNET, FASTSCNN, SEGFORMER])
)
def test_it_learns_by_its_own_loss_and_optimiser(config: str) -> None:
    session = opened(config)
    batch = session.random_batch(SIZE, 2, seed=3)
    with session.training():
        update = session.optimizer({"name": "adam", "lr": 1e9})  # the mode's, which is not taken
        losses = [step(session, update, batch) for _ in range(1 if config == OCRNET else 2)]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert session.facts()["optimizer"] == ("AdamW" if config == SEGFORMER else "SGD")
    assert session.facts()["sync_batch_norm"] == "as batch norm: it needs several CUDA devices"
    assert not any(
        isinstance(module, torch.nn.SyncBatchNorm) for module in session.module.modules()
    )


@pytest.mark.slow
def test_the_loss_is_the_sum_of_what_the_model_says() -> None:
    session = opened(FASTSCNN)
    batch = session.random_batch(SIZE, 2, seed=3)
    with session.training():
        losses = session.learn(batch)
    told = {name: value for name, value in losses.items() if "loss" in name}
    assert set(told) == {"decode.loss_ce", "aux_0.loss_ce", "aux_1.loss_ce"}
    assert float(session.loss(losses, batch.targets)) == pytest.approx(
        sum(float(each) for each in told.values())
    )
    right, counted = session.correct(losses, batch.targets)
    assert 0 <= right <= counted == batch.targets.numel()


def test_the_schedule_of_the_configuration_goes_on_step_by_step() -> None:
    """Its warm-up begins at a millionth of the learning rate: 6e-11 with 1,500 steps to go to 6e-5."""
    session = opened(SEGFORMER)
    batch = session.random_batch(SIZE, 2, seed=3)
    wrapper, schedules = session._own_training()
    session._own_training = lambda: (wrapper, schedules)  # type: ignore[method-assign]
    rates = [wrapper.optimizer.param_groups[0]["lr"]]
    with session.training():
        update = session.optimizer({})
        for _ in range(2):
            step(session, update, batch)
            rates.append(wrapper.optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(6e-5 * 1e-6)
    assert rates[1] - rates[0] == pytest.approx(6e-5 / 1499, rel=0.01)
    assert rates[2] - rates[1] == pytest.approx(6e-5 / 1499, rel=0.01)


def test_mmseg_gradients_are_clipped_epoch_schedules_left_out() -> None:
    session = opened(FASTSCNN)
    session.config.optim_wrapper.clip_grad = {"type": "value", "clip_value": 0.0}
    session.config.param_scheduler = [{"type": "PolyLR", "by_epoch": True, "power": 0.9}]
    assert session.facts()["schedule"] == []
    assert session.facts()["schedule_left_out"] == ["PolyLR by epochs"]
    session.config.optim_wrapper.optimizer.weight_decay = 0.0
    batch = session.random_batch(SIZE, 2, seed=3)
    before = [parameter.clone() for parameter in session.module.parameters()]
    with session.training():
        step(session, session.optimizer({}), batch)
    same = [
        torch.equal(old, new) for old, new in zip(before, session.module.parameters(), strict=True)
    ]
    assert all(same), "gradients that are clipped to nothing change nothing"


def test_the_mode_s_optimiser_is_taken_where_it_is_asked_for() -> None:
    session = opened(FASTSCNN, optimizer="mode")
    batch = session.random_batch(SIZE, 2, seed=3)
    before = [parameter.clone() for parameter in session.module.parameters()]
    with session.training():
        step(session, session.optimizer({"name": "sgd", "lr": 0.1}), batch)
    changed = [
        not torch.equal(old, new)
        for old, new in zip(before, session.module.parameters(), strict=True)
    ]
    assert all(changed)
    assert "optimizer" not in session.facts()


def test_an_inference_gives_scores_or_the_decision() -> None:
    raw, decided = opened(FASTSCNN), opened(FASTSCNN, output="predict")
    batch = raw.random_batch(SIZE, 2, seed=3)
    with raw.inferring(), decided.inferring():
        scores, samples = raw.forward(batch.inputs), decided.forward(batch.inputs)
    assert tuple(scores.shape) == (2, 19, SIZE[0] // 8, SIZE[1] // 8)
    assert [tuple(sample.pred_sem_seg.data.shape) for sample in samples] == [(1, *SIZE)] * 2
    resized = torch.nn.functional.interpolate(scores, SIZE, mode="bilinear")
    assert torch.equal(
        resized.argmax(1), torch.cat([sample.pred_sem_seg.data for sample in samples])
    )
    assert raw.correct(scores, batch.targets) == decided.correct(samples, batch.targets)
    assert (raw.facts()["output"], decided.facts()["output"]) == ("raw", "predict")


@pytest.mark.slow
def test_training_work_includes_all_heads_and_their_gradients() -> None:
    session = opened(FASTSCNN)
    inputs = torch.empty(2, 3, *SIZE)
    inferring, training = (session.work(inputs, training=trains) for trains in (False, True))
    convolutions = [row.path for row in training.rows if row.kind == "Conv2d"]
    assert {
        "auxiliary_head.0.conv_seg",
        "auxiliary_head.1.conv_seg",
        "decode_head.conv_seg",
    } <= set(convolutions)
    assert sum(row.macs for row in training.rows) > sum(row.macs for row in inferring.rows)
    assert sum(row.weight_gradient_flops for row in training.rows) > 0
    assert not [
        row for row in training.rows if row.operation is not None and not row.path
    ]  # what only losses compute
    with session.training():  # and afterwards it has its losses again
        assert float(session.loss(session.learn(session.random_batch(SIZE, 2, seed=3)), None)) > 0


@pytest.mark.parametrize(
    "config",
    [
        "pspnet_r18-d8_4xb2-80k_cityscapes-512x1024",
        "deeplabv3plus_r18-d8_4xb2-80k_cityscapes-512x1024",
        "bisenetv2_fcn_4xb4-160k_cityscapes-1024x1024.py",
        "unet/unet-s5-d16_fcn_4xb4-160k_cityscapes-512x1024.py",
    ],
)
def test_other_configurations_are_built_without_a_download(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    monkeypatch.setattr("mmengine.runner.checkpoint.load_from_http", refuse)
    session = opened(config)
    with session.inferring():
        scores = session.first_forward(session.random_batch((64, 64), 1, seed=3))
    assert scores.shape[:2] == (1, 19)


@pytest.mark.slow
def test_classes_are_those_of_the_data_or_as_asked_for() -> None:
    assert opened(OCRNET, num_classes=5).num_classes == 5
    session = opened(FASTSCNN, num_classes=5, options={"model.decode_head.channels": 64})
    assert {
        head.num_classes for head in [session.module.decode_head, *session.module.auxiliary_head]
    } == {5}
    model = Mmseg(name="model", config=FASTSCNN, num_classes=4)
    with pytest.raises(UserError, match=r"The data has 19 classes, model\.num_classes is 4"):
        model.open(
            device=CpuDevice(),
            precision=Precision(name="fp32"),
            execution=Execution(),
            num_classes=19,
            seed=1,
        )


def test_one_picture_is_too_few_for_a_batch_norm_over_one_pixel() -> None:
    session = opened("pspnet_r18-d8_4xb2-80k_cityscapes-512x1024")
    batch = session.random_batch((64, 64), 1, seed=3)
    with session.training(), pytest.raises(Unsupported, match="use batch_size=2 or more"):
        session.first_forward(batch)


def test_a_size_that_is_no_multiple_of_the_stride_is_told() -> None:
    session = opened("unet-s5-d16_fcn_4xb4-160k_cityscapes-512x1024")
    batch = session.random_batch((100, 64), 1, seed=3)
    with session.inferring(), pytest.raises(Unsupported, match=r"can't take 1 × 3 × 100 × 64"):
        session.first_forward(batch)


def test_weights_come_from_a_file_that_fits(tmp_path: Path) -> None:
    donor = opened(FASTSCNN)
    torch.save({"state_dict": donor.module.state_dict()}, tmp_path / "model-cityscapes.pth")
    session = opened(FASTSCNN, weights_dir=str(tmp_path), num_classes=19)
    assert session.facts()["weights"] == str(tmp_path / "model-cityscapes.pth")
    for one, other in zip(donor.module.parameters(), session.module.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match=r"model-cityscapes\.pth"):
        opened(SEGFORMER, weights_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"config": "fast_scnn_8xb4-160k_cityscape-512x1024"}, FASTSCNN),
        ({"config": "nowhere/fast_scnn.py"}, "is neither a file nor one of mmsegmentation's"),
        ({"config": FASTSCNN, "output": "labels"}, "model.output=labels: raw or predict"),
        ({"config": FASTSCNN, "optimizer": "sgd"}, "model.optimizer=sgd: own or mode"),
        (
            {"config": FASTSCNN, "options": {"model.backbone.type": "NoSuchNet"}},
            "can't be built: .*NoSuchNet",
        ),
    ],
)
def test_wrong_settings_are_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        opened(**settings)


@pytest.mark.parametrize(
    ("text", "told"), [("x = (", "can't be read"), ("x = 1", "describes no model")]
)
def test_a_file_that_is_no_configuration_is_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=told):
        opened(str(tmp_path / "mine.py"))


def test_without_the_package_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room.import_mmseg.cache_clear()
    monkeypatch.setitem(sys.modules, "mmseg", None)
    with pytest.raises(UserError, match=r"pip install 'perfexp\[seg\]'"):
        opened(FASTSCNN)
    room.import_mmseg.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("config", [FASTSCNN, SEGFORMER, OCRNET])
def test_training_without_waits_gives_the_same_losses(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(config)
    batch = session.random_batch((64, 64), 2, 0)
    batch.targets[:, :20] = 255  # void

    def told() -> dict[str, float]:
        session.reset()
        torch.manual_seed(0)
        return {name: float(value) for name, value in session.learn(batch).items()}

    selecting = torch.Tensor.__getitem__

    def selects(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts):
            selected.append(index)
        return selecting(tensor, index)

    selected: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "__getitem__", selects)
    with session.training():
        usual = told()
        assert selected, "this is where mmsegmentation waits for the device"
        selected.clear()
        with session.without_waits() as how:
            assert told() == pytest.approx(usual, rel=1e-5)
            assert not selected
        assert "by a mask" in how
        assert told() == pytest.approx(usual, rel=1e-5)
        assert selected
    shares = [value for name, value in usual.items() if name.endswith("acc_seg")]
    assert shares and all(0 <= share <= 100 for share in shares)


@pytest.mark.parametrize("ignored", [255, None])
def test_accuracy_without_labeled_pixels_equals_mmsegmentation(
    ignored: int | None,
) -> None:
    from mmseg.models import losses

    scores, void = torch.rand(1, 4, 3, 3), torch.full((1, 3, 3), 255)
    usual = losses.accuracy(scores, void, ignore_index=ignored)
    with masked_losses():
        torch.testing.assert_close(losses.accuracy(scores, void, ignore_index=ignored), usual)


@pytest.mark.parametrize("weighted", [False, True])
def test_one_hot_labels_are_mmsegmentations(weighted: bool) -> None:
    from mmseg.models.losses import cross_entropy_loss as room_of_losses

    torch.manual_seed(0)
    labels = torch.randint(-1, 6, (2, 5, 7))
    labels[labels == 5] = 255
    weights = torch.rand(2, 5, 7) if weighted else None
    usual = room_of_losses._expand_onehot_labels(labels, weights, (2, 5, 5, 7), 255)
    with masked_losses():
        found = room_of_losses._expand_onehot_labels(labels, weights, (2, 5, 5, 7), 255)
    for one, other in zip(found, usual, strict=True):
        torch.testing.assert_close(one, other)
    assert found[0].sum() == ((labels >= 0) & (labels < 255)).sum()
