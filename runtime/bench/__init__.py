"""The `bench` package of vcli."""
