"""From what was named to a running server: resolve, check, plan, print, start."""

from dataclasses import dataclass

from vcli.cli.build import ModelSettings, build_engine_config
from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.views.decisions import decision_lines
from vcli.cli.views.layout import headline, layout_view
from vcli.cli.views.startup import StartupView
from vcli.diagnostics import collect_host_facts
from vcli.runtime.checkpoint.folder import check_weights
from vcli.runtime.checkpoint.resolve import resolve_model
from vcli.runtime.config import EngineConfig
from vcli.topology import ExitStatus, ParallelConfig, ProcessFacts, plan_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSession:
    """One `vcli serve`."""

    environment: Environment
    output: Output
    settings: ModelSettings
    parallel: ParallelConfig
    has_preflight: bool

    def show_plan(self, model: str | None, *, revision: str | None) -> int:
        """Print what would be started (`--dry-run`)."""
        config = self._prepare(model, revision=revision)
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

        listener = bind_listener(host, port)
        try:
            config = self._prepare(model, revision=revision)
            self._print_plan(config)
            from vcli.runtime.launch.serve import serve_until_stopped

            view = StartupView(self.output, config.plan, config.model.served_name)
            return int(
                serve_until_stopped(config, listener, view=view, environ=self.environment.environ)
            )
        finally:
            listener.close()

    def _prepare(self, model: str | None, *, revision: str | None) -> EngineConfig:
        resolved = resolve_model(
            model,
            environ=self.environment.environ,
            report=self.output.note,
            revision=revision,
        )
        if self.has_preflight and self.settings.load_format == "safetensors":
            check_weights(resolved.path)
        host = collect_host_facts()
        return build_engine_config(
            self.settings,
            self.parallel,
            resolved.spec,
            path=resolved.path,
            name=resolved.name,
            host=host,
            process=ProcessFacts(platform=host.platform, is_wsl=host.is_wsl),
        )

    def _print_plan(self, config: EngineConfig) -> None:
        plan = config.plan
        note = self.output.note
        note(f"model  {config.model.served_name} ({config.model.path}), {config.model.dtype}")
        note(headline(plan))
        for line in decision_lines(plan, width=self.output.width):
            note(line)
        for warning in plan.warnings:
            note(f"! {warning.message} [{warning.id}]")
