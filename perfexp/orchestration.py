"""Alias of `perfexp.run`: experiments of users name their Hydra callback by this earlier place."""

from perfexp.run import segmentation_table

__all__ = ["segmentation_table"]
