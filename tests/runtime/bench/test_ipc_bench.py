"""The queue benchmark with its real reader processes."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from vcli.runtime.bench import ipc
from vcli.runtime.bench.ipc import IpcBenchSpec, run_ipc_bench
from vcli.runtime.bench.ipc_deaths import run_death_bench
from vcli.runtime.ipc.errors import PeerDiedError
from vcli.topology.errors import ConfigError

QUICK = {"seconds": 0.03, "gap_s": 0.001}


def children():
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ProcessLookupError):
            if folder.name.isdigit():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.append(int(folder.name))
    return found


@pytest.mark.process
def test_every_payload_at_every_number_of_readers_gives_a_row_with_all_figures():
    # The last one is more than half of the ring and goes in parts.
    payloads = (0, 100, 17 << 20)
    spec = IpcBenchSpec(readers=(1, 2), payloads_bytes=payloads, **QUICK)
    rows = list(run_ipc_bench(spec))
    assert [(row.readers, row.payload_bytes) for row in rows] == [
        (count, size) for count in (1, 2) for size in payloads
    ]
    for row in rows:
        for latency in (row.round_trip_us, row.one_way_us):
            assert 0 < latency.min <= latency.p50 <= latency.p99 <= latency.max
        assert row.messages_per_s > 0
        assert row.bytes_per_s == row.messages_per_s * row.payload_bytes
        assert row.writer_cpu_us > 0
        assert row.reader_cpu_us > 0
        assert 0 <= row.idle_cpu_s < row.idle_s
    assert children() == []


@pytest.mark.process
def test_closing_the_bench_early_leaves_no_process_and_no_descriptor():
    before = set(Path("/proc/self/fd").iterdir())
    bench = run_ipc_bench(IpcBenchSpec(readers=(2, 1), payloads_bytes=(10, 20), **QUICK))
    next(bench)
    assert len(children()) == 2
    bench.close()
    assert children() == []
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.process
def test_a_killed_reader_ends_the_bench_with_its_name():
    bench = run_ipc_bench(IpcBenchSpec(readers=(2,), payloads_bytes=(10, 20), **QUICK))
    next(bench)
    victim = children()[0]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(PeerDiedError, match=str(victim)):
        next(bench)
    assert children() == []


@pytest.mark.process
def test_each_end_is_killed_as_often_as_asked_for_and_nothing_is_left():
    before = set(Path("/proc/self/fd").iterdir())
    rows = list(run_death_bench(IpcBenchSpec(readers=(1,), payloads_bytes=(1,), kills=2)))
    assert [(row.killed, row.named_ms.count) for row in rows] == [("reader", 2), ("writer", 2)]
    for row in rows:
        assert 0 < row.named_ms.min <= row.named_ms.p50 <= row.named_ms.max
    assert children() == []
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.process
def test_a_reader_that_cannot_start_is_named_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(ipc.sys, "executable", "/bin/false")
    with pytest.raises(PeerDiedError, match=r"reader 0 \(never attached\)"):
        next(run_ipc_bench(IpcBenchSpec(readers=(1,), payloads_bytes=(10,), **QUICK)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"readers": ()}, "--readers"),
        ({"readers": (1, 0)}, "--readers 0"),
        ({"readers": (65,)}, "--readers 65"),
        ({"payloads_bytes": (2 << 30,)}, "--payload 2147483648"),
        ({"seconds": 0.0}, "--seconds 0"),
        ({"gap_s": -1.0}, "--pace-ms -1000"),
        ({"kills": 1001}, "--kills 1001"),
    ],
)
def test_numbers_out_of_range_name_the_flag(wrong, said):
    with pytest.raises(ConfigError, match=said):
        IpcBenchSpec(**{"readers": (1,), "payloads_bytes": (1,), **wrong})
