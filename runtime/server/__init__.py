"""The `server` package of vcli."""
