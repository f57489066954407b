"""One node of a job over several nodes: node 0 serves, the others follow."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vcli.cli.durations import check_duration
from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.views.startup import StartupView
from vcli.runtime.config import EngineConfig
from vcli.topology import ExitStatus

if TYPE_CHECKING:
    from vcli.runtime.launch.node import NodeSettings
    from vcli.runtime.process.fork_owner import ForkServer

_RANK_FLAG: Final = re.compile(r"^(?:-r|--node[-_]rank)$")
_RANK_WITH_VALUE: Final = re.compile(r"^(-r=?|--node[-_]rank=)\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSession:
    """What `serve` and `launch` do on one node of several."""

    environment: Environment
    output: Output
    job_token_file: str | None
    join_timeout_s: float

    def __post_init__(self) -> None:
        check_duration("--join-timeout", self.join_timeout_s, usual_s=300)

    def run(
        self,
        config: EngineConfig,
        listener: socket.socket | None,
        *,
        view: StartupView,
        fork_server: "ForkServer | None",
    ) -> ExitStatus:
        """Serve on `listener`, or follow where there is none; blocks until the job ends.

        Raises:
            VcliError: whatever ends a job that is not in order.
        """
        settings = self._settings()
        if not settings.key.is_secret:
            self.output.note(
                "! no job token: whoever reaches the master's port can join; set the same "
                "VCLI_JOB_TOKEN or --job-token-file on all nodes [NET-14]"
            )
        if listener is None:
            from vcli.runtime.launch.follower import follow_until_stopped

            return follow_until_stopped(config, settings, view=view, fork_server=fork_server)
        from vcli.runtime.launch.leader import Leader
        from vcli.runtime.launch.serve import serve_until_stopped

        leader = Leader(config, settings, view.note)
        try:
            return serve_until_stopped(
                config,
                listener,
                view=view,
                environ=self.environment.environ,
                fork_server=fork_server,
                nodes=leader,
            )
        finally:
            leader.close()

    def _settings(self) -> "NodeSettings":
        from vcli.runtime.ipc.curve import job_key
        from vcli.runtime.launch.node import NodeSettings
        from vcli.runtime.launch.token import read_job_token

        token = read_job_token(self.job_token_file, self.environment.environ)
        return NodeSettings(
            key=job_key(token),
            join_timeout_s=self.join_timeout_s,
            command_for=lambda rank: command_for_node(self.environment.argv, rank),
            interfaces=_interfaces(),
        )


def command_for_node(argv: Sequence[str], node_rank: int) -> str:
    """The line to type on another node: this one's, with that node's rank."""
    import shlex

    words: list[str] = []
    is_value = is_known = False
    for word in argv:
        with_value = _RANK_WITH_VALUE.match(word)
        if is_value:
            words.append(str(node_rank))
        elif with_value:
            words.append(f"{with_value[1]}{node_rank}")
        else:
            words.append(word)
        is_value = _RANK_FLAG.match(word) is not None
        is_known = is_known or is_value or with_value is not None
    if not is_known:
        words[1:1] = ["-r", str(node_rank)]
    return shlex.join(["vcli", *words])


def _interfaces() -> Mapping[str, str]:
    """The interface of each own address; virtual ones of containers are no way to other nodes."""
    from vcli.diagnostics.network import collect_nics

    return {address: nic.name for nic in collect_nics() for address in nic.addresses}
