"""A small data set in IntelliRehabDS' layout: a skeleton with nine gestures and several subjects.

A joint turns and moves the limb below it. Subjects differ in height, place, direction, range and
speed, and in whether they sit. Repetitions differ in time and range, and every coordinate has
noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from perfexp.data.made import Recipe

_Numbers = np.ndarray[Any, np.dtype[np.float64]]

#: Joint numbers (JointType in Kinect for Windows SDK 2.0): spine from its base to the head, arms
#: from shoulder to fingers, legs from hip to foot.
_SPINE = (0, 1, 20, 2, 3)
_ARMS = ((4, 5, 6, 7, 21, 22), (8, 9, 10, 11, 23, 24))
_LEGS = ((12, 13, 14, 15), (16, 17, 18, 19))
#: Heights of spine joints, and positions of limb joints outwards and up, in meters.
_SPINE_HEIGHTS = (0.95, 1.2, 1.4, 1.5, 1.65)
_ARM_PLACES = ((0.18, 1.4), (0.2, 1.12), (0.21, 0.88), (0.21, 0.8), (0.21, 0.72), (0.18, 0.8))
_LEG_PLACES = ((0.09, 0.93), (0.1, 0.52), (0.1, 0.1), (0.1, 0.04))
#: Directions of the left and the right side.
_OUTWARDS = (-1.0, 1.0)
#: Turns by gesture label: limbs, index of the pivot joint, sides, axis of the turning plane
#: (0 outwards, 2 forward), and angle in degrees.
_GESTURES = (
    (_ARMS, 1, [0], 2, 125.0),
    (_ARMS, 1, [1], 2, 125.0),
    (_ARMS, 0, [0], 2, 100.0),
    (_ARMS, 0, [1], 2, 100.0),
    (_ARMS, 0, [0], 0, 100.0),
    (_ARMS, 0, [1], 0, 100.0),
    (_ARMS, 0, [0, 1], 2, 150.0),
    (_LEGS, 0, [0], 0, 28.0),
    (_LEGS, 0, [1], 0, 28.0),
)
_POSITIONS = ("stand", "chair")
#: Frames per repetition, coordinate noise in meters, and distance from standing hips to a seat.
_FRAMES, _NOISE, _SEAT = (25, 50), 0.008, 0.4


def recipe(*, subjects: int, repetitions: int, seed: int) -> Recipe:
    """Return a recipe for text files with repetitions of every gesture by several subjects."""
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
        contents=f"{count} repetitions of 9 gestures by {subjects} subjects, in the layout of "
        "IntelliRehabDS",
        remark="It stands in for IntelliRehabDS, and its accuracies are its own.",
        command="python -m perfexp experiment=full_benchmark model=clip_gesture data=skeletons",
    )


def _files(subjects: int, repetitions: int, seed: int) -> Iterator[tuple[str, bytes]]:
    for subject in range(subjects):
        random = np.random.default_rng([seed, subject])
        position = _POSITIONS[subject % len(_POSITIONS)]
        body = _posture(sits=position == "chair") * random.uniform(0.88, 1.12)
        place = random.uniform([-0.4, -1.2, 1.8], [0.4, -0.8, 2.6])
        yaw, extent = random.uniform(-0.25, 0.25), random.uniform(0.75, 1.0)
        direction = np.array(
            [[np.cos(yaw), 0, -np.sin(yaw)], [0, 1, 0], [np.sin(yaw), 0, np.cos(yaw)]]
        )
        for gesture in range(len(_GESTURES)):
            for repetition in range(1, repetitions + 1):
                moved = _moved(body, gesture, extent, random) @ direction + place
                noisy = moved + random.normal(0, _NOISE, moved.shape)
                text = ""
                for frame in noisy.reshape(len(noisy), -1):
                    text += ",".join(f"{value:.4f}" for value in frame) + "\n"
                name = f"{101 + subject}_18_{gesture}_{repetition}_1_{position}.txt"
                yield name, text.encode()


def _posture(*, sits: bool) -> _Numbers:
    """Return the joints at rest, (joints, 3), standing or on a seat."""
    joints = np.zeros((25, 3))
    joints[_SPINE, 1] = _SPINE_HEIGHTS
    for limbs, places in ((_ARMS, _ARM_PLACES), (_LEGS, _LEG_PLACES)):
        for side, limb in enumerate(limbs):
            joints[limb, :2] = np.array(places) * (_OUTWARDS[side], 1)
    if sits:
        below = [joint for limb in _LEGS for joint in limb[1:]]
        joints[below, 2] += _SEAT
        joints[np.setdiff1d(np.arange(len(joints)), below), 1] -= _SEAT
    return joints


def _moved(body: _Numbers, gesture: int, extent: float, random: np.random.Generator) -> _Numbers:
    """Return one repetition of a gesture, (frames, joints, 3).

    A limb moves to its end, rests there and comes back.
    """
    frames, hold = int(random.integers(*_FRAMES)), random.uniform(1.0, 2.5)
    reach = np.minimum(hold * np.sin(np.pi * np.linspace(0, 1, frames)) ** 2, 1.0) * random.uniform(
        0.85, 1.0
    )
    limbs, pivot, sides, axis, degrees = _GESTURES[gesture]
    angles = np.radians(degrees) * extent * reach[:, None]
    joints = np.tile(body, (frames, 1, 1))
    for side in sides:
        outwards = _OUTWARDS[side] if axis == 0 else 1.0
        limb = limbs[side][pivot + 1 :]
        along, up, _ = np.moveaxis(
            (body[limb, :] - body[limbs[side][pivot]])[:, [axis, 1, 2]], 1, 0
        )
        joints[:, limb, axis] += (
            outwards * (along * outwards * np.cos(angles) - up * np.sin(angles)) - along
        )
        joints[:, limb, 1] += along * outwards * np.sin(angles) + up * (np.cos(angles) - 1)
    return joints
