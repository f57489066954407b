"""Log lines with the process title as prefix, on stderr, one write per line."""

import logging
import sys

_FORMAT = "%(asctime)s %(levelname)s %(process_title)s %(name)s: %(message)s"


class _TitleFilter(logging.Filter):
    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def filter(self, record: logging.LogRecord) -> bool:
        record.process_title = self._title
        return True


def configure_logging(title: str, level: str = "INFO") -> None:
    """Send vcli's log of this process to stderr, each line with `title` (`Worker_TP1`).

    Calling it again replaces the title and level.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(_TitleFilter(title))
    root = logging.getLogger("vcli")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def get_logger(name: str) -> logging.Logger:
    """The logger of a vcli module, named by `__name__`."""
    return logging.getLogger(name)
