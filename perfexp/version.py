"""Version of perfexp."""

__version__ = "0.1.0"
