"""Earlier place of `perfexp.run`, for the Hydra callback in users' experiments."""

from perfexp.run import segmentation_table

__all__ = ["segmentation_table"]
