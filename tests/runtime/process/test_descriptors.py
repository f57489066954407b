"""Open files get the numbers that were asked for, whatever is there already."""

import itertools
import subprocess
import sys

import pytest

_CODE = """
import os, sys
from vcli.runtime.process.descriptors import close_all_but, place_descriptors
sources, targets = eval(sys.argv[1])
path = sys.argv[2]
for number in sorted({*sources, *targets}):
    if number in sources:
        descriptor = os.open(f"{path}/{sources.index(number)}", os.O_RDWR | os.O_CREAT)
    else:
        descriptor = os.open("/dev/null", os.O_RDONLY)
    os.write(descriptor, str(sources.index(number)).encode()) if number in sources else None
    if descriptor != number:
        os.dup2(descriptor, number)
        os.close(descriptor)
place_descriptors(sources, targets)
close_all_but({0, 1, 2, *targets})
got = [os.pread(target, 10, 0).decode() for target in targets]
assert got == [str(index) for index in range(len(targets))], got
assert not any(os.get_inheritable(target) for target in targets)
opened = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2}
assert len(opened - set(targets)) <= 1 and set(targets) <= opened, opened
"""

PERMUTATIONS = [((20, 21, 22), order) for order in itertools.permutations((20, 21, 22))]


@pytest.mark.process
@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        *PERMUTATIONS,
        ((20, 21, 22), (21, 22, 23)),
        ((20, 21, 22), (19, 20, 21)),
        ((20, 21, 22, 23), (21, 20, 40, 41)),
        ((20,), (20,)),
        ((), ()),
    ],
)
def test_every_move_works(tmp_path, sources: tuple[int, ...], targets: tuple[int, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CODE, repr((sources, targets)), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
