"""The `commands` package of vcli."""
