"""The `models` package of vcli."""
