"""`perfexp make-data` and `perfexp doctor data.root=…`: small data sets, and what is told of whole and broken ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from perfexp import commands
from perfexp.data import cifar_files
from perfexp.data.cityscapes_folder import (
    IMAGES,
    SPLITS,
    VOID,
    Pair,
    find_pairs,
    inspect,
    read_mask,
)
from perfexp.data.images import Images
from tests.data.streets import cut_off


def make(folder: Path, *options: str) -> int:
    return commands.run(
        ["make-data", str(folder), "--size", "64x128", "--train", "3", "--val", "2", *options]
    )


@pytest.fixture
def made(tmp_path: Path, photographs: Path) -> Path:
    assert make(tmp_path / "made", "--photographs", str(photographs / "temple")) == 0
    return tmp_path / "made"


def pairs(root: Path) -> list[Pair]:
    return [pair for split in SPLITS for pair in find_pairs(root, split)]


def pixels(root: Path) -> dict[str, bytes]:
    files = sorted(root.rglob("*.png"))
    return {str(file.relative_to(root)): np.array(Image.open(file)).tobytes() for file in files}


def test_made_data_follow_the_layout_and_claim_no_ground_truth(
    tmp_path: Path, photographs: Path, capsys
) -> None:
    made = tmp_path / "made"
    assert make(made, "--photographs", str(photographs / "temple")) == 0
    told = capsys.readouterr().out
    assert "3 images of training and 2 of evaluation, 64 × 128" in told
    assert "not ground truth" in told
    about = json.loads((made / "made.json").read_text())
    assert "not ground truth" in about["masks"]
    assert about["photographs"] == [f"{number}.jpg" for number in range(6)]
    assert [len(find_pairs(made, split)) for split in SPLITS] == [3, 2]
    assert [inspect(pair) for pair in pairs(made)] == [None] * 5
    with Image.open(pairs(made)[0].image) as picture:
        assert (picture.size, picture.mode) == ((128, 64), "RGB")


def test_masks_have_many_classes_in_regions_and_void(made: Path) -> None:
    for pair in pairs(made):
        mask = read_mask(pair.mask)
        assert len(set(np.unique(mask)) - {VOID}) >= 8
        assert (mask[-3:] == VOID).all()
        assert 0.04 <= (mask == VOID).mean() < 0.5
        inner = mask[:60]
        assert (inner[:, 1:] == inner[:, :-1]).mean() > 0.7  # neighbours belong together


def test_the_seed_makes_the_same_pixels(made: Path, tmp_path: Path, photographs: Path) -> None:
    given = ("--photographs", str(photographs / "temple"))
    make(tmp_path / "again", *given)
    make(tmp_path / "other", *given, "--seed", "1")
    assert pixels(tmp_path / "again") == pixels(made)
    assert pixels(tmp_path / "other") != pixels(made)
    assert len(set(pixels(made).values())) == 10


def test_without_photographs_the_public_ones_are_taken(tmp_path: Path) -> None:
    assert make(tmp_path / "x") == 0
    about = json.loads((tmp_path / "x" / "made.json").read_text())
    assert about["photographs"] == ["scikit-learn: china.jpg", "scikit-learn: flower.jpg"]


def test_with_photographs_scikit_learn_and_torch_are_not_needed(
    tmp_path: Path, photographs: Path
) -> None:
    code = (
        "import sys\n"
        "class Wall:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'sklearn', 'mmseg', 'scipy'): raise ImportError('not here')\n"
        "sys.meta_path.insert(0, Wall())\n"
        "from perfexp import commands\n"
        "made = commands.run(['make-data', 'x', *sys.argv[1:]])\n"
        "bare = commands.run(['make-data', 'y'])\n"
        "sys.exit(made or commands.run(['doctor', 'data.root=x']) or (bare != 2))"
    )
    arguments = [
        "--photographs",
        str(photographs / "flower"),
        "--size",
        "32x64",
        "--train",
        "1",
        "--val",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "pip install scikit-learn" in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--photographs", "nowhere"], "There is no folder nowhere"),
        (["--photographs", "empty"], "There are no photographs in empty"),
        (["--photographs", "broken"], r"a.jpg can't be read as an image"),
        (["--size", "8x8"], "from 32 to 16384"),
        (["--size", "big"], "is not a size"),
    ],
)
def test_bad_input_is_told(
    tmp_path: Path, monkeypatch, capsys, options: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.jpg").write_text("no picture")
    assert make(tmp_path / "x", *options) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_folder_with_something_in_it_is_left_alone(made: Path, capsys) -> None:
    before = pixels(made)
    assert make(made) == 2
    assert "is not empty" in capsys.readouterr().err
    assert pixels(made) == before


def doctor(capsys, *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = commands.run(["doctor", *arguments])
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).split())


def test_a_whole_data_set_is_counted(made: Path, capsys) -> None:
    code, told = doctor(capsys, f"data.root={made}", "data=cityscapes")
    assert code == 0
    assert "3 images, 3 masks, 3 pairs" in told
    assert "2 images, 2 masks, 2 pairs" in told
    assert "all read whole" in told
    assert "not ground truth" in told
    assert "it can be used" in told


def test_masks_with_label_ids_only_are_told_and_fine(made: Path, capsys) -> None:
    for pair in pairs(made):
        mask = read_mask(pair.mask)
        Image.fromarray(np.where(mask == VOID, 0, 7).astype(np.uint8)).save(
            str(pair.mask).replace("_labelTrainIds", "_labelIds")
        )
        pair.mask.unlink()
    code, told = doctor(capsys, f"data.root={made}")
    assert code == 0
    assert "3 masks hold label ids, which become train ids" in told


@pytest.mark.parametrize("lacking", ["", "leftImg8bit", "leftImg8bit/val", "gtFine/train"])
def test_the_first_thing_that_is_missing_is_named(made: Path, capsys, lacking: str) -> None:
    shutil.rmtree(made / lacking)
    code, told = doctor(capsys, "--json", f"data.root={made}")
    found = [finding for finding in json.loads(told)["findings"] if finding["verdict"] == "fail"]
    assert code == 1
    assert [finding["found"] for finding in found] == [f"there is no folder {made / lacking}"]
    assert "make-data" in found[0]["remedy"]


def test_what_is_wrong_with_files_is_told_file_by_file(made: Path, capsys) -> None:
    first, second, third = find_pairs(made, "train")
    cut_off(first.image)
    mask = read_mask(second.mask).copy()
    mask[0, :2] = 19, 200
    Image.fromarray(mask).save(second.mask)
    Image.new("L", (20, 10)).save(third.mask)
    lonely = find_pairs(made, "val")
    lonely[0].mask.unlink()
    lonely[1].image.unlink()
    code, told = doctor(capsys, "--json", f"data.root={made}")
    answer = json.loads(told)
    failed = [finding["found"] for finding in answer["findings"] if finding["verdict"] == "fail"]
    assert (code, answer["works"]) == (1, False)
    assert f"{first.image} can't be read as an image: image file is truncated" in failed[0]
    assert f"{second.mask} has labels that are not train ids: 19, 200" in failed[1]
    assert f"{third.mask} is 10 × 20, its image 64 × 128" in failed[2]
    assert f"1 without a mask, the first is {lonely[0].image}" in failed[3]
    assert any(
        f"have no image, the first is {lonely[1].mask}" in each["found"]
        for each in answer["findings"]
    )


def test_no_more_pairs_are_read_than_are_asked_for(made: Path, capsys) -> None:
    find_pairs(made, "train")[1].image.write_text("no picture")
    assert doctor(capsys, f"data.root={made}", "--pairs", "2")[0] == 0
    assert doctor(capsys, f"data.root={made}", "--pairs", "0")[0] == 1


def test_a_split_without_pictures_fails(made: Path, capsys) -> None:
    shutil.rmtree(made / IMAGES / "train" / "made")
    code, told = doctor(capsys, f"data.root={made}")
    assert code == 1
    assert "0 images, 3 masks, 0 pairs" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["data.rot=x"], "Did you mean data.root"),
        (["data=images", "data.root=x"], "only checks folders of data=cityscapes"),
        (["data=cityscapes"], "set data.root=DIR"),
        (["gpu=h200"], "--gpu NAME"),
    ],
)
def test_other_settings_are_refused(capsys, arguments: list[str], told: str) -> None:
    code, printed = doctor(capsys, *arguments)
    assert code == 2
    assert told in printed


def make_shapes(folder: Path, *options: str) -> int:
    return commands.run(
        ["make-data", "cifar10", str(folder), "--train", "13", "--test", "4", *options]
    )


def test_a_stand_in_for_cifar_10_is_in_its_format(
    tmp_path: Path, photographs: Path, capsys
) -> None:
    folder = tmp_path / "made"
    assert make_shapes(folder, "--classes", "3", "--photographs", str(photographs / "temple")) == 0
    assert "13 images of training and 4 of evaluation, 3 classes" in capsys.readouterr().out
    contents = cifar_files.read(folder, 10)
    assert contents.classes == ["disc", "ring", "square"]
    assert sorted(np.bincount(contents.train.labels)) == [4, 4, 5]
    assert (len(contents.train.pixels), len(contents.test.pixels)) == (13, 4)
    assert json.loads((folder / "made.json").read_text())["images"] == {"train": 13, "test": 4}


def make_images(folder: Path, *options: str) -> int:
    return commands.run(
        [
            "make-data",
            "images",
            str(folder),
            "--train",
            "7",
            "--val",
            "3",
            "--classes",
            "3",
            *options,
        ]
    )


def test_images_by_class_are_a_folder_for_data_images(
    tmp_path: Path, photographs: Path, capsys
) -> None:
    folder = tmp_path / "made"
    assert make_images(folder, "--photographs", str(photographs / "temple")) == 0
    told = capsys.readouterr().out
    assert "7 images of training and 3 of evaluation, 256 × 256, 3 classes" in told
    assert f"data=images data.root={folder}" in told
    counts = {
        name: len(list((folder / name).glob("*.jpg")))
        for name in ("train/disc", "train/ring", "val/square")
    }
    assert counts == {"train/disc": 3, "train/ring": 2, "val/square": 1}
    images = Images(root=str(folder))
    assert (images.num_classes, images.num_samples, images.labelled, images.held_out) == (
        3,
        7,
        True,
        True,
    )
    with Image.open(folder / "train" / "disc" / "000000.jpg") as picture:
        assert (picture.size, picture.mode, picture.format) == ((256, 256), "RGB", "JPEG")
    assert make_images(folder) == 2
    assert "is not empty" in capsys.readouterr().err


def test_the_seed_makes_the_same_images(tmp_path: Path) -> None:
    made = []
    for name, seed in (("one", "0"), ("same", "0"), ("other", "1")):
        make_images(tmp_path / name, "--seed", seed)
        made.append([file.read_bytes() for file in sorted((tmp_path / name).rglob("*.jpg"))])
    assert made[0] == made[1]
    assert made[0] != made[2]


def test_the_seed_makes_the_same_stand_in(tmp_path: Path) -> None:
    made = []
    for name, seed in (("one", "0"), ("same", "0"), ("other", "1")):
        make_shapes(tmp_path / name, "--seed", seed)
        made.append([file.read_bytes() for file in sorted((tmp_path / name).glob("*.bin"))])
    assert made[0] == made[1]
    assert made[0] != made[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["cifar10"], "Name the folder: perfexp make-data cifar10 DIR"),
        (["cifar", "x"], "Did you mean cifar10"),
        (["cifar10", "x", "y"], "takes a layout and a folder"),
        (["cifar10", "x", "--val", "3"], "--val is not for cifar10"),
        (["x", "--classes", "3"], "--classes is not for cityscapes"),
        (["cifar10", "x", "--train", "4"], "at least 5"),
        (["images", "x", "--size", "64x64"], "--size is not for images"),
        (["images", "x", "--val", "9"], "--val 9: at least 10, one for each class"),
    ],
)
def test_a_wrong_layout_is_explained(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands.run(["make-data", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
