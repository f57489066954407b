"""The `engine` package of vcli."""
