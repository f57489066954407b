"""The engine core as a child of whoever starts an engine."""

from typing import TYPE_CHECKING, Final

from vcli.runtime.config import EngineConfig
from vcli.runtime.process.child import ChildSpec

if TYPE_CHECKING:
    from vcli.runtime.executor.node_messages import NodeLinks

#: Beyond the start's deadline, which the core has too: it names who is missing among its workers,
#: once it has ended them.
CORE_PATIENCE_S: Final = 5.0


def core_child(
    config: EngineConfig, core_fd: int, *, link_fd: int | None, nodes: "NodeLinks | None" = None
) -> ChildSpec:
    """The spec of a core that talks to its client by `core_fd`; its start has begun in `config`.

    `link_fd` is its link to the fork server, if there is one, `nodes` its way to other nodes.
    """
    link_fds = () if link_fd is None else (link_fd,)
    return ChildSpec(
        target="vcli.runtime.core.core_proc:core_main",
        arguments=(config, core_fd, nodes),
        title="EngineCore",
        environ=config.device_environ,
        pass_fds=(core_fd, *link_fds, *(() if nodes is None else nodes.fds())),
        fork_server_fd=link_fd,
        log_level=config.log_level,
    )
