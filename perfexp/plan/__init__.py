"""The plan of a run: configuration, schema, validation, names, and time estimates."""
