"""The `cli` package of vcli."""
