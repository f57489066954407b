"""One rank: the phases of its start, in order, and what the executor calls on it afterwards.

    init_device -> load_model -> determine_available_memory -> initialize_from_config
    -> compile_or_warm_up_model -> execute_model ...

Every public method may be called by RPC, and is called on all ranks together.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from vcli.runtime.config import EngineConfig
from vcli.runtime.distributed.exchange import broadcast_bytes, gather_bytes
from vcli.runtime.distributed.group import GroupHandle
from vcli.runtime.distributed.parallel_state import (
    ParallelContext,
    build_parallel_context,
    build_world_group,
    comm_backend,
    single_rank_context,
)
from vcli.runtime.distributed.rendezvous import RendezvousTarget, join_world
from vcli.runtime.distributed.selection import close_communicators, prepare_groups
from vcli.runtime.layers.linear import can_pack
from vcli.runtime.log import get_logger
from vcli.runtime.messages import (
    GroupReport,
    KVCacheConfig,
    MemoryReport,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vcli.runtime.models.decoder import CausalLM
from vcli.runtime.models.loader import init_dummy_weights, load_weights
from vcli.runtime.models.registry import build_model
from vcli.runtime.worker.device import seed_generators, take_device
from vcli.runtime.worker.extension import extended_class
from vcli.runtime.worker.memory_ledger import MemoryLedger
from vcli.runtime.worker.model_runner import ModelRunner
from vcli.runtime.worker.prefetch import start_prefetch
from vcli.runtime.worker.profile import Profile
from vcli.runtime.worker.progress import ProgressLine
from vcli.runtime.worker.replies import PendingResult
from vcli.runtime.worker.runner_choice import make_runner
from vcli.runtime.worker.warm_up import profile_step, warm_up, warm_up_batches
from vcli.topology.errors import ConfigError, UnfitError, VcliError
from vcli.topology.names import TITLE_PREFIX

logger = get_logger(__name__)

ReportState = Callable[[str, float | None, str], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PhaseError(VcliError):
    """A method was called before the phase that it needs: a bug of ours (exit 7)."""


class Worker:
    """The rank `rank` of a replica. With a worker extension, its methods are the worker's too."""

    def __new__(cls, config: EngineConfig, rank: int, **_: object) -> "Worker":
        """An instance of this class, or of a subclass that has the extension's methods."""
        if config.worker_extension_cls is None:
            return super().__new__(cls)
        return object.__new__(extended_class(cls, config.worker_extension_cls))

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        *,
        rendezvous: RendezvousTarget | None,
        report: ReportState,
    ) -> None:
        self.config = config
        self.rank = rank
        self.plan = config.plan.rank_plan(rank)
        self.device = torch.device("cpu")
        self._dtype = _DTYPES[config.model.dtype]
        self._rendezvous = rendezvous
        self._report = report
        self._context: ParallelContext | None = None
        self._runner: ModelRunner | None = None
        self._group_reports: list[GroupReport] = []
        self._memory = MemoryLedger(config, self.plan)
        self._trace: ProgressLine | None = None
        self._world: GroupHandle | None = None
        self._profile = Profile()

    def trace_collectives(self, line: ProgressLine) -> None:
        """Note each collective of this rank in `line`; called once, before `init_device`."""
        self._trace = line

    def bind_thread(self) -> None:
        """Use this worker's device in the calling thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def init_device(self) -> None:
        """Take the device that the plan names, join the world, make and verify the groups."""
        start_prefetch(self.config, self.plan)
        self.device = take_device(self.config, self.plan, self._dtype)
        self._report("device", None, str(self.device))
        plan = self.config.plan
        if plan.torch_world > 1:
            self._join()
            self._context = build_parallel_context(
                plan,
                self.plan.global_rank,
                timeout_s=self.config.deadlines.execute_model_s,
                trace=self._trace,
            )
        else:
            self._report("joined", None, "alone")
            self._context = single_rank_context()
        if self.config.launched is not None:
            self._world = build_world_group(
                plan,
                self.plan.global_rank,
                timeout_s=self.config.deadlines.execute_model_s,
            )
        self._context, self._group_reports = prepare_groups(
            self._context,
            self.device,
            ways=plan.all_reduce.value,
            dtype=self._dtype,
            row_size=self.config.model.spec.hidden_size,
        )
        self._refuse_wrong_sums()
        self._report("groups", None, "")
        seed_generators(self.config.model.seed)
        self._memory.begin(self.device, self._dtype)

    def load_model(self) -> None:
        """Build this rank's part of the model on its device and read its weights."""
        started = time.monotonic()
        model = self._build_model()
        self._memory.note_model(model)
        self._fill(model, self.config.model.path)
        self._runner = make_runner(
            self.config,
            model=model,
            context=self._need_context(),
            is_output=self.plan.is_output,
        )
        self._report("weights", 1.0, "")
        logger.info("weights loaded: %.2f s", time.monotonic() - started)

    def determine_available_memory(self) -> int:
        """Bytes that the KV cache of this rank may take.

        Raises:
            UnfitError: nothing is left for it.
        """
        runner = self._need_runner()
        num_bytes, how = self._memory.kv_cache_bytes(lambda: profile_step(runner, self.config))
        self._report("memory", None, f"{num_bytes / 2**30:.2f} GiB for KV ({how})")
        return num_bytes

    def kv_bytes_per_block(self) -> int:
        """Bytes that one KV block takes on this rank."""
        return self._need_runner().kv_bytes_per_block()

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache; all requests known before are forgotten."""
        runner = self._need_runner()
        runner.initialize_kv_cache(config)
        self._memory.note_kv_cache(config, runner.kv_bytes_per_block())
        self._report("kv", None, f"{config.num_blocks} blocks of {config.block_size} tokens")

    def compile_or_warm_up_model(self) -> None:
        """Run dummy steps, so that the first request finds everything allocated and chosen."""
        started = time.monotonic()
        runner = self._need_runner()
        num_tokens = warm_up(runner, self.config, self.device)
        seconds = time.monotonic() - started
        self._report("warm-up", None, f"{num_tokens} tokens")
        logger.info("warmed up: %.2f s", seconds)
        num_sizes = self._memory.capture(
            lambda: runner.capture_graphs(lambda done: self._report("graphs", done, ""))
        )
        if num_sizes:
            seconds = time.monotonic() - started - seconds
            logger.info("graphs for %d sizes of steps: %.2f s", num_sizes, seconds)
        else:
            warm_up_batches(runner, self.config, self.device)

    def execute_model(self, output: SchedulerOutput) -> ModelRunnerOutput | PendingResult | None:
        """Run one step; None on ranks that are not the output rank, and with defer_sampling.

        On a GPU it returns when the step is launched; the `PendingResult` waits for its end.
        """
        return self._need_runner().execute(output)

    def sample_tokens(
        self, grammar: object | None = None
    ) -> ModelRunnerOutput | PendingResult | None:
        """Sample the step that `execute_model` deferred; None where this isn't the output rank."""
        return self._need_runner().sample_deferred(grammar)

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: level 1 frees the KV cache and moves weights off a GPU.

        For when nothing runs. All requests and everything in the KV cache is forgotten, so whoever
        schedules forgets its prefixes too (`reset_prefix_cache`).
        """
        if level != 1:
            raise ConfigError(f"sleep level {level} is unknown", hint="level 1")
        self._need_runner().sleep()
        logger.info("asleep")

    def wake_up(self) -> None:
        """Undo `sleep`: the weights are back, the KV cache is as large as before, and empty."""
        self._need_runner().wake_up()
        logger.info("awake")

    def reload_weights(self, folder: str | None = None) -> None:
        """Read the weights again, from another folder of the same model if one is given.

        For when nothing runs. What the KV cache holds belongs to the old weights: whoever
        schedules forgets its prefixes (`reset_prefix_cache`).

        Raises:
            WeightLoadError: the old weights stay, unless a file breaks off in the middle.
        """
        runner = self._need_runner()
        path = self.config.model.path if folder is None else Path(folder)
        if can_pack(self._dtype, self.device):
            # Packed weights can't be written again.
            model = self._build_model()
            self._fill(model, path)
            runner.replace_model(model)
        else:
            self._fill(runner.model, path)
        self._report("weights", 1.0, "reloaded")

    def start_profile(self, folder: str) -> None:
        """Record what this rank does, on the CPU and its device, until `stop_profile`."""
        self._profile.start(Path(folder), self.plan.title.removeprefix(TITLE_PREFIX), self.device)

    def stop_profile(self) -> str:
        """End the recording; gives the path of this rank's trace (for chrome://tracing)."""
        return str(self._profile.stop())

    def execute_dummy_batch(self) -> None:
        """Take part in a step without a request of one's own; no request's KV cache is touched."""
        self._need_runner().dummy_step([1])

    def check_health(self) -> None:
        """Return when the device answers; raises its error when it does not work any more."""
        if not bool(torch.ones((), device=self.device) == 1):
            raise VcliError(f"{self.device} computes wrong results")

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, in rank order; only where a launcher started the ranks."""
        return gather_bytes(data, self._need_world())

    def hand_out(self, data: bytes, src_rank: int) -> bytes:
        """The bytes of one rank, on all of them; only where a launcher started the ranks."""
        return broadcast_bytes(data, self._need_world(), src_rank_in_group=src_rank)

    def group_reports(self) -> list[GroupReport]:
        """The groups of this rank with what their verification found at the start."""
        return self._group_reports

    def memory_report(self) -> MemoryReport:
        """What the memory of this rank went to, beside what was planned."""
        return self._memory.report()

    def shutdown(self) -> None:
        """Give memory and groups back; may be called twice, and in any phase."""
        if self._runner is not None:
            self._runner.release()
            self._runner = None
        if self.device.type == "cuda":
            # Nothing may still be using the communicators when they are destroyed.
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        if self._context is not None:
            context, self._context = self._context, None
            close_communicators(context)
            if context.world_size > 1:
                torch.distributed.destroy_process_group()

    def _join(self) -> None:
        if self._rendezvous is None:
            raise PhaseError(
                f"rank {self.rank} of {self.config.plan.torch_world} has no rendezvous"
            )
        join_world(
            comm_backend(self.device.type),
            self.plan.global_rank,
            self.config.plan.torch_world,
            self._rendezvous,
            timeout_s=self.config.deadlines.start_s,
        )
        self._report("joined", None, f"{self.config.plan.torch_world} ranks")

    def _refuse_wrong_sums(self) -> None:
        for report in self._group_reports:
            if not report.verified:
                raise UnfitError(
                    f"rank {self.rank}: the {report.kind} group {report.ranks} sums wrongly "
                    f"({report.all_reduce} over {report.transport}): {report.note}",
                    hint="vcli doctor checks the links between the devices",
                )

    def _build_model(self) -> CausalLM:
        model_config, attention = self.config.model, self.config.plan.attention
        self._report("weights", 0.0, "")
        return build_model(
            model_config.spec,
            self._need_context(),
            dtype=self._dtype,
            device=self.device,
            layer_span=self.plan.layer_span or (0, model_config.spec.num_layers),
            attention=attention.value if attention else "torch",
        )

    def _fill(self, model: CausalLM, folder: Path) -> None:
        if self.config.model.load_format == "dummy":
            init_dummy_weights(model, self.config.model.seed)
            return
        load_weights(model, folder, report=lambda fraction: self._report("weights", fraction, ""))

    def _need_world(self) -> GroupHandle:
        if self._world is None:
            raise PhaseError("there is no group of all ranks, or init_device did not come yet")
        return self._world

    def _need_context(self) -> ParallelContext:
        if self._context is None:
            raise PhaseError("load_model came before init_device")
        return self._context

    def _need_runner(self) -> ModelRunner:
        if self._runner is None:
            raise PhaseError("the model was not loaded, or the worker was shut down")
        return self._runner
