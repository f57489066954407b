"""The `executor` package of vcli."""
