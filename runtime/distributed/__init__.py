"""The `distributed` package of vcli."""
