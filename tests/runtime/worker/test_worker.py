"""A whole worker on a tiny random model in this process, against transformers' generate."""

import abc
import random
import warnings
from functools import cache

import pytest
import torch

from tests.support.tiny_model import VOCAB_SIZE, tiny_checkpoint
from tests.support.worker_steps import GREEDY, StepDriver, engine_config, kv_config
from vcli.runtime.config import CacheConfig
from vcli.runtime.messages import RunningRequests, SchedulerOutput
from vcli.runtime.sampling_params import SamplingParams
from vcli.runtime.worker.input_batch import BatchStateError
from vcli.runtime.worker.model_runner import StepOrderError
from vcli.runtime.worker.worker import PhaseError, Worker
from vcli.topology.errors import ConfigError, ExitStatus

EOS = (2,)


@cache
def reference():
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_checkpoint(), dtype=torch.float32).eval()


def generate_with_transformers(prompt, max_tokens=12):
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        output = reference().generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=list(EOS),
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def started_worker(*, num_blocks=256, **overrides):
    states = []
    worker = Worker(
        engine_config(tiny_checkpoint(), **overrides),
        0,
        rendezvous=None,
        report=lambda *state: states.append(state),
    )
    worker.init_device()
    worker.load_model()
    worker.determine_available_memory()
    worker.initialize_from_config(kv_config(num_blocks))
    worker.compile_or_warm_up_model()
    return worker, states


@pytest.fixture
def worker():
    worker, _ = started_worker()
    yield worker
    worker.shutdown()


def prompts_of(count, seed=0, longest=40):
    chooser = random.Random(seed)
    return [
        [chooser.randrange(3, VOCAB_SIZE) for _ in range(chooser.randint(1, longest))]
        for _ in range(count)
    ]


def deferred(worker):
    def execute(output):
        assert worker.execute_model(output) is None
        return worker.sample_tokens(None)

    return execute


def test_greedy_tokens_of_a_mixed_batch_equal_transformers_generate(worker):
    driver = StepDriver(worker.execute_model)
    sequences = [driver.add(prompt, eos=EOS) for prompt in prompts_of(8)]
    driver.run()
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.generated == generate_with_transformers(prompt)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_prompt_in_chunks_gives_the_same_tokens(worker, chunk):
    prompts = prompts_of(3, seed=1)
    driver = StepDriver(worker.execute_model, chunk=chunk)
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.run()
    whole = StepDriver(worker.execute_model)
    expected = [whole.add(prompt) for prompt in prompts]
    whole.run()
    assert [s.generated for s in sequences] == [s.generated for s in expected]


VARIED = [
    GREEDY,
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, top_k=20),
    SamplingParams(seed=3, top_p=0.8),
    SamplingParams(seed=4, min_p=0.05, temperature=1.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=(11,), logprobs=2),
]


def test_batch_of_different_requests_equals_one_by_one(worker):
    prompts = prompts_of(len(VARIED), seed=2)
    driver = StepDriver(worker.execute_model)
    together = []
    for prompt, sampling in zip(prompts, VARIED, strict=True):
        together.append(driver.add(prompt, sampling, eos=EOS))
        # Each joins while the earlier ones decode.
        driver.step()
    driver.run()
    for sequence, prompt, sampling in zip(together, prompts, VARIED, strict=True):
        alone = StepDriver(worker.execute_model)
        expected = alone.add(prompt, sampling, eos=EOS)
        alone.run()
        assert sequence.generated == expected.generated, sampling


def test_start_from_shared_blocks_equals_a_start_from_nothing(worker):
    prefix = prompts_of(1, seed=3)[0] + [5] * 16
    driver = StepDriver(worker.execute_model)
    first = driver.add([*prefix, 7, 8], max_tokens=3)
    driver.run()
    second = driver.add([*prefix, 9, 10, 11], cached_from=first)
    third = driver.add([*prefix[:9], 44, 45], cached_from=first)
    assert second.computed >= 16
    assert third.computed == 8
    driver.run()
    for sequence in (second, third):
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.generated == generate_with_transformers(prompt)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=77)])
def test_preempted_request_goes_on_as_if_nothing_had_happened(worker, sampling):
    prompt = prompts_of(1, seed=4)[0]
    calm = StepDriver(worker.execute_model)
    expected = calm.add(prompt, sampling)
    calm.run()
    driver = StepDriver(worker.execute_model)
    sequence = driver.add(prompt, sampling)
    for _ in range(5):
        driver.step()
    driver.preempt(sequence)
    driver.run()
    assert sequence.generated == expected.generated


def test_deferred_sampling_gives_what_execute_model_would_have(worker):
    results = []
    for execute, defer in ((worker.execute_model, False), (deferred(worker), True)):
        driver = StepDriver(execute, defer=defer, chunk=9)
        sequences = [
            driver.add(prompt, sampling, eos=EOS)
            for prompt, sampling in zip(prompts_of(8, seed=5), VARIED, strict=True)
        ]
        driver.run()
        results.append([(sequence.generated, sequence.logprobs) for sequence in sequences])
    assert results[0] == results[1]


def test_dummy_batches_between_steps_touch_no_request(worker):
    def execute(output):
        worker.execute_dummy_batch()
        return worker.execute_model(output)

    driver = StepDriver(execute)
    sequence = driver.add(prompts_of(1, seed=6)[0])
    driver.run()
    prompt = sequence.tokens[: sequence.num_prompt]
    assert sequence.generated == generate_with_transformers(prompt)


def test_logprobs_equal_those_of_transformers(worker):
    prompt = prompts_of(1, seed=7)[0]
    driver = StepDriver(worker.execute_model)
    sequence = driver.add(
        prompt, SamplingParams(temperature=0.0, logprobs=3, repetition_penalty=1.2), max_tokens=4
    )
    driver.run()
    with torch.inference_mode():
        logits = reference()(torch.tensor([sequence.tokens])).logits[0]
    log_probs = logits.float().log_softmax(-1)
    for offset, report in enumerate(sequence.logprobs):
        row = log_probs[len(prompt) - 1 + offset]
        assert report.token_id == sequence.generated[offset]
        assert report.logprob == pytest.approx(row[report.token_id].item(), abs=1e-3)
        assert report.top_token_ids == row.topk(3).indices.tolist()


def test_step_with_nothing_scheduled_gives_an_empty_result(worker):
    result = worker.execute_model(
        SchedulerOutput(step=3, new=[], running=RunningRequests(), num_scheduled_tokens=[])
    )
    assert (result.step, result.numbers, result.token_ids) == (3, [], [])


def test_unknown_request_is_a_bug_that_names_it(worker):
    running = RunningRequests(
        numbers=[55], token_ids=[3], num_computed_tokens=[4], new_block_ids=[[]]
    )
    output = SchedulerOutput(step=8, new=[], running=running, num_scheduled_tokens=[1])
    with pytest.raises(BatchStateError, match="request 55") as caught:
        worker.execute_model(output)
    assert caught.value.exit_status is ExitStatus.BUG


def test_next_step_before_a_deferred_one_was_sampled_is_refused(worker):
    nothing = SchedulerOutput(
        step=1, new=[], running=RunningRequests(), num_scheduled_tokens=[], defer_sampling=True
    )
    assert worker.execute_model(nothing) is None
    with pytest.raises(StepOrderError, match="step 1 was sampled"):
        worker.execute_model(nothing)
    assert worker.sample_tokens(None).numbers == []
    with pytest.raises(StepOrderError, match="without a deferred step"):
        worker.sample_tokens(None)


def test_start_up_states_come_in_order_with_progress_of_the_weights():
    worker, states = started_worker()
    names = [name for name, _, _ in states]
    assert list(dict.fromkeys(names)) == [
        "device", "joined", "groups", "weights", "memory", "kv", "warm-up",
    ]  # fmt: skip
    fractions = [fraction for name, fraction, _ in states if name == "weights"]
    assert fractions[0] == 0.0
    assert fractions[-1] == 1.0
    assert fractions == sorted(fractions)
    worker.shutdown()


def test_configured_bytes_of_the_kv_cache_are_taken_as_they_are():
    worker = Worker(
        engine_config(tiny_checkpoint(), cache=CacheConfig(kv_cache_memory_bytes=12345)),
        0,
        rendezvous=None,
        report=lambda *_: None,
    )
    worker.init_device()
    worker.load_model()
    assert worker.determine_available_memory() == 12345


def test_bytes_of_a_block_are_those_of_the_tensors(worker):
    spec = worker.config.model.spec
    tokens = spec.num_layers * 2 * spec.num_kv_heads * spec.head_size * 4
    assert worker.kv_bytes_per_block() == tokens * 4


def test_dummy_weights_need_no_checkpoint_files(tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_checkpoint() / "config.json").read_bytes())
    worker = Worker(
        engine_config(tmp_path, load_format="dummy", dtype="bfloat16"),
        0,
        rendezvous=None,
        report=lambda *_: None,
    )
    worker.init_device()
    worker.load_model()
    worker.initialize_from_config(kv_config())
    driver = StepDriver(worker.execute_model)
    sequence = driver.add([1, 2, 3], max_tokens=4)
    driver.run()
    assert len(sequence.generated) == 4


def test_method_before_its_phase_is_a_bug_not_an_attribute_error(worker):
    fresh = Worker(worker.config, 0, rendezvous=None, report=lambda *_: None)
    for call in (fresh.load_model, fresh.kv_bytes_per_block, fresh.determine_available_memory):
        with pytest.raises(PhaseError):
            call()


def test_shutdown_may_come_twice_and_ends_stepping(worker):
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(PhaseError, match="shut down"):
        worker.execute_dummy_batch()


def test_health_check_passes_on_a_working_device(worker):
    worker.check_health()


class Extension:
    """Asks the worker it is mixed into."""

    def rank_and_dtype(self):
        return self.rank, self.config.model.dtype


class Clashing:
    def execute_model(self, output):
        return None

    def fine(self):
        return 1


class OwnDict(dict):
    pass


class OwnNew:
    def __new__(cls):
        return object.__new__(cls)


class Unfinished(abc.ABC):
    @abc.abstractmethod
    def missing(self):
        """Left to others."""


def extended(name):
    config = engine_config(tiny_checkpoint(), worker_extension_cls=name)
    return Worker(config, 0, rendezvous=None, report=lambda *_: None)


@pytest.fixture
def extension_module(monkeypatch):
    import sys
    from types import ModuleType

    module = ModuleType("extension_of_a_test")
    module.Extension, module.Clashing, module.number = Extension, Clashing, 3
    module.OwnDict, module.OwnNew, module.Unfinished = OwnDict, OwnNew, Unfinished
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("name", ["extension_of_a_test:Extension", "extension_of_a_test.Extension"])
@pytest.mark.usefixtures("extension_module")
def test_methods_of_the_extension_are_the_workers(name):
    worker = extended(name)
    assert isinstance(worker, Worker)
    assert worker.rank_and_dtype() == (0, "float32")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("extension_of_a_test:Clashing", "defines execute_model, which Worker has"),
        ("extension_of_a_test:Missing", "has no class Missing"),
        ("extension_of_a_test:number", "has no class number"),
        ("no_such_module_here:Class", "cannot be imported"),
        ("builtins.dict", "in a way of its own"),
        ("extension_of_a_test.OwnDict", "in a way of its own"),
        ("extension_of_a_test.OwnNew", "in a way of its own"),
        ("extension_of_a_test.Unfinished", "missing is abstract"),
        ("builtins.len", "has no class len, it is a builtin_function_or_method"),
        (".extension_of_a_test.Extension", "names no class"),
        ("", "names no class"),
        ("Class", "names no class"),
    ],
)
@pytest.mark.usefixtures("extension_module")
def test_extension_that_cannot_be_added_is_a_config_error(name, message):
    with pytest.raises(ConfigError, match=message):
        extended(name)
