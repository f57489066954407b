"""The `views` package of vcli."""
