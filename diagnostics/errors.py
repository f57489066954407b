"""What a probe raises when a fact cannot be had."""


class CannotMeasureError(Exception):
    """A fact that a check needs cannot be had; the verdict is `unknown` with this message."""
