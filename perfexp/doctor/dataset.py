"""Verdict on whether data=cityscapes can use a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perfexp.doctor import Finding, fail, ok, warn

#: Maximum problems listed per split; the rest is counted.
_LISTED = 3


def findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding per check; for a split without folders only the missing folder.

    Args:
        facts: `made` (whether the masks are artificial), `where` (data source), and `splits`. A
            split has `missing`, or it has `images`, `masks`, `pairs`, `label_ids`, `without_mask`,
            `without_image`, `read` and `problems`.
    """
    reported = set()
    for split, of_split in facts["splits"].items():
        if missing := of_split["missing"]:
            if missing not in reported:
                reported.add(missing)
                yield fail(split, f"there is no folder {missing}", facts["where"])
        else:
            yield _counts(split, of_split)
            if of_split["without_image"]:
                lonely = of_split["masks"] - of_split["pairs"]
                observation = (
                    f"{lonely} masks have no image, the first is {of_split['without_image'][0]}"
                )
                yield warn(
                    f"{split} masks", observation, "get the images; these masks are not used"
                )
            yield from _read(split, of_split)
    if facts["made"]:
        remedy = "use it to try out and to time; no accuracy is reported"
        yield warn("masks", "made by perfexp make-data from colors: not ground truth", remedy)


def _counts(split: str, facts: Mapping[str, Any]) -> Finding:
    observation = f"{facts['images']} images, {facts['masks']} masks, {facts['pairs']} pairs"
    if not facts["images"]:
        return fail(split, observation, "put images CITY/*_leftImg8bit.png there")
    if facts["without_mask"]:
        missing = facts["images"] - facts["pairs"]
        observation += f"; {missing} without a mask, the first is {facts['without_mask'][0]}"
        return fail(
            split, observation, "get its *_gtFine_labelTrainIds.png or *_gtFine_labelIds.png"
        )
    if facts["label_ids"]:
        observation += (
            f"; {facts['label_ids']} masks hold label ids, which become train ids as they are read"
        )
    return ok(split, observation)


def _read(split: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    check, problems = f"{split} files", facts["problems"]
    for problem in problems[:_LISTED]:
        yield fail(check, problem, "")
    if len(problems) > _LISTED:
        yield fail(
            check,
            f"{len(problems)} of {facts['read']} pairs that were read can't be used",
            "--json lists all",
        )
    if facts["read"] and not problems:
        whole = (
            "all"
            if facts["read"] == facts["pairs"]
            else f"{facts['read']} of {facts['pairs']}, evenly spread,"
        )
        yield ok(check, f"{whole} read whole: images and masks agree, labels from 0 to 18 and 255")
