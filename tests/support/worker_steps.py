"""Configurations for tiny workers, and a small scheduler that drives one or several of them."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from vcli.runtime.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from vcli.runtime.messages import (
    KVCacheConfig,
    NewRequestData,
    RunningRequests,
    SchedulerOutput,
)
from vcli.runtime.sampling_params import SamplingParams
from vcli.topology.config import ParallelConfig
from vcli.topology.model_spec import model_spec_from_config
from vcli.topology.planner import plan_topology

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)


def engine_config(
    folder: Path,
    *,
    parallel: ParallelConfig | None = None,
    dtype="float32",
    device_type="cpu",
    **overrides,
) -> EngineConfig:
    """The configuration of a small engine for the checkpoint in `folder`."""
    spec = model_spec_from_config(
        json.loads((folder / "config.json").read_text()), source=str(folder)
    )
    parallel = parallel or ParallelConfig()
    load_format = overrides.pop("load_format", "safetensors")
    cache = overrides.pop("cache", None)
    return EngineConfig(
        model=ModelConfig(
            path=folder,
            served_name="tiny",
            spec=spec,
            dtype=dtype,
            max_model_len=256,
            load_format=load_format,
        ),
        cache=cache or CacheConfig(block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        parallel=parallel,
        plan=plan_topology(parallel, model=spec, dtype=dtype, device_type=device_type),
        device_type=device_type,
        **overrides,
    )


@dataclass
class Sequence:
    """One request as the small scheduler sees it."""

    number: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    max_tokens: int
    eos: tuple[int, ...] = ()
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    unsent: int = -1
    known: bool = False
    logprobs: list = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_finished(self) -> bool:
        ended = bool(self.generated) and self.generated[-1] in self.eos
        return ended or len(self.generated) >= self.max_tokens


class StepDriver:
    """Schedules every unfinished request in each step, at most `chunk` tokens of each.

    `execute` is called with each SchedulerOutput and gives the ModelRunnerOutput.
    """

    def __init__(self, execute, *, num_blocks=256, chunk=10_000, defer=False) -> None:
        self._execute = execute
        self._chunk = chunk
        self._defer = defer
        # Blocks are scattered, so that a block id taken for a position shows.
        self._free = [(block * 37) % num_blocks for block in range(num_blocks)][::-1]
        self._removed: list[int] = []
        self._step = 0
        self._next_number = 100
        self.running: list[Sequence] = []

    def add(self, prompt, sampling=GREEDY, *, max_tokens=12, eos=(), cached_from=None) -> Sequence:
        """A request; with `cached_from`, the full blocks of that one's prompt are shared."""
        sequence = Sequence(self._next_number, list(prompt), len(prompt), sampling, max_tokens, eos)
        self._next_number += 1
        if cached_from is not None:
            same = 0
            while (
                same < min(len(prompt) - 1, cached_from.computed)
                and prompt[same] == cached_from.tokens[same]
            ):
                same += 1
            shared = same // BLOCK_SIZE
            assert shared, "the prompts share no block"
            sequence.blocks = cached_from.blocks[:shared]
            sequence.computed = shared * BLOCK_SIZE
        self.running.append(sequence)
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """The workers forget the request; it starts again with all its tokens and new blocks."""
        self._removed.append(sequence.number)
        sequence.blocks, sequence.computed = [], 0
        sequence.unsent, sequence.known = -1, False

    def step(self) -> None:
        """One step over everything that is unfinished."""
        active = [sequence for sequence in self.running if not sequence.is_finished]
        for sequence in [sequence for sequence in self.running if sequence.is_finished]:
            self.running.remove(sequence)
            self._removed.append(sequence.number)
        new, running, counts = [], RunningRequests(), []
        ordered = sorted(active, key=lambda sequence: sequence.known)
        for sequence in ordered:
            count = min(self._chunk, len(sequence.tokens) - sequence.computed)
            added = self._cover(sequence, sequence.computed + count)
            counts.append(count)
            if not sequence.known:
                new.append(self._new_data(sequence))
            else:
                running.numbers.append(sequence.number)
                running.token_ids.append(sequence.unsent)
                running.num_computed_tokens.append(sequence.computed)
                running.new_block_ids.append(added)
            sequence.unsent, sequence.known = -1, True
        output = SchedulerOutput(
            step=self._step,
            new=new,
            running=running,
            num_scheduled_tokens=counts,
            removed=self._removed,
            defer_sampling=self._defer,
        )
        self._step += 1
        self._removed = []
        result = self._execute(output)
        assert result.step == output.step
        assert result.numbers == [sequence.number for sequence in ordered]
        for index, (sequence, count) in enumerate(zip(ordered, counts, strict=True)):
            sequence.computed += count
            token_id = result.token_ids[index]
            assert (token_id >= 0) == (sequence.computed == len(sequence.tokens))
            if token_id >= 0:
                sequence.tokens.append(token_id)
                sequence.unsent = token_id
                if result.logprobs is not None:
                    sequence.logprobs.append(result.logprobs[index])

    def run(self) -> None:
        """Steps until everything is finished, and one that tells the worker so."""
        while any(not sequence.is_finished for sequence in self.running):
            self.step()
        self.step()

    def _cover(self, sequence: Sequence, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // BLOCK_SIZE) - len(sequence.blocks)
        added = [self._free.pop() for _ in range(missing)]
        sequence.blocks += added
        return added

    @staticmethod
    def _new_data(sequence: Sequence) -> NewRequestData:
        return NewRequestData(
            number=sequence.number,
            token_ids=list(sequence.tokens),
            num_prompt_tokens=sequence.num_prompt,
            num_computed_tokens=sequence.computed,
            block_ids=list(sequence.blocks),
            sampling=sequence.sampling,
            eos_token_ids=sequence.eos,
        )


def kv_config(num_blocks=256) -> KVCacheConfig:
    return KVCacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)


def generate(executor) -> list[int]:
    """Eight tokens behind a prompt of four, greedily."""
    driver = StepDriver(executor.execute_model)
    sequence = driver.add([5, 6, 7, 8], max_tokens=8)
    driver.run()
    return sequence.generated


def kv_bytes(worker) -> int:
    """Bytes of a worker's KV cache; to be called by RPC."""
    return sum(layer.kv_cache.nbytes for layer in worker._runner._layers)
