"""What the children of the fork server's tests do."""

import contextlib
import os
import random
import sys
import time
from pathlib import Path

from tests.support.child_targets import spec
from vcli.runtime.process.child import ChildContext
from vcli.runtime.process.fork_client import starter_of
from vcli.runtime.process.group import ChildGroup


def tell_descriptors(context: ChildContext, names: list[str]) -> None:
    """Ready with every open file, and the contents behind the numbers in `names`."""
    listed = {}
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            listed[int(path.name)] = str(path.readlink())
    contents = {name: os.pread(int(name), 64, 0).decode() for name in names}
    context.ready([sorted(listed.items()), contents])
    time.sleep(60)


def draw(context: ChildContext) -> None:
    """Ready with random numbers of every source that a worker may use."""
    import numpy

    context.ready([random.random(), float(numpy.random.random()), os.getpid()])
    time.sleep(60)


def multiply(context: ChildContext) -> None:
    """Ready with the result and the thread counts of torch after a product that uses its pool."""
    import torch

    square = torch.ones(600, 600)
    total = float((square @ square).sum())
    # An operator of torch itself, in parallel by OpenMP.
    total += float(torch.ones(2_000_000).add(1).sum())
    context.ready([total, torch.get_num_threads(), len(list(Path("/proc/self/task").iterdir()))])
    time.sleep(60)


def start_own_children(context: ChildContext, number: int) -> None:
    """Be an engine core: have children forked through the link, ready with their pids."""
    group = ChildGroup(context.forward, lambda report: None)
    specs = [spec("wait", index, title=f"Grandchild_{index}") for index in range(number)]
    group.start(specs, starter=starter_of(context))
    payloads = group.wait_ready(30)
    context.ready([list(group.pids), payloads])
    time.sleep(60)


def tell_place(context: ChildContext) -> None:
    """Ready with where it is."""
    context.ready([str(Path.cwd()), sys.path[0], os.environ.get("ONLY_HERE"), os.getppid()])
    time.sleep(60)


def tell_library(context: ChildContext) -> None:
    """Ready with the library that torch would multiply by on a GPU."""
    import torch

    context.ready(torch.backends.cuda.preferred_blas_library().name)
    time.sleep(60)


def use_cuda(context: ChildContext) -> None:
    """Ready with the sum of a product that a captured graph computes three times."""
    import torch

    square = torch.ones(512, 512, device="cuda")
    total = torch.zeros((), device="cuda")
    (square @ square).sum()  # cuBLAS makes its workspace before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total += (square @ square).sum()
    for _ in range(3):
        graph.replay()
    context.ready(float(total))
    time.sleep(60)
