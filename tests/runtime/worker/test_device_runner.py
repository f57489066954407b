"""The runner whose batch lives on its device, here a CPU: same tokens, while steps overlap."""

from collections import deque
from functools import partial

import pytest
import torch

from tests.runtime.worker.test_model_runner import contexts_of, generate, single_rank_tokens
from tests.support.model_steps import run_ranks
from tests.support.tiny_model import tiny_checkpoint
from tests.support.worker_steps import BLOCK_SIZE, GREEDY, engine_config, kv_config
from vcli.runtime.config import CacheConfig, SchedulerConfig
from vcli.runtime.core.scheduler import Scheduler
from vcli.runtime.distributed.parallel_state import single_rank_context
from vcli.runtime.messages import EngineRequest
from vcli.runtime.models.loader import load_weights
from vcli.runtime.models.registry import build_model
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.device_batch import DeviceBatch, decode_columns, fits_decode_columns
from vcli.runtime.worker.device_runner import DeviceModelRunner
from vcli.runtime.worker.input_batch import InputBatch
from vcli.runtime.worker.pending_tokens import PendingTokens
from vcli.runtime.worker.sampler import LogitsError
from vcli.runtime.worker.step_ops import DecodeInputs, TorchStepOps
from vcli.topology.config import ParallelConfig

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [300], [17, 18, 19, 20] * 6, [40] * 9]
SPECIAL = SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=12)


def device_runner(config, context, rank):
    plan = config.plan.rank_plan(rank)
    model = build_model(
        config.model.spec, context, dtype=torch.float32, device="cpu", layer_span=plan.layer_span
    )
    load_weights(model, config.model.path)
    runner = DeviceModelRunner(
        config, model=model, context=context, is_output=plan.is_output, ops=TorchStepOps()
    )
    runner.initialize_kv_cache(kv_config())
    return runner


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_layouts_generate_what_one_rank_does(tp, pp, defer):
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    config = engine_config(tiny_checkpoint(), parallel=parallel)
    runners = [
        device_runner(config, context, rank) for rank, context in enumerate(contexts_of(tp, pp))
    ]

    def on_all_ranks(call):
        results = run_ranks([partial(call, runner) for runner in runners])
        output = results.pop(config.plan.output_rank)
        assert results == [None] * len(results)
        return output.resolve() if isinstance(output, PendingTokens) else output

    def execute(output):
        result = on_all_ranks(lambda runner: runner.execute(output))
        if defer:
            assert result is None
            result = on_all_ranks(lambda runner: runner.sample_deferred(None))
        return result

    assert generate(execute, defer=defer) == single_rank_tokens()


def overlapped(execute, *, num_in_flight, sampling, max_tokens=12):
    """Tokens of PROMPTS with `num_in_flight` steps sent before the first result is read."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=11),
        CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        kv_config(),
        256,
        keeps_samples=True,
    )
    for number, (prompt, params) in enumerate(zip(PROMPTS, sampling, strict=True)):
        scheduler.add_request(
            EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params)
        )
    tokens = {str(number): [] for number in range(len(PROMPTS))}
    in_flight = deque()
    while scheduler.has_unfinished:
        while len(in_flight) < num_in_flight and (step := scheduler.schedule()) is not None:
            in_flight.append((step, execute(step)))
        step, result = in_flight.popleft()
        if isinstance(result, PendingTokens):
            result = result.resolve()
        for output in scheduler.update_from_output(step, result):
            tokens[output.request_id] += output.new_token_ids
    return list(tokens.values())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("num_in_flight", [1, 2, 3])
def test_steps_go_on_from_tokens_that_the_host_does_not_know_yet(num_in_flight, special):
    config = engine_config(tiny_checkpoint())
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    # One row with penalties needs all earlier tokens of its request on the host.
    sampling = [greedy, SPECIAL if special else greedy, greedy, greedy]

    def run(depth):
        runner = device_runner(config, single_rank_context(), 0)
        return overlapped(runner.execute, num_in_flight=depth, sampling=sampling)

    assert run(num_in_flight) == run(1)
    assert all(len(tokens) == 12 for tokens in run(num_in_flight))


def test_random_rows_differ_from_greedy_ones_and_repeat_with_the_engine_seed():
    config = engine_config(tiny_checkpoint())
    sampling = [SamplingParams(temperature=1.0, max_tokens=12)] * len(PROMPTS)

    def run(params):
        runner = device_runner(config, single_rank_context(), 0)
        return overlapped(runner.execute, num_in_flight=2, sampling=params)

    random = run(sampling)
    assert random == run(sampling)
    assert random != run([SamplingParams(temperature=0.0, max_tokens=12)] * len(PROMPTS))


def test_damaged_logits_name_the_request_and_the_step():
    config = engine_config(tiny_checkpoint())
    runner = device_runner(config, single_rank_context(), 0)
    runner.model.norm.weight.fill_(torch.nan)
    with pytest.raises(LogitsError, match="request 0 in step 0"):
        overlapped(runner.execute, num_in_flight=2, sampling=[GREEDY] * len(PROMPTS))


def test_columns_of_a_decode_step_give_the_inputs_that_the_host_would_build():
    batch = InputBatch(max_num_seqs=4, max_model_len=64, block_size=4, has_late_samples=True)
    device = DeviceBatch(
        max_num_seqs=4, max_blocks=16, scratch_block=99, device=torch.device("cpu")
    )
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        CacheConfig(block_size=4, enable_prefix_caching=False),
        kv_config(),
        64,
        keeps_samples=True,
    )
    for number, prompt in enumerate(([1, 2, 3], [4, 5, 6, 7])):
        scheduler.add_request(
            EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=GREEDY)
        )
    first = batch.apply(scheduler.schedule())
    assert not fits_decode_columns(batch, first)
    device.apply(batch, new_blocks=batch.new_blocks)
    device.last_token[first.rows] = torch.tensor([11, 12])
    second = batch.apply(scheduler.schedule())
    assert fits_decode_columns(batch, second)
    columns = torch.zeros(5, 4, dtype=torch.int32)
    columns[0], columns[3] = device.scratch_row, -1
    decode_columns(batch, second, columns.numpy())
    inputs = DecodeInputs.empty(4, torch.device("cpu"))
    TorchStepOps().prepare_decode(columns, device.block_tables, device.last_token, 4, inputs)
    tables = batch.block_table[second.rows]
    assert inputs.input_ids.tolist() == [11, 12, 0, 0]
    assert inputs.positions.tolist() == [3, 4, 0, 0]
    assert inputs.slot_mapping.tolist() == [tables[0, 0] * 4 + 3, tables[1, 1] * 4, -1, -1]
    assert inputs.seq_lens.tolist() == [4, 5, 0, 0]
    # The second request's new block reached the device with the step.
    assert device.block_tables[second.rows[1], 1] == tables[1, 1]


def test_step_that_samples_nothing_is_no_decode_step_though_its_chunk_is_one_token():
    batch = InputBatch(max_num_seqs=1, max_model_len=64, block_size=4, has_late_samples=True)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1),
        CacheConfig(block_size=4, enable_prefix_caching=False),
        kv_config(),
        64,
        keeps_samples=True,
    )
    scheduler.add_request(
        EngineRequest(request_id="0", prompt_token_ids=[1, 2, 3], sampling=GREEDY)
    )
    fits = []
    for _ in range(3):
        step = batch.apply(scheduler.schedule())
        fits.append((fits_decode_columns(batch, step), bool(step.samples.any())))
    assert fits == [(False, False), (False, False), (True, True)]
