"""The operating system: files, locks, signals, streams, processes and caches."""
