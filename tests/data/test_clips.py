"""Clips: videos as folders of frames, cut into clips, and given to a model of clips."""

import numpy as np
import pytest
import torch
from PIL import Image

from perfexp.data.clips import Clips
from perfexp.data.loading import MEAN, STD
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.models import Backbone, Execution, Precision
from perfexp.models.clip_gesture import ClipGesture
from perfexp.models.torchvision_import import import_torchvision


def write(folder, count, first=0):
    """Frames of one gray each, by their number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        Image.fromarray(np.full((20, 30, 3), number, np.uint8)).save(folder / f"{number:05}.png")


@pytest.fixture
def session(monkeypatch):
    models = import_torchvision().models
    vit = models.VisionTransformer
    monkeypatch.setattr(
        models, "vit_b_32", lambda num_classes: vit(224, 112, 1, 2, 8, 16, num_classes=num_classes)
    )
    model = ClipGesture(backbone=Backbone.image, frames=3)
    return model.open(
        device=CpuDevice(),
        precision=Precision(name="fp32"),
        execution=Execution(),
        num_classes=None,
        seed=0,
    )


def grays(data, session):
    """The gray values of each frame of each clip."""
    with data.open(
        session=session, input_size=(224, 224), batch_size=1, training=False, seed=0
    ) as batches:
        clips = torch.cat([batch.inputs for batch in batches.epoch()])
    pixels = clips[:, 0, :, 0, 0] * STD[0] + MEAN[0]
    assert clips.shape[1:] == (3, 3, 224, 224)
    return (pixels * 255).round().int().tolist()


def test_a_video_is_cut_into_clips_in_the_order_of_its_frames(tmp_path, session):
    write(tmp_path / "a", 7)
    write(tmp_path / "b", 2, first=100)
    data = Clips(root=str(tmp_path), frames=3, workers=0)
    assert data.num_samples == 3
    assert grays(data, session) == [[0, 1, 2], [3, 4, 5], [100, 101, 101]]


def test_frames_without_a_subfolder_are_one_video(tmp_path, session):
    write(tmp_path, 6)
    assert grays(Clips(root=str(tmp_path), frames=3, workers=0), session) == [[0, 1, 2], [3, 4, 5]]


def test_the_frames_of_a_video_are_classified(tmp_path, session):
    write(tmp_path, 6)
    data = Clips(root=str(tmp_path), frames=3, workers=0)
    with (
        data.open(
            session=session, input_size=(224, 224), batch_size=2, training=False, seed=0
        ) as batches,
        session.inferring(),
    ):
        assert session.first_forward(batches.next()).shape == (2, 9)


def test_what_can_not_be_used_is_explained(tmp_path, session):
    with pytest.raises(UserError, match="is not a folder"):
        Clips(root=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="There are no frames"):
        Clips(root=str(tmp_path))
    write(tmp_path, 6)
    with pytest.raises(UserError, match="set 1 or more"):
        Clips(root=str(tmp_path), frames=0)
    data = Clips(root=str(tmp_path), frames=3, workers=0)
    with pytest.raises(UserError, match="no classes to learn"):
        data.open(session=session, input_size=(224, 224), batch_size=1, training=True, seed=0)
    with (
        data.open(
            session=session, input_size=(224, 224), batch_size=9, training=False, seed=0
        ) as batches,
        pytest.raises(Unsupported),
    ):
        batches.next()
