"""One `vcli bench offline`: start the engine, run the workloads, print what is known."""

import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vcli.cli.bench_offline_findings import OfflineFindings
from vcli.cli.engine_setup import EngineSetup
from vcli.cli.stopping import sigterm_interrupts, status_of
from vcli.cli.views.bench_offline import offline_document, offline_table
from vcli.cli.views.startup import StartupView
from vcli.runtime.bench.floors import DeviceSpeed
from vcli.runtime.bench.offline import OfflineBench
from vcli.runtime.bench.offline_engine import OfflineEngine
from vcli.runtime.bench.shapes import write_shape
from vcli.runtime.bench.stats import host_facts, process_age_s
from vcli.runtime.bench.workloads import (
    Workload,
    check_counts,
    check_name,
    equal_workload,
    fixed_workloads,
)
from vcli.runtime.config import EngineConfig
from vcli.runtime.errors import ReportedError
from vcli.runtime.log import configure_logging
from vcli.runtime.messages import MemoryReport
from vcli.topology import ConfigError, ExitStatus, VcliError

if TYPE_CHECKING:
    from vcli.runtime.process.fork_owner import ForkServer

SCHEMA = "vcli.bench-offline/1"
_MAX_REPEAT = 1000
_MAX_CALLS = 1_000_000
#: Of a device's GB/s and TFLOP/s: floors of all workloads stay finite.
_SPEEDS = (0.001, 1e6)
_DEFAULT_WORKLOAD = "all"
_DEFAULT_LENS = (512, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineAsked:
    """What was typed about the measurement; None for what was left out.

    Raises:
        ConfigError: a number out of range, or two flags that exclude each other.
    """

    model: str | None
    revision: str | None
    shape: str | None
    workload: str | None
    num_prompts: int | None
    input_len: int | None
    output_len: int | None
    repeat: int
    rpc_calls: int
    memory_bandwidth: float | None
    peak_tflops: float | None

    def __post_init__(self) -> None:
        if self.model is not None and self.shape is not None:
            raise ConfigError(
                f"MODEL {self.model} and --shape {self.shape} are two models",
                hint="leave one of them out",
            )
        self._check_workload()
        if not 1 <= self.repeat <= _MAX_REPEAT:
            raise ConfigError(
                f"--repeat {self.repeat} must be 1 to {_MAX_REPEAT}", hint="--repeat 2"
            )
        if not 0 <= self.rpc_calls <= _MAX_CALLS:
            raise ConfigError(
                f"--rpc-calls {self.rpc_calls} must be 0 to {_MAX_CALLS}", hint="--rpc-calls 1000"
            )
        for flag, value, usual in (
            ("--memory-bandwidth", self.memory_bandwidth, "4800"),
            ("--peak-tflops", self.peak_tflops, "989"),
        ):
            low, high = _SPEEDS
            if value is not None and not low <= value <= high:
                raise ConfigError(
                    f"{flag} {value:g} must be {low:g} to {high:.0f}", hint=f"{flag} {usual}"
                )

    def _check_workload(self) -> None:
        lengths = [("--input-len", self.input_len), ("--output-len", self.output_len)]
        typed = [(flag, value) for flag, value in lengths if value is not None]
        if self.num_prompts is not None:
            if self.workload is not None:
                raise ConfigError(
                    f"--workload {self.workload} and --num-prompts {self.num_prompts} are two "
                    "workloads",
                    hint="leave one of them out",
                )
            check_counts([("--num-prompts", self.num_prompts), *typed])
            return
        for flag, value in typed:
            raise ConfigError(
                f"{flag} {value} is the length of requests of --num-prompts, which is left out",
                hint=f"--num-prompts 32 {flag} {value}",
            )
        check_name(self.workload or _DEFAULT_WORKLOAD)

    def workloads(self, vocab_size: int) -> tuple[Workload, ...]:
        """The workloads, for a model of this vocabulary."""
        if self.num_prompts is None:
            return fixed_workloads(self.workload or _DEFAULT_WORKLOAD)
        input_len, output_len = _DEFAULT_LENS
        return (
            equal_workload(
                num_prompts=self.num_prompts,
                input_len=self.input_len or input_len,
                output_len=self.output_len or output_len,
                vocab_size=vocab_size,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOfflineSession:
    """One run of the command."""

    setup: EngineSetup
    asked: OfflineAsked

    def run(self) -> ExitStatus:
        """Measure and print; blocks.

        Raises:
            VcliError: before the engine was ready.
        """
        setup, asked = self.setup, self.asked
        with sigterm_interrupts():
            process = setup.observe()
            fork_server = setup.start_fork_server(process)
            try:
                with tempfile.TemporaryDirectory(prefix="vcli-bench-") as folder:
                    model = asked.model
                    if asked.shape is not None:
                        model = str(write_shape(asked.shape, Path(folder)))
                    config = setup.prepare(
                        model, process, revision=asked.revision, needs_tokenizer=False
                    )
                    return self._measure_and_print(config, fork_server)
            finally:
                if fork_server is not None:
                    fork_server.close()

    def _measure_and_print(
        self, config: EngineConfig, fork_server: "ForkServer | None"
    ) -> ExitStatus:
        output = self.setup.output
        workloads = self.asked.workloads(config.model.spec.vocab_size)
        for workload in workloads:
            workload.check_fits(
                vocab_size=config.model.spec.vocab_size, max_model_len=config.model.max_model_len
            )
        configure_logging("Bench", config.log_level)
        self.setup.print_plan(config)
        host = host_facts()
        findings = OfflineFindings(config=config)
        status = self._measure(findings, workloads, fork_server)
        if output.json_mode:
            output.document(SCHEMA, offline_document(host, findings), status)
        else:
            output.result(offline_table(host, findings, width=output.width))
        if findings.error is not None:
            # Beside the result, which has it too.
            output.note_error(findings.error)
        return status

    def _measure(
        self,
        findings: OfflineFindings,
        workloads: tuple[Workload, ...],
        fork_server: "ForkServer | None",
    ) -> ExitStatus:
        """Fill the findings; the status with which it ended."""
        config, note = findings.config, self.setup.output.note
        view = StartupView(self.setup.output, config.plan, config.model.served_name)
        try:
            with OfflineEngine(
                config, on_message=view.on_message, fork_server=fork_server
            ) as engine:
                findings.ready_s = process_age_s()
                findings.started = dict(engine.started)
                view.on_memory(msgspec.convert(engine.started["memory"], list[MemoryReport]))
                self._run(findings, workloads, OfflineBench(engine))
        except KeyboardInterrupt as interrupt:
            note("stopped: this is what is known")
            return status_of(interrupt)
        except VcliError as error:
            if isinstance(error, ReportedError):
                view.on_failure(error.report)
            if findings.ready_s is None:
                raise
            findings.error = error
            return error.exit_status
        return ExitStatus.OK

    def _run(
        self, findings: OfflineFindings, workloads: tuple[Workload, ...], bench: OfflineBench
    ) -> None:
        asked, note = self.asked, self.setup.output.note
        flops = None if asked.peak_tflops is None else asked.peak_tflops * 1e12
        given = None if asked.memory_bandwidth is None else asked.memory_bandwidth * 1e9
        findings.speed = DeviceSpeed(memory_bytes_per_s=given, flops=flops)
        with closing(bench.run_all(workloads, repeat=asked.repeat)) as running:
            for each in running:
                if findings.first_token_s is None and bench.first_token_age_s is not None:
                    findings.first_token_s = bench.first_token_age_s
                findings.workloads[each.workload.name] = each
                note(
                    f"{each.workload.name}: run {len(each.runs)} of {asked.repeat}, "
                    f"{each.runs[-1].wall_s:.3f} s"
                )
        findings.rpc_us = bench.call_us(asked.rpc_calls)
        # Before the copy, which takes memory of its own.
        findings.device = bench.device_report()
        if given is None:
            findings.speed = DeviceSpeed(memory_bytes_per_s=bench.memory_bytes_per_s(), flops=flops)
