"""From what was named to a running server."""

from dataclasses import asdict, dataclass

from vcli.cli.build import check_range
from vcli.cli.engine_setup import EngineSetup
from vcli.cli.node_session import NodeSession
from vcli.cli.views.devices import device_lines
from vcli.cli.views.layout import layout_view, memory_lines
from vcli.cli.views.memory import planned_lines
from vcli.cli.views.startup import StartupView
from vcli.topology import ExitStatus, plan_to_json
from vcli.topology.names import API_SERVER


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSession(EngineSetup):
    """One `vcli serve`."""

    nodes: NodeSession
    has_timeline: bool = False

    def show_plan(self, model: str | None, *, revision: str | None, port: int) -> int:
        """Print what would be started (`--dry-run`)."""
        check_range("--port", port)
        config = self.prepare(model, self.observe(), revision=revision)
        if self.output.json_mode:
            document = plan_to_json(config.plan)
            document["memory_plan"] = [asdict(item) for item in config.memory_plan]
            self.output.document(document.pop("schema"), document)
        else:
            width = self.output.width
            memory = (
                *memory_lines(config.plan),
                *planned_lines(config.memory_plan, width=width),
                *device_lines(config.plan),
            )
            self.output.result(layout_view(config.plan, width=width, costs=(memory,)))
        return int(ExitStatus.OK)

    def run(self, model: str | None, *, revision: str | None, host: str, port: int) -> int:
        """Serve until a signal or a failure; blocks. Returns the exit status.

        Raises:
            VcliError: before anything was started: what was named or typed is wrong.
        """
        from vcli.runtime.process.live_page import LivePage
        from vcli.runtime.server.listen import bind_listener, url_of

        is_follower = self.parallel.node_rank > 0
        listener = None if is_follower else bind_listener(host, port)
        fork_server = None
        page = LivePage()
        try:
            page.tell(title=API_SERVER, url="" if listener is None else url_of(listener))
            process = self.observe()
            fork_server = self.start_fork_server(process)
            config = self.prepare(model, process, revision=revision)
            page.tell(model=config.model.served_name, node_rank=self.parallel.node_rank)
            self.print_plan(config)
            view = StartupView(
                self.output, config.plan, config.model.served_name, has_timeline=self.has_timeline
            )
            if self.parallel.nnodes > 1 or listener is None:
                return int(self.nodes.run(config, listener, view=view, fork_server=fork_server))
            from vcli.runtime.engine.stand_in_tokenizer import tokenizer_of
            from vcli.runtime.launch.serve import serve_until_stopped

            # What is wrong with its files is said before any process of the engine is there.
            tokenizer = tokenizer_of(config.model)
            return int(
                serve_until_stopped(
                    config,
                    listener,
                    view=view,
                    environ=self.environment.environ,
                    tokenizer=tokenizer,
                    fork_server=fork_server,
                )
            )
        except KeyboardInterrupt:
            self.output.note("stopping: SIGINT before the engine was started")
            raise
        finally:
            if listener is not None:
                listener.close()
            if fork_server is not None:
                fork_server.close()
            page.close()
