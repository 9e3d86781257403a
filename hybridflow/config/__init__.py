"""Typed configuration: the schema, loading with overrides, the checks before a start, the batch ladder."""
