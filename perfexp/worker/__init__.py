"""The process that measures: the only process that imports torch and touches the device."""
