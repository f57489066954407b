"""The `core` package of vcli."""
