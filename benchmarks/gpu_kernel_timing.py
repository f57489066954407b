"""Times of calls in CUDA graphs, and the lines that a run of `gpu_kernels` prints at its end."""

import math
import statistics
import sys
import time
import types
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).resolve().parent.parent
try:
    import vcli.runtime.layers.kernels as _  # noqa: F401
except ImportError:
    # Not installed: the folders themselves are the package.
    sys.path.insert(0, str(ROOT))
    package = types.ModuleType("vcli")
    package.__path__ = [str(ROOT)]
    sys.modules["vcli"] = package

BF16, DEVICE = torch.bfloat16, "cuda"
ROTATED_BYTES = 300 << 20
LINES: list[str] = []
COMPILE_S: list[float] = []


def say(line=""):
    LINES.append(line)


def count_compilations():
    """Has every compilation add its seconds to `COMPILE_S`."""
    compile_kernel = JITFunction._do_compile

    def timed(self, *arguments, **options):
        begin_s = time.perf_counter()
        kernel = compile_kernel(self, *arguments, **options)
        COMPILE_S.append(time.perf_counter() - begin_s)
        return kernel

    JITFunction._do_compile = timed


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def ints(values, dtype=torch.int32):
    return torch.tensor(values, device=DEVICE, dtype=dtype)


def graph_us(calls, replays=5):
    """Microseconds of a call, each of `calls` once in the graph."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`: its garbage collection would take longer than the measurement.
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
        graph.replay()
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def rotated(make, item_bytes, count=20):
    """`count` items, as many of them distinct as leave the cache."""
    distinct = [make() for _ in range(max(1, min(count, math.ceil(ROTATED_BYTES / item_bytes))))]
    return [distinct[index % len(distinct)] for index in range(count)]


def error_of(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()
