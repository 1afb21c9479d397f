"""Statistics for raw samples, and scaling models: pure functions without a clock or a device."""
