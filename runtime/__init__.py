"""The `runtime` package of vcli."""
