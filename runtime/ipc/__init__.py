"""The `ipc` package of vcli."""
