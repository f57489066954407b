"""The `process` package of vcli."""
