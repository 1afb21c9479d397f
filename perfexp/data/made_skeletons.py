"""Make a small data set in the layout of IntelliRehabDS: a skeleton that does nine gestures, by several subjects.

A joint turns and takes the limb below it along. Subjects differ in height, place, direction, range and speed of their
movements, and in whether they sit; every repetition differs in time and range, and every coordinate has noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from perfexp.data.made import Recipe

_Numbers = np.ndarray[Any, np.dtype[np.float64]]

#: Heights of joints of Kinect for Windows SDK 2.0 in the middle, and places right and up of those on the right side,
#: which the left side mirrors, in meters.
_MIDDLE = {"SpineBase": 0.95, "SpineMid": 1.2, "Neck": 1.5, "Head": 1.65, "SpineShoulder": 1.4}
_SIDE = {
    "Shoulder": (0.18, 1.4),
    "Elbow": (0.2, 1.12),
    "Wrist": (0.21, 0.88),
    "Hand": (0.21, 0.8),
    "HandTip": (0.21, 0.72),
    "Thumb": (0.18, 0.8),
    "Hip": (0.09, 0.93),
    "Knee": (0.1, 0.52),
    "Ankle": (0.1, 0.1),
    "Foot": (0.1, 0.04),
}
#: Order of the joints in a line (JointType of the SDK).
_ORDER = [
    *("SpineBase", "SpineMid", "Neck", "Head"),
    *(f"{part}{side}" for side in ("Left", "Right") for part in ("Shoulder", "Elbow", "Wrist", "Hand")),
    *(f"{part}{side}" for side in ("Left", "Right") for part in ("Hip", "Knee", "Ankle", "Foot")),
    *("SpineShoulder", "HandTipLeft", "ThumbLeft", "HandTipRight", "ThumbRight"),
]
_ARM, _LEG = ("Elbow", "Wrist", "Hand", "HandTip", "Thumb"), ("Knee", "Ankle", "Foot")
_POSITIONS = ("stand", "chair")
#: Frames of a repetition, noise of a coordinate in meters, and height of a seat below the hips of who stands.
_FRAMES, _NOISE, _SEAT = (25, 50), 0.008, 0.4


class _Turn(NamedTuple):
    """A limb that turns about a joint, in the plane through an axis (0 right, 2 forward), by a number of degrees."""

    pivot: str
    limb: tuple[str, ...]
    axis: int
    degrees: float


#: What turns, by the label of a gesture, on a side or on both.
_GESTURES = (
    *((_Turn("Elbow", _ARM[1:], 2, 125.0), side) for side in ("Left", "Right")),
    *((_Turn("Shoulder", _ARM, 2, 100.0), side) for side in ("Left", "Right")),
    *((_Turn("Shoulder", _ARM, 0, 100.0), side) for side in ("Left", "Right")),
    (_Turn("Shoulder", _ARM, 2, 150.0), "both"),
    *((_Turn("Hip", _LEG, 0, 28.0), side) for side in ("Left", "Right")),
)


def recipe(*, subjects: int, repetitions: int, seed: int) -> Recipe:
    """Text files of every gesture by a number of subjects, each repeated."""
    count = subjects * len(_GESTURES) * repetitions
    return Recipe(
        about={
            "made_by": "perfexp make-data skeletons",
            "labels": "The gesture that a skeleton of simple geometry does.",
            "seed": seed,
            "subjects": subjects,
            "repetitions": repetitions,
        },
        files=_files(subjects, repetitions, seed),
        count=count,
        contents=f"{count} repetitions of 9 gestures by {subjects} subjects, in the layout of IntelliRehabDS",
        remark="It stands in for IntelliRehabDS, and its accuracies are its own.",
        command="python -m perfexp experiment=full_benchmark model=clip_gesture data=skeletons",
    )


def _files(subjects: int, repetitions: int, seed: int) -> Iterator[tuple[str, bytes]]:
    for number in range(subjects):
        random = np.random.default_rng([seed, number])
        position, body = _POSITIONS[number % len(_POSITIONS)], _Body.of(random)
        for gesture in range(len(_GESTURES)):
            for repetition in range(1, repetitions + 1):
                frames = body.move(gesture, random, sits=position == "chair")
                lines = (",".join(f"{value:.4f}" for value in frame) for frame in frames)
                name = f"{101 + number}_18_{gesture}_{repetition}_1_{position}.txt"
                yield name, ("\n".join(lines) + "\n").encode()


class _Body(NamedTuple):
    """A subject: size and share of the full range, turn about the vertical in radians, and place in meters."""

    size: float
    extent: float
    yaw: float
    place: _Numbers

    @classmethod
    def of(cls, random: np.random.Generator) -> _Body:
        """Draw a subject."""
        place = np.array([random.uniform(-0.4, 0.4), random.uniform(-1.2, -0.8), random.uniform(1.8, 2.6)])
        return cls(random.uniform(0.88, 1.12), random.uniform(0.75, 1.0), random.uniform(-0.25, 0.25), place)

    def move(self, gesture: int, random: np.random.Generator, *, sits: bool) -> _Numbers:
        """One repetition of a gesture, (frames, 75): the limb goes to its end, rests there and comes back."""
        frames, hold = int(random.integers(*_FRAMES)), random.uniform(1.0, 2.5)
        reach = np.minimum(hold * np.sin(np.pi * np.linspace(0, 1, frames)) ** 2, 1.0) * random.uniform(0.85, 1.0)
        turn, side = _GESTURES[gesture]
        joints = {name: np.tile(place, (frames, 1)) for name, place in _posture(sits=sits).items()}
        for name in ("Left", "Right") if side == "both" else (side,):
            _apply(turn, name, joints, np.radians(turn.degrees) * self.extent * reach)
        moved = np.stack([joints[name] for name in _ORDER], axis=1) * self.size
        cosine, sine = np.cos(self.yaw), np.sin(self.yaw)
        turned: _Numbers = moved @ np.array([[cosine, 0, -sine], [0, 1, 0], [sine, 0, cosine]])
        noisy: _Numbers = turned + self.place + random.normal(0, _NOISE, turned.shape)
        return noisy.reshape(frames, -1)


def _posture(*, sits: bool) -> dict[str, _Numbers]:
    """The joints at rest, standing or on a seat."""
    places = {name: (0.0, y, 0.0) for name, y in _MIDDLE.items()}
    for part, (x, y) in _SIDE.items():
        places |= {f"{part}Right": (x, y, 0.0), f"{part}Left": (-x, y, 0.0)}
    joints = {name: np.array(place) for name, place in places.items()}
    if sits:
        for name, place in joints.items():
            if name.startswith(_LEG):
                place[2] += _SEAT
            if not name.startswith(("Ankle", "Foot", "Knee")):
                place[1] -= _SEAT
    return joints


def _apply(turn: _Turn, side: str, joints: dict[str, _Numbers], angles: _Numbers) -> None:
    """Turn the limb of a side by an angle in each frame, outwards or forwards and up."""
    pivot = joints[f"{turn.pivot}{side}"]
    outwards = -1.0 if turn.axis == 0 and side == "Left" else 1.0
    cosine, sine = np.cos(angles), np.sin(angles)
    for part in turn.limb:
        arm = joints[f"{part}{side}"] - pivot
        along, up = arm[:, turn.axis] * outwards, arm[:, 1].copy()
        arm[:, turn.axis] = outwards * (along * cosine - up * sine)
        arm[:, 1] = along * sine + up * cosine
        joints[f"{part}{side}"] = pivot + arm
