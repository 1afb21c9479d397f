"""Skeletons: files in the layout of IntelliRehabDS, what is left out, the split by subject, standard columns."""

import numpy as np
import pytest
import torch

from perfexp import commands
from perfexp.data import skeletons
from perfexp.data.skeletons import Skeletons
from perfexp.devices.cpu import CpuDevice
from perfexp.errors import Unsupported, UserError
from perfexp.models import Execution, Precision
from perfexp.models.clip_gesture import ClipGesture

FRAMES = np.arange(12, dtype=np.float64).reshape(4, 3)


def write(root, name, frames=FRAMES):
    root.mkdir(parents=True, exist_ok=True)
    text = (
        "\n".join(",".join(map(str, frame)) for frame in frames)
        if isinstance(frames, np.ndarray)
        else frames
    )
    (root / name).write_text(text)


@pytest.fixture
def folder(tmp_path):
    """One joint, two gestures, six subjects."""
    random = np.random.default_rng(0)
    for subject in range(101, 107):
        for gesture in (0, 1):
            for repetition in (1, 2):
                frames = random.normal(5 + gesture, 2, (int(random.integers(3, 9)), 3))
                write(tmp_path / "made", f"{subject}_18_{gesture}_{repetition}_1_stand.txt", frames)
    return tmp_path / "made"


def read(root):
    return skeletons.read(root, gestures=2, columns=3)


def small(root, **settings):
    return Skeletons(root=str(root), gestures=2, joints=1, **settings)


@pytest.fixture(scope="module")
def session():
    precision, execution = Precision(name="fp32"), Execution()
    return ClipGesture(joints=1).open(
        device=CpuDevice(), precision=precision, execution=execution, num_classes=2, seed=0
    )


@pytest.mark.parametrize(
    ("name", "frames", "reason"),
    [
        (
            "hello.txt",
            FRAMES,
            "its name is not SUBJECT_DATE_GESTURE_REPETITION_CORRECT_POSITION.txt",
        ),
        ("101_18_0_1_4_stand.txt", FRAMES, "its name is not SUBJECT_DATE"),
        ("101_18_7_1_1_stand.txt", FRAMES, "gesture 7 is not one from 0 to 1"),
        ("101_18_0_1_1_x.txt", "", "number of frames: 0, 2 or more are needed"),
        ("101_18_0_1_1_x.txt", "1,2,3\n", "number of frames: 1, 2 or more are needed"),
        ("101_18_0_1_1_x.txt", "1,2,3\n1,2\n", "frame 2 has 2 columns instead of 3"),
        ("101_18_0_1_1_x.txt", "1,2,3,4\n1,2,3,4\n", "frame 1 has 4 columns instead of 3"),
        (
            "101_18_0_1_1_x.txt",
            "1,2,3\n1,nan,3\n",
            "frame 2, column 2 is not finite, the first of 1",
        ),
        (
            "101_18_0_1_1_x.txt",
            "1,2,3\n1,2,1e99\n",
            "frame 2, column 3 is not finite, the first of 1",
        ),
        ("101_18_0_1_1_x.txt", "1,2,3\n1,x,3\n", "could not convert string 'x'"),
        ("101_18_0_1_1_x.txt", "\0\N{ZERO WIDTH SPACE}", "number of frames: 1"),
    ],
)
def test_unusable_file_is_one_line_and_stops_no_other_file(folder, name, frames, reason):
    whole = len(read(folder)[0])
    write(folder / "more", name, frames)
    repetitions, [problem] = read(folder)
    assert problem.startswith(f"more/{name}: {reason}")
    assert "\n" not in problem
    assert len(repetitions) == whole


def test_non_text_files_and_duplicate_names_are_left_out(folder):
    (folder / "101_18_0_9_1_stand.txt").write_bytes(b"\xff\xfe")
    write(folder / "more", "101_18_0_1_1_stand.txt", FRAMES)
    assert sorted(read(folder)[1]) == [
        "101_18_0_9_1_stand.txt: it can't be read: it is not text",
        "more/101_18_0_1_1_stand.txt: another file has the name 101_18_0_1_1_stand.txt",
    ]


def test_skeleton_archive_coordinates_are_found_raw_not_read(tmp_path):
    write(tmp_path / "SkeletonData" / "Simplified", "101_18_0_1_1_stand.txt")
    write(tmp_path / "SkeletonData" / "Raw", "101_18_0_1_1_stand.txt", "Version0.1")
    [repetition], problems = read(tmp_path)
    assert problems == []
    assert repetition.frames.tolist() == FRAMES.tolist()


def test_a_link_that_leads_out_of_the_folder_is_not_read(folder, tmp_path):
    write(tmp_path / "elsewhere", "200_18_0_1_1_stand.txt")
    (folder / "200_18_0_1_1_stand.txt").symlink_to(
        tmp_path / "elsewhere" / "200_18_0_1_1_stand.txt"
    )
    assert "200" not in {repetition.subject for repetition in read(folder)[0]}


@pytest.mark.parametrize("held_out", [None, ["103", "106"]])
def test_no_subject_is_on_both_sides_of_the_split(folder, held_out):
    repetitions, _ = read(folder)
    sides = skeletons.split(repetitions, held_out)
    assert sorted(map(id, [*sides[0], *sides[1]])) == sorted(map(id, repetitions))
    subjects = [{repetition.subject for repetition in side} for side in sides]
    assert not subjects[0] & subjects[1]
    assert subjects[1] == set(held_out or ["105"])  # every fifth


def test_of_a_few_subjects_the_last_one_is_held_out(tmp_path):
    for subject in ("9", "10"):
        write(tmp_path, f"{subject}_18_0_1_1_stand.txt")
    [[trained], [held_out]] = skeletons.split(read(tmp_path)[0], None)
    assert (trained.subject, held_out.subject) == ("9", "10")


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (["7"], "there is no 7; the subjects are 101, 102"),
        ([], "two or more"),
        ([str(n) for n in range(101, 107)], "two or more"),
    ],
)
def test_an_impossible_split_is_refused(folder, held_out, message):
    with pytest.raises(UserError, match=message):
        small(folder, val_subjects=held_out)


@pytest.mark.parametrize("count", [2, 5, 7, 20])
def test_resampling_is_linear_and_keeps_both_ends(count):
    line = torch.from_numpy(np.outer(np.linspace(3.0, 9.0, 5), [1.0, -2.0]).astype(np.float32))
    expected = np.outer(np.linspace(3.0, 9.0, count), [1.0, -2.0])
    assert np.allclose(skeletons.resampled(line, count), expected, atol=1e-5)


def test_columns_are_standardized_by_the_training_subjects_alone(folder, session):
    data = small(folder)
    train, val = (data._standardized(4, training)[0] for training in (True, False))
    assert torch.allclose(train.mean(dim=(0, 1)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(train.std(dim=(0, 1), correction=0), torch.ones(3), atol=1e-4)
    assert not torch.allclose(val.mean(dim=(0, 1)), torch.zeros(3), atol=1e-3)
    for file in folder.glob("105_*"):  # who is held out does not change what training sees
        file.write_text(file.read_text().replace("5.", "9."))
    assert torch.equal(small(folder)._standardized(4, True)[0], train)


def test_a_constant_column_stays_finite(tmp_path):
    for subject in ("1", "2"):
        write(tmp_path, f"{subject}_18_0_1_1_stand.txt", np.ones((3, 3)))
    assert small(tmp_path)._standardized(3, True)[0].isfinite().all()


def test_an_epoch_has_every_held_out_movement_once(folder, session):
    data = small(folder)
    with data.open(
        session=session, input_size=(4, 3), batch_size=3, training=False, seed=0
    ) as batches:
        sizes = [tuple(batch.inputs.shape) for batch in batches.epoch()]
    assert sizes == [(3, 4, 3), (1, 4, 3)]
    with data.open(
        session=session, input_size=(4, 3), batch_size=3, training=True, seed=0
    ) as batches:
        assert batches.per_epoch == data.num_samples // 3 == 6
        assert {int(label) for batch in batches.epoch() for label in batch.targets} == {0, 1}


def test_sizes_and_batches_that_do_not_fit_are_refused(folder, session):
    data = small(folder)
    with pytest.raises(UserError, match="set input_size=FRAMESx3"):
        data.open(session=session, input_size=(20, 75), batch_size=1, training=True, seed=0)
    with pytest.raises(Unsupported, match="fewer than the 50 of one batch"):
        data.open(session=session, input_size=(4, 3), batch_size=50, training=True, seed=0)


def test_a_folder_without_skeletons_names_the_layout(tmp_path):
    with pytest.raises(UserError, match="Looked for SUBJECT_DATE_GESTURE"):
        small(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        small(tmp_path / "nowhere")
    write(tmp_path, "x.txt")
    with pytest.raises(UserError, match=r"first of 1 problems: x\.txt: its name"):
        small(tmp_path)


def test_the_stand_in_is_in_the_layout_and_follows_its_seed(tmp_path, capsys):
    for name, seed in (("one", "0"), ("same", "0"), ("other", "1")):
        options = ["--subjects", "2", "--repetitions", "1", "--seed", seed]
        assert commands.run(["make-data", "skeletons", str(tmp_path / name), *options]) == 0
    assert "18 repetitions of 9 gestures by 2 subjects" in capsys.readouterr().out
    one, same, other = (
        skeletons.read(tmp_path / name, gestures=9, columns=75) for name in ("one", "same", "other")
    )
    assert (len(one[0]), one[1]) == (18, [])
    assert {repetition.gesture for repetition in one[0]} == set(range(9))
    assert all(map(torch.equal, *([each.frames for each in side[0]] for side in (one, same))))
    assert one[0][0].frames.tolist() != other[0][0].frames.tolist()


def test_a_gesture_of_the_stand_in_moves_its_own_joints(tmp_path):
    commands.run(["make-data", "skeletons", str(tmp_path), "--subjects", "2", "--repetitions", "1"])
    joints = {
        5: "ElbowLeft",
        6: "WristLeft",
        9: "ElbowRight",
        10: "WristRight",
        14: "AnkleLeft",
        18: "AnkleRight",
    }
    moving = []
    for repetition in read_all(tmp_path)[:9]:
        spread = np.ptp(repetition.frames.numpy().reshape(-1, 25, 3), axis=0).max(axis=1)
        moving.append({name for number, name in joints.items() if spread[number] > 0.15})
    left, right = {"ElbowLeft", "WristLeft"}, {"ElbowRight", "WristRight"}
    assert moving[:7] == [{"WristLeft"}, {"WristRight"}, left, right, left, right, left | right]
    assert moving[7:] == [{"AnkleLeft"}, {"AnkleRight"}]


def read_all(root):
    return skeletons.read(root, gestures=9, columns=75)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--photographs", "x"],
            "--photographs is not for skeletons; its own are --subjects, --repetitions",
        ),
        (["--test", "3"], "--test is not for skeletons"),
        (["--subjects", "1"], "greater than or equal to 2"),
    ],
)
def test_other_options_of_the_stand_in_are_refused(tmp_path, capsys, arguments, message):
    assert commands.run(["make-data", "skeletons", str(tmp_path / "x"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
