"""The fixed request sets and shapes: what every engine that is compared gets."""

import hashlib
import json

import pytest

from vcli.runtime.bench.shapes import SHAPES, write_shape
from vcli.runtime.bench.workloads import check_counts, equal_workload, fixed_workloads
from vcli.runtime.checkpoint import check_folder
from vcli.topology import ConfigError

#: of the reference sets: requests, tokens in, tokens out, beginning of the SHA-256 of all of it
REFERENCE = {
    "one-stream": (1, 128, 256, "88d9ef050e4f043e"),
    "batch32": (32, 16384, 8192, "1e6a1e1ab8c7997b"),
    "mixed256": (256, 151831, 139242, "26458231ea7ed34b"),
}


def digest(workload) -> str:
    pairs = [(each.prompt_token_ids, each.output_tokens) for each in workload.requests]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


def test_all_draws_the_three_reference_sets_in_order():
    found = {
        each.name: (len(each.requests), each.prompt_tokens, each.output_tokens, digest(each))
        for each in fixed_workloads("all")
    }
    assert found == REFERENCE


@pytest.mark.parametrize("name", REFERENCE)
def test_a_set_asked_for_alone_has_the_tokens_it_has_among_all(name):
    (workload,) = fixed_workloads(name)
    assert digest(workload) == REFERENCE[name][3]


def test_only_the_mixed_set_samples():
    assert [each.temperature for each in fixed_workloads("all")] == [0.0, 0.0, 0.6]


def test_an_unknown_set_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match="'batch33' is unknown") as caught:
        fixed_workloads("batch33")
    assert "mixed256" in caught.value.hint


def test_equal_requests_stay_within_the_vocabulary_and_repeat():
    sizes = {"num_prompts": 3, "input_len": 50, "output_len": 7, "vocab_size": 40}
    workload = equal_workload(**sizes)
    assert [len(each.prompt_token_ids) for each in workload.requests] == [50] * 3
    assert {token for each in workload.requests for token in each.prompt_token_ids} <= set(
        range(40)
    )
    assert workload == equal_workload(**sizes)


@pytest.mark.parametrize(
    ("vocab_size", "max_model_len", "said"),
    [(500, 8192, "vocabulary has 500"), (9001, 300, "requests of 384 tokens")],
)
def test_a_model_that_is_too_small_is_told_before_the_start(vocab_size, max_model_len, said):
    (workload,) = fixed_workloads("one-stream")
    workload.check_fits(vocab_size=9001, max_model_len=384)
    with pytest.raises(ConfigError, match=said):
        workload.check_fits(vocab_size=vocab_size, max_model_len=max_model_len)


@pytest.mark.parametrize(("flag", "value"), [("--num-prompts", 0), ("--input-len", 2**25)])
def test_counts_beyond_any_machine_are_refused(flag, value):
    with pytest.raises(ConfigError, match=f"{flag} {value}"):
        check_counts([(flag, value)])


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_folder_that_needs_neither_weights_nor_tokenizer(name, tmp_path):
    folder = write_shape(name, tmp_path)
    spec = check_folder(folder, needs_weights=False, needs_tokenizer=False)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert spec.is_moe == name.endswith("moe")
    with pytest.raises(ConfigError, match="holds no"):
        check_folder(folder, needs_tokenizer=False)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        check_folder(folder, needs_weights=False)


def test_an_unknown_shape_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'llama9b' is unknown"):
        write_shape("llama9b", tmp_path)
