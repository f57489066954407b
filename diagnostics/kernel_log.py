"""Messages of the kernel, as far as this process may read them."""

import os
import re
from collections.abc import Iterator
from typing import Final

from vcli.diagnostics.errors import CannotMeasureError
from vcli.diagnostics.files import HostFiles

_XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def read_kernel_log(files: HostFiles) -> str:
    """Everything that the ring buffer holds; never waits for new messages.

    Raises:
        CannotMeasureError: there is none here, or it is not for this user.
    """
    try:
        descriptor = os.open(files.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise CannotMeasureError(f"/dev/kmsg cannot be read: {error.strerror}") from error
    try:
        return "".join(_records(descriptor))
    finally:
        os.close(descriptor)


def _records(descriptor: int) -> Iterator[str]:
    while True:
        try:
            record = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        except BrokenPipeError:  # a record was overwritten while we read: go on behind it
            continue
        except OSError as error:
            raise CannotMeasureError(f"/dev/kmsg cannot be read: {error.strerror}") from error
        if not record:
            return
        yield record.decode(errors="replace")


def find_xids(log: str) -> tuple[tuple[str, int], ...]:
    """(bus id, Xid) of each report of the NVIDIA driver, in order."""
    return tuple((bus, int(number)) for bus, number in _XID.findall(log))
