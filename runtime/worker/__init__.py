"""The `worker` package of vcli."""
