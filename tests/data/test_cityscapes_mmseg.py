"""Cityscapes for models of mmsegmentation: the configuration's own pipelines and data_preprocessor, bit by bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from perfexp.data.cityscapes import Cityscapes, SamplePipeline
from perfexp.data.cityscapes_folder import CLASSES, VOID, find_pairs, image_of, mask_of
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import UserError
from perfexp.main import main
from perfexp.models import Batch, Execution, Precision
from perfexp.models.mmseg import Mmseg, MmsegSession
from perfexp.models.mmseg_config import HostImages
from perfexp.models.torchvision_import import import_torchvision
from perfexp.records.record import Record, Status
from tests.data.streets import change_mask, cut_off, stem, write_pair, write_streets

import_torchvision()
pytest.importorskip("mmseg")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick_commands")]

FASTSCNN = "fast_scnn_8xb4-160k_cityscapes-512x1024"
SIZE = (64, 128)


def opened(precision: str = "fp32", **options: Any) -> MmsegSession:
    model = Mmseg(name="fastscnn", config=FASTSCNN, options=options)
    storage = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    return model.open(
        device=CpuDevice(),
        precision=Precision(name=precision, storage=storage),
        execution=Execution(),
        num_classes=len(CLASSES),
        seed=0,
    )


@pytest.fixture(scope="module")
def session() -> MmsegSession:
    return opened()


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_streets(tmp_path_factory.mktemp("streets"), size=SIZE)


def seeded() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def by_mmengine(
    session: MmsegSession, root: Path, size: tuple[int, int], *, training: bool
) -> tuple[Any, Any]:
    """The first two samples as mmengine's own data set, collation and data_preprocessor give them."""
    import mmseg.datasets  # noqa: F401 - registers them
    from mmengine.dataset.utils import pseudo_collate
    from mmengine.registry import DefaultScope
    from mmseg.registry import DATASETS

    config = copy.deepcopy(session.config)
    described = (config.train_dataloader if training else config.test_dataloader).dataset
    described.data_root = str(root)
    for step in described.pipeline:
        if step.type == "RandomCrop":
            step.crop_size = size
        if step.type == "Resize":
            step.scale = (size[1], size[0])
    with DefaultScope.overwrite_default_scope("mmseg"):
        data = DATASETS.build(described)
        seeded()
        samples = pseudo_collate([data[0], data[1]])
    preprocessor = copy.deepcopy(session.module.data_preprocessor)
    preprocessor.size = size
    done = preprocessor(samples, training=training)
    return done["inputs"], torch.cat([each.gt_sem_seg.data for each in done["data_samples"]])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [SIZE, (1200, 160)], ids=["crop", "padded"])
def test_batches_are_those_of_mmengine_bit_by_bit(
    session: MmsegSession, streets: Path, size: tuple[int, int], training: bool
) -> None:
    """At 1200 pixels of height most crops are larger than their picture, which is 512 to 2048 high, and are padded."""
    if not training:
        size = SIZE
    pipeline = SamplePipeline(session.config, size, training=training, classes=19, seed=0)
    pairs = find_pairs(streets, "train" if training else "val")
    seeded()
    pictures, masks = pipeline.join([pipeline.prepare(pair) for pair in pairs[:2]])
    batch = session.place(Batch(inputs=pictures, targets=masks))
    inputs, targets = by_mmengine(session, streets, size, training=training)
    assert batch.inputs.shape == (2, 3, *size)
    assert torch.equal(batch.inputs, inputs)
    assert torch.equal(batch.targets, targets)


def test_evaluation_image_is_resized_whole_to_the_point_size(
    session: MmsegSession, streets: Path
) -> None:
    pipeline = SamplePipeline(session.config, (96, 96), training=False, classes=19, seed=0)
    picture, mask = pipeline.prepare(find_pairs(streets, "val")[0])
    assert (picture.shape, picture.dtype, mask.shape) == ((3, 96, 96), torch.uint8, SIZE)


def test_masks_with_label_ids_become_train_ids(session: MmsegSession, tmp_path: Path) -> None:
    root = write_streets(tmp_path, size=SIZE, label_ids=True)
    pipeline = SamplePipeline(session.config, SIZE, training=False, classes=19, seed=0)
    _, mask = pipeline.prepare(find_pairs(root, "val")[0])
    assert [int(mask[0, number]) for number in (0, 7, 8, 9, 11, 19, 29, 31, 33)] == [
        VOID,
        0,
        1,
        VOID,
        2,
        6,
        VOID,
        16,
        18,
    ]


def test_mean_is_subtracted_exactly_with_bf16_weights(streets: Path) -> None:
    low = opened("bf16")
    picture = torch.full((3, *SIZE), 124, dtype=torch.uint8)
    placed = low.place(
        Batch(
            inputs=HostImages([picture], SIZE, True),
            targets=torch.zeros(1, *SIZE, dtype=torch.long),
        )
    )
    expected = (124 - torch.tensor([123.675, 116.28, 103.53])) / torch.tensor(
        [58.395, 57.12, 57.375]
    )
    assert placed.inputs.dtype is torch.bfloat16
    assert placed.inputs[0, :, 0, 0].tolist() == expected.to(torch.bfloat16).tolist()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_seed_makes_batches_reproducible(
    session: MmsegSession, streets: Path, workers: int
) -> None:
    def drawn(seed: int) -> torch.Tensor:
        data = Cityscapes(root=str(streets), workers=workers)
        with data.open(
            session=session, input_size=SIZE, batch_size=2, training=True, seed=seed
        ) as batches:
            return torch.stack([batches.next().inputs for _ in range(2)])

    first = drawn(1)
    torch.testing.assert_close(first, drawn(1))
    assert not torch.equal(first, drawn(2))
    assert not torch.equal(first[0], first[1])


def test_files_that_can_not_be_used_are_named(session: MmsegSession, tmp_path: Path) -> None:
    root = write_streets(tmp_path, size=SIZE)
    pair = find_pairs(root, "val")[0]
    pipeline = SamplePipeline(session.config, SIZE, training=False, classes=19, seed=0)
    change_mask(pair.mask, 20)
    with pytest.raises(UserError, match=rf"{pair.mask} has labels that are not train ids: 20"):
        pipeline.prepare(pair)
    Image.new("L", (10, 20)).save(pair.mask)
    with pytest.raises(UserError, match=rf"{pair.mask} is 20 × 10, its image 64 × 128"):
        pipeline.prepare(pair)
    cut_off(pair.mask)
    with pytest.raises(UserError, match=rf"{pair.mask} can't be read as a mask"):
        pipeline.prepare(pair)
    cut_off(pair.image)
    with pytest.raises(UserError, match=rf"{pair.image} can't be read as an image"):
        pipeline.prepare(pair)


def test_images_of_several_sizes_in_a_batch_are_reported(
    session: MmsegSession, tmp_path: Path
) -> None:
    root = write_streets(tmp_path, size=SIZE)
    write_pair(root, "val", 1, size=(32, 64))
    data = Cityscapes(root=str(root), workers=0)
    with (
        pytest.raises(UserError, match=r"different sizes.*batch_size=1"),
        data.open(
            session=session, input_size=SIZE, batch_size=2, training=False, seed=0
        ) as batches,
    ):
        batches.next()


def test_other_mmseg_pipeline_is_supported_or_refused(session: MmsegSession, streets: Path) -> None:
    config = copy.deepcopy(session.config)
    described = config.train_dataloader.dataset
    config.train_dataloader.dataset = {"type": "RepeatDataset", "times": 2, "dataset": described}
    described.pipeline[1].reduce_zero_label = True  # of other data
    pair = find_pairs(streets, "train")[0]
    assert SamplePipeline(config, SIZE, training=True, classes=19, seed=0).prepare(pair)[
        0
    ].shape == (
        3,
        *SIZE,
    )
    described.pipeline = [
        step for step in described.pipeline if step.type not in ("RandomCrop", "RandomResize")
    ]
    with pytest.raises(
        UserError, match=r"makes 64 × 128 pixels of .*the point is 32 × 64: it needs a RandomCrop"
    ):
        SamplePipeline(config, (32, 64), training=True, classes=19, seed=0).prepare(pair)
    described.pipeline[-2].type = "NoSuchTransform"
    with pytest.raises(UserError, match=r"can't be built: .*NoSuchTransform"):
        SamplePipeline(config, SIZE, training=True, classes=19, seed=0)
    described.pipeline = described.pipeline[:1]
    with pytest.raises(UserError, match="loads no masks"):
        SamplePipeline(config, SIZE, training=True, classes=19, seed=0)
    for key in ("train_dataloader", "train_pipeline"):
        config.pop(key)
    with pytest.raises(UserError, match="no train_pipeline"):
        SamplePipeline(config, SIZE, training=True, classes=19, seed=0)


def test_an_option_changes_a_transform(streets: Path) -> None:
    smaller = opened(**{"train_dataloader.dataset.pipeline.2.scale": [64, 32]})
    pipeline = SamplePipeline(smaller.config, (64, 128), training=True, classes=19, seed=0)
    pictures = [pipeline.prepare(pair)[0] for pair in find_pairs(streets, "train")]
    assert all(picture.shape[1] * 2 == picture.shape[2] for picture in pictures)
    assert all(16 <= picture.shape[1] <= 64 for picture in pictures)  # of scales from a half to two
    assert len({picture.shape for picture in pictures}) > 1


def test_pinning_keeps_the_pictures_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor + 1)
    pinned, masks = pin_memory((HostImages([torch.zeros(3, 2, 2)], (2, 2), True), torch.zeros(1)))
    assert (type(pinned), len(pinned), pinned.size) == (HostImages, 1, (2, 2))
    assert float(pinned.tensors[0].sum() + masks.sum()) == 13


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)

    def go(*arguments: str) -> tuple[int, str, Record | None]:
        settings = (
            "gpu=cpu",
            "data=cityscapes",
            "input_size=64x128",
            "batch_size=2",
            "tracking=none",
        )
        fixed = ("stopping=fixed", "stopping.warmup=1", "stopping.measure=3", "output_dir=x")
        code = main([*settings, *fixed, *arguments])
        printed = capsys.readouterr()
        record = Record.load(tmp_path / "x") if (tmp_path / "x" / "record.json").exists() else None
        return code, printed.out + printed.err, record

    return go


@pytest.mark.slow
def test_a_model_trains_and_infers_on_it(run: Any, streets: Path) -> None:
    code, printed, record = run(
        "model=fastscnn", f"data.root={streets}", "data.workers=1", "mode=train_inference"
    )
    assert code == 0, printed
    train, inference = record.points
    assert [point.status for point in record.points] == [Status.OK, Status.OK]
    for point in (train, inference):
        assert all(seconds > 0 for seconds in point.find_series("phase/data").samples)
        assert 0 < point.metric("data_share").value < 1
    assert 0 <= inference.metric("accuracy").value <= 1
    assert train.metric("train/loss_last").value > 0


@pytest.mark.slow
def test_what_is_wrong_with_a_mask_ends_the_run_before_the_loss(run: Any, tmp_path: Path) -> None:
    root = write_streets(tmp_path / "wrong", size=SIZE)
    for index in range(6):
        change_mask(mask_of(root, "train", stem(index)), 255 - 1 - index)
    code, printed, _ = run("model=fastscnn", f"data.root={root}", "data.workers=1", "mode=train")
    assert code == 2
    assert "has labels that are not train ids: 2" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_truncated_picture_is_named_by_the_run(run: Any, tmp_path: Path) -> None:
    root = write_streets(tmp_path / "wrong", size=SIZE)
    cut_off(image_of(root, "val", stem(0)))
    code, printed, _ = run(
        "model=fastscnn", f"data.root={root}", "data.workers=0", "mode=inference"
    )
    assert code == 2
    assert "ulm_000000_000019_leftImg8bit.png can't be read as an image" in printed
