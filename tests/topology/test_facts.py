"""Facts survive JSON, and damaged ones are told."""

import json

import pytest

from vcli.topology import (
    ConfigError,
    GpuFacts,
    HostFacts,
    LinkFacts,
    NicFacts,
    ProcessFacts,
)


def test_facts_survive_the_round_trip() -> None:
    host = HostFacts(
        hostname="n0",
        cpu_count=4,
        numa_cpus=((0, 1), (2, 3)),
        gpus=(GpuFacts(index=0, compute_capability=(9, 0)),),
        links=(LinkFacts(first=0, second=1, kind="NV18", can_access_peer=True),),
        nics=(NicFacts(name="eth0", addresses=("10.0.0.1", "fd00::1")),),
    )
    process = ProcessFacts(cuda_initialized=True, cuda_initialized_by="torch", main_has_guard=None)

    assert HostFacts.from_json(json.loads(json.dumps(host.to_json()))) == host
    assert ProcessFacts.from_json(json.loads(json.dumps(process.to_json()))) == process
    assert HostFacts.from_json({"cpu_count": 3, "from_the_future": 1}) == HostFacts(cpu_count=3)


def test_damaged_facts_are_a_user_error() -> None:
    with pytest.raises(ConfigError):
        GpuFacts.from_json({"name": "no index"})
    with pytest.raises(ConfigError):
        HostFacts.from_json({"gpus": ["not an object"]})
    with pytest.raises(ConfigError, match="expected int, got 'four'"):
        HostFacts.from_json({"cpu_count": "four"})
    with pytest.raises(ConfigError):
        HostFacts.from_json({"gpus": [{"index": 0, "compute_capability": [9]}]})
