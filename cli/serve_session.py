"""From what was named to a running server: resolve, check, plan, print, start."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vcli.cli.build import ModelSettings, build_engine_config, check_range, resolve_device
from vcli.cli.cache_fit import cache_notes
from vcli.cli.doctor_facts import observe_host
from vcli.cli.environment import Environment
from vcli.cli.node_session import NodeSession
from vcli.cli.output import Output
from vcli.cli.preflight import run_preflight
from vcli.cli.views.decisions import decision_lines
from vcli.cli.views.layout import headline, layout_view
from vcli.cli.views.startup import StartupView
from vcli.diagnostics import collect_host_facts
from vcli.runtime.checkpoint.folder import check_weights
from vcli.runtime.checkpoint.resolve import resolve_model
from vcli.runtime.config import EngineConfig
from vcli.topology import (
    ExitStatus,
    HostFacts,
    ParallelConfig,
    ProcessFacts,
    decide_start_method,
    plan_to_json,
)

if TYPE_CHECKING:
    from vcli.runtime.process.fork_owner import ForkServer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSession:
    """One `vcli serve`."""

    environment: Environment
    output: Output
    settings: ModelSettings
    parallel: ParallelConfig
    has_preflight: bool
    nodes: NodeSession
    has_timeline: bool = False

    def show_plan(self, model: str | None, *, revision: str | None, port: int) -> int:
        """Print what would be started (`--dry-run`)."""
        check_range("--port", port)
        config = self._prepare(model, self._observe(), revision=revision)
        if self.output.json_mode:
            document = plan_to_json(config.plan)
            self.output.document(document.pop("schema"), document)
        else:
            self.output.result(layout_view(config.plan, width=self.output.width))
        return int(ExitStatus.OK)

    def run(self, model: str | None, *, revision: str | None, host: str, port: int) -> int:
        """Serve until a signal or a failure; blocks. Returns the exit status.

        Raises:
            VcliError: before anything was started: what was named or typed is wrong.
        """
        from vcli.runtime.server.listen import bind_listener

        is_follower = self.parallel.node_rank > 0
        listener = None if is_follower else bind_listener(host, port)
        fork_server = None
        try:
            process = self._observe()
            fork_server = self._start_fork_server(process)
            config = self._prepare(model, process, revision=revision)
            self._print_plan(config)
            view = StartupView(
                self.output, config.plan, config.model.served_name, has_timeline=self.has_timeline
            )
            if self.parallel.nnodes > 1 or listener is None:
                return int(self.nodes.run(config, listener, view=view, fork_server=fork_server))
            from vcli.runtime.engine.tokenizer import Tokenizer
            from vcli.runtime.launch.serve import serve_until_stopped

            # What is wrong with its files is said before any process of the engine is there.
            tokenizer = Tokenizer.from_folder(config.model.path)
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
        finally:
            if listener is not None:
                listener.close()
            if fork_server is not None:
                fork_server.close()

    def _observe(self) -> ProcessFacts:
        """The facts of this process, before it does anything that changes them."""
        from vcli.runtime.process.facts import process_facts

        return process_facts(
            self.environment.environ,
            numa_bind=self.parallel.numa_bind,
            wants_fork=self.parallel.start_method == "fork",
        )

    def _observe_host(self) -> HostFacts:
        """The facts of this machine; its GPUs only where they will be used."""
        if resolve_device(self.settings.device) == "cpu":
            return collect_host_facts()
        host, problem = observe_host(self.environment.environ)
        if problem:
            self.output.note(f"! {problem}")
        return host

    def _start_fork_server(self, process: ProcessFacts) -> "ForkServer | None":
        """Start it first of all: it imports torch while the model is resolved and checked."""
        method = decide_start_method(process, self.parallel.start_method).value
        if method == "spawn":
            return None
        from vcli.runtime.process.fork_owner import ForkServer

        return ForkServer.start(method, log_level=self.settings.log_level)

    def _prepare(
        self, model: str | None, process: ProcessFacts, *, revision: str | None
    ) -> EngineConfig:
        resolved = resolve_model(
            model,
            environ=self.environment.environ,
            report=self.output.note,
            revision=revision,
        )
        if self.has_preflight and self.settings.load_format == "safetensors":
            check_weights(resolved.path, resolved.spec)
        host = self._observe_host()
        config = build_engine_config(
            self.settings,
            self.parallel,
            resolved.spec,
            path=resolved.path,
            name=resolved.name,
            host=host,
            process=process,
        )
        for line in cache_notes(config):
            self.output.note(line)
        if self.has_preflight:
            run_preflight(
                config.plan,
                host,
                environ=self.environment.environ,
                note=self.output.note,
                process=process,
            )
        return config

    def _print_plan(self, config: EngineConfig) -> None:
        plan = config.plan
        note = self.output.note
        note(f"model  {config.model.served_name} ({config.model.path}), {config.model.dtype}")
        note(headline(plan))
        for line in decision_lines(plan, width=self.output.width):
            note(line)
        for warning in plan.warnings:
            note(f"! {warning.message} [{warning.id}]")
