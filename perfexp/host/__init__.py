"""The operating system: files, locks, signals, streams, and caches."""
