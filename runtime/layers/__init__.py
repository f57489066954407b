"""The `layers` package of vcli."""
