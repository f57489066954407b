"""The `launch` package of vcli."""
