"""From what was named to a configuration that can be started: resolve, check, plan, print."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vcli.cli.build import ModelSettings, build_engine_config, resolve_device
from vcli.cli.cache_fit import cache_notes
from vcli.cli.device_ids import OwnDevices, own_devices, refuse_hidden_devices
from vcli.cli.doctor_facts import observe_host
from vcli.cli.environment import Environment
from vcli.cli.output import Output
from vcli.cli.preflight import run_preflight
from vcli.cli.views.decisions import decision_lines
from vcli.cli.views.devices import device_lines
from vcli.cli.views.layout import headline
from vcli.cli.views.memory import planned_lines
from vcli.diagnostics import collect_host_facts
from vcli.runtime.checkpoint.folder import check_weights
from vcli.runtime.checkpoint.resolve import resolve_model
from vcli.runtime.config import EngineConfig
from vcli.topology import ConfigError, ParallelConfig, ProcessFacts, decide_start_method

if TYPE_CHECKING:
    from vcli.runtime.process.fork_owner import ForkServer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What every command that starts an engine does first."""

    environment: Environment
    output: Output
    settings: ModelSettings
    parallel: ParallelConfig
    has_preflight: bool

    def observe(self) -> ProcessFacts:
        """The facts of this process, before it does anything that changes them."""
        from vcli.runtime.process.facts import process_facts

        return process_facts(
            self.environment.environ,
            numa_bind=self.parallel.numa_bind,
            wants_fork=self.parallel.start_method == "fork",
        )

    def start_fork_server(self, process: ProcessFacts) -> "ForkServer | None":
        """Start it first of all: it imports torch while the model is resolved and checked."""
        method = decide_start_method(process, self.parallel.start_method).value
        if method == "spawn":
            return None
        from vcli.runtime.process.fork_owner import ForkServer

        return ForkServer.start(method, log_level=self.settings.log_level)

    def prepare(
        self,
        model: str | None,
        process: ProcessFacts,
        *,
        revision: str | None,
        needs_tokenizer: bool = True,
    ) -> EngineConfig:
        """The whole configuration, after every check that needs no process.

        Raises:
            ConfigError: what was named or typed is wrong.
            UnfitError: this machine cannot do it, or a download failed.
        """
        reads_weights = self.settings.load_format == "safetensors"
        resolved = resolve_model(
            model,
            environ=self.environment.environ,
            report=self.output.note,
            revision=revision,
            needs_weights=reads_weights,
            needs_tokenizer=needs_tokenizer and reads_weights,
        )
        if self.has_preflight and reads_weights:
            check_weights(resolved.path, resolved.spec)
        devices = self._own_devices()
        host = devices.host
        config = build_engine_config(
            self.settings,
            self.parallel,
            resolved.spec,
            path=resolved.path,
            name=resolved.name,
            host=host,
            process=process,
            visible_devices=devices.variable,
        )
        for line in cache_notes(config, self.settings.kv_cache_memory):
            self.output.note(line)
        if self.has_preflight:
            run_preflight(
                config.plan,
                host,
                environ=devices.compose(self.environment.environ),
                note=self.output.note,
                process=process,
            )
        return config

    def print_plan(self, config: EngineConfig) -> None:
        """Say what will be started, and why so."""
        plan = config.plan
        note = self.output.note
        note(f"model  {config.model.served_name} ({config.model.path}), {config.model.dtype}")
        note(headline(plan))
        for line in device_lines(plan):
            note(line)
        for line in planned_lines(config.memory_plan, width=self.output.note_width):
            note(line)
        for line in decision_lines(plan, width=self.output.note_width):
            note(line)
        for warning in plan.warnings:
            note(f"! {warning.message} [{warning.id}]")

    def _own_devices(self) -> OwnDevices:
        """This machine as it may be used; its GPUs only where they will be."""
        typed, environ = self.settings.device_ids, self.environment.environ
        if resolve_device(self.settings.device) == "cpu":
            if typed is not None:
                raise ConfigError(
                    f"--device-ids {typed}: this machine shows no NVIDIA GPU",
                    hint="leave out --device-ids to serve on the CPU",
                )
            return OwnDevices(host=collect_host_facts(), variable=None)
        host, problem = observe_host(environ)
        if problem:
            self.output.note(f"! {problem}")
        refuse_hidden_devices(host, environ, problem=problem)
        return own_devices(host, typed, environ, parallel=self.parallel)
