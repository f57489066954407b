"""The composed CUDA_VISIBLE_DEVICES reaches whoever may use a device."""

import os
from dataclasses import replace

import pytest

from tests.support.fake_worker import fake_config
from vcli.runtime.bench.offline_engine import OfflineEngine
from vcli.runtime.executor.node_workers import NodeWorkers
from vcli.runtime.launch.serve import serve_until_stopped
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.server.listen import bind_listener
from vcli.runtime.worker.dispatch import StoreAddress
from vcli.topology.errors import UnfitError

CHOSEN = {"CUDA_VISIBLE_DEVICES": "GPU-3,GPU-1"}


@pytest.fixture
def specs(monkeypatch):
    """What would be started; nothing is."""
    found = []

    def refuse(self, wanted, *, starter=None, timeout_s=None):
        found.extend(wanted)
        raise UnfitError("nothing is started here")

    monkeypatch.setattr(ChildGroup, "start", refuse)
    return found


def config(visible_devices="GPU-3,GPU-1"):
    return replace(fake_config(), visible_devices=visible_devices)


def test_without_a_choice_nothing_is_added():
    assert config(None).device_environ == {}


def test_serve_gives_it_to_the_core(specs):
    class View:
        def on_message(self, message): ...

    listener = bind_listener("127.0.0.1", 0)
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    with listener, pytest.raises(UnfitError):
        serve_until_stopped(config(), listener, view=View(), environ={}, tokenizer=object())
    assert [dict(spec.environ) for spec in specs] == [CHOSEN]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_bench_offline_gives_it_to_the_core(specs):
    with pytest.raises(UnfitError):
        OfflineEngine(config(), on_message=lambda _: None, fork_server=None).__enter__()
    assert [dict(spec.environ) for spec in specs] == [CHOSEN]


def test_a_node_without_a_core_gives_it_to_its_workers(specs):
    workers = NodeWorkers(
        config(),
        is_trusted=True,
        send=lambda _: None,
        on_message=lambda _: None,
        on_failure=lambda _: None,
    )
    store = StoreAddress(host="127.0.0.1", port=1)
    try:
        with pytest.raises(UnfitError):
            workers.start(store, environ={"GLOO_SOCKET_IFNAME": "lo"}, starter=None)
    finally:
        workers.shutdown(is_asked=False)
    assert [dict(spec.environ) for spec in specs] == [{**CHOSEN, "GLOO_SOCKET_IFNAME": "lo"}]
