"""The process that measures: the only one that imports torch and touches the device."""
