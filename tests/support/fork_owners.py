"""Processes that own a fork server, for tests that kill them."""

import os
import threading
import time
from pathlib import Path

from tests.support.child_targets import spec
from vcli.runtime.errors import FailureReport
from vcli.runtime.messages import ChildMessage, ChildState
from vcli.runtime.process.child import ChildContext, ChildSpec
from vcli.runtime.process.fork_client import starter_of
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup


def be_owner(context: ChildContext) -> None:
    """Own a server; a core of it, with a link, has two workers forked. Tells all pids."""
    server = ForkServer.start(preload=())
    context.report_state("device", None, f"server={server.pid}")
    is_complete = threading.Event()

    def on_message(message: ChildMessage) -> None:
        if isinstance(message, ChildState) and message.state == "groups":
            for index, pid in enumerate(message.detail.split(",")):
                context.report_state("device", None, f"worker{index}={pid}")
            is_complete.set()

    def on_failure(report: FailureReport) -> None:
        lives = Path(f"/proc/{server.pid}/status").exists()
        told = f"core {report.pid} exit {report.exit_code}, server lives {lives}"
        context.report_state("weights", None, told)

    group = ChildGroup(on_message, on_failure)
    with server.new_link() as link:
        core = ChildSpec(
            target="tests.support.fork_owners:be_core",
            arguments=(),
            title="Core",
            pass_fds=(link.fileno(),),
            fork_server_fd=link.fileno(),
            log_level="CRITICAL",
        )
        group.start([core], starter=server.starter)
    context.report_state("device", None, f"core={group.pids[0]}")
    group.wait_ready(30)
    is_complete.wait(30)
    context.report_state("device", None, "all=0")
    time.sleep(60)


def be_core(context: ChildContext) -> None:
    """Have two workers forked; ready when they are."""
    group = ChildGroup(lambda message: None, lambda report: None)
    specs = [spec("wait", title="W0"), spec("wait", title="W1")]
    group.start(specs, starter=starter_of(context))
    group.wait_ready(30)
    context.report_state("groups", None, ",".join(str(pid) for pid in group.pids))
    context.ready(os.getpid())
    time.sleep(60)


def be_owner_of_hung_server(context: ChildContext) -> None:
    """Own a server that hangs in C code while it imports."""
    server = ForkServer.start(preload=("hung_preload",))
    while f"{server.pid}" and "vcli::ForkServer" not in _command(server.pid):
        time.sleep(0.01)
    context.report_state("device", None, f"server={server.pid}")
    context.report_state("device", None, "all=0")
    time.sleep(60)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
