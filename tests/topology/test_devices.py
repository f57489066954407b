"""`--device-ids` and CUDA_VISIBLE_DEVICES: what they mean, what children get, what is refused."""

import json

import pytest

from tests.support.fake_nvml import FakeGpu, FakeNvml
from vcli.diagnostics.gpu import collect_gpus
from vcli.topology import (
    ConfigError,
    ExitStatus,
    HostFacts,
    LinkFacts,
    ParallelConfig,
    PlacementError,
    UnfitError,
    plan_to_json,
    plan_topology,
)
from vcli.topology.devices import check_visible_devices, choose_devices, composed_variable

UUIDS = ("GPU-8f3a11", "GPU-8f3b22", "GPU-77cc33", "GPU-aa0044")


def host(tmp_path, variable=None, uuids=UUIDS):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    gpus = [FakeGpu(answers={"UUID": uuid}) for uuid in uuids]
    seen = collect_gpus(environ, tmp_path, FakeNvml(gpus))
    return HostFacts(hostname="box", gpus=seen.gpus, links=seen.links)


def numbers(host):
    return [(gpu.index, gpu.visible_index, gpu.physical_index, gpu.uuid) for gpu in host.gpus]


def test_three_numbers_of_a_gpu_are_kept_apart(tmp_path):
    chosen = choose_devices(host(tmp_path, "3,2,1"), "2,0", variable="3,2,1")
    assert numbers(chosen) == [(0, 2, 1, "GPU-8f3b22"), (1, 0, 3, "GPU-aa0044")]


def test_links_follow_their_gpus(tmp_path):
    before = host(tmp_path)
    kinds = {(link.first, link.second): f"L{link.first}{link.second}" for link in before.links}
    links = tuple(
        LinkFacts(first=first, second=second, kind=kind) for (first, second), kind in kinds.items()
    )
    named = HostFacts(hostname="box", gpus=before.gpus, links=links)
    chosen = choose_devices(named, "3,1")
    assert [(link.first, link.second, link.kind) for link in chosen.links] == [(1, 0, "L13")]


def test_children_get_uuids_so_that_no_numbering_can_change_them(tmp_path):
    chosen = choose_devices(host(tmp_path, "3,2,1"), "2,0", variable="3,2,1")
    assert composed_variable(chosen, "3,2,1") == "GPU-8f3b22,GPU-aa0044"


@pytest.mark.parametrize(
    ("variable", "expected"), [("3,2,1", "1,3"), (None, "2,0"), ("GPU-77,GPU-aa,GPU-8f3a", None)]
)
def test_without_uuids_children_get_entries_that_mean_the_same(tmp_path, variable, expected):
    observed = host(tmp_path, variable)
    chosen = choose_devices(observed, "2,0", variable=variable)
    bare = HostFacts(
        gpus=tuple(
            type(gpu)(
                index=gpu.index,
                visible_index=gpu.visible_index,
                physical_index=gpu.physical_index,
            )
            for gpu in chosen.gpus
        )
    )
    assert composed_variable(bare, variable) == (expected or "GPU-8f3a,GPU-77")


@pytest.mark.parametrize("typed", ["GPU-77", "gpu-77CC33", " GPU-77cc "])
def test_a_uuid_may_be_cut_short(tmp_path, typed):
    assert numbers(choose_devices(host(tmp_path), typed)) == [(0, 2, 2, "GPU-77cc33")]


@pytest.mark.parametrize(
    ("typed", "says", "hint"),
    [
        ("7", "box shows 4 GPUs, numbered from 0 to 3", "--device-ids 0,1,2,3"),
        ("0,0", "names 0 twice", "--device-ids 0"),
        ("2,GPU-77", "2 and GPU-77 are the same GPU", "once"),
        ("GPU-8f3", "is the beginning of 2 UUIDs: GPU-8f3a11, GPU-8f3b22", "type more"),
        ("GPU-99", "no such UUID among 4 GPUs of box", "nvidia-smi -L"),
        ("MIG-1234", "a MIG slice cannot reach the memory of others", "whole GPUs"),
        ("0,", "'' is neither a number nor a UUID", "nvidia-smi -L"),
        ("", "'' is neither a number nor a UUID", "nvidia-smi -L"),
        ("-1", "'-1' is neither", "nvidia-smi -L"),
        ("9" * 400, "is neither a number nor a UUID", "nvidia-smi -L"),
    ],
)
def test_what_the_flag_cannot_mean_is_a_mistake_of_the_user(tmp_path, typed, says, hint):
    with pytest.raises(ConfigError) as caught:
        choose_devices(host(tmp_path), typed)
    assert says in caught.value.message
    assert hint in caught.value.hint
    assert len(caught.value.message) < 300
    assert caught.value.exit_status == ExitStatus.USAGE


def test_a_number_counts_within_the_users_variable_and_the_message_says_so(tmp_path):
    with pytest.raises(ConfigError, match="2 GPUs in CUDA_VISIBLE_DEVICES=1,3"):
        choose_devices(host(tmp_path, "1,3"), "2", variable="1,3")


def test_too_few_for_the_ranks_names_a_list_that_suffices(tmp_path):
    with pytest.raises(PlacementError) as caught:
        choose_devices(host(tmp_path), "2", num_ranks=2)
    assert "chooses 1 GPU, the 2 ranks on this node need 2" in caught.value.message
    assert caught.value.hint == "--device-ids 2,0"


def test_more_ranks_than_the_node_has_gpus_points_at_other_sizes(tmp_path):
    with pytest.raises(PlacementError) as caught:
        choose_devices(host(tmp_path), "0,1", num_ranks=8)
    assert "--tensor-parallel-size 2" in caught.value.hint


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("", "hides every GPU of box"),
        ("-1", "hides every GPU of box"),
        ("0,9", "9 is unknown, so CUDA shows 1 GPU of 2"),
        ("1,1", "1 comes twice, so CUDA shows 1 GPU of 2"),
        ("GPU-zz", "GPU-zz is unknown, so CUDA shows 0 GPUs of 1"),
        ("0,,1", "an empty entry is unknown"),
        ("0,MIG-abc", "a MIG slice cannot reach"),
    ],
)
def test_a_variable_that_cuda_cuts_short_makes_the_machine_unfit(tmp_path, variable, says):
    with pytest.raises(UnfitError) as caught:
        check_visible_devices(host(tmp_path, variable), variable)
    assert says in caught.value.message
    assert f"CUDA_VISIBLE_DEVICES={variable}" in caught.value.message
    assert "CUDA_VISIBLE_DEVICES" in caught.value.hint
    assert caught.value.exit_status == ExitStatus.UNFIT


@pytest.mark.parametrize("variable", [None, "0", "3,1", "GPU-77", "0,1,-1,2"])
def test_a_variable_that_cuda_understands_is_fine(tmp_path, variable):
    check_visible_devices(host(tmp_path, variable), variable)


def test_the_plan_has_all_numbers_for_own_ranks_and_none_for_those_elsewhere(tmp_path):
    config = ParallelConfig(tensor_parallel_size=4, nnodes=2, node_rank=1)
    chosen = choose_devices(host(tmp_path), "3,1", num_ranks=2)
    plan = plan_topology(config, host=chosen, device_type="cuda")
    found = [
        (rank.device_index, rank.visible_index, rank.physical_index, rank.device_uuid)
        for rank in plan.ranks
    ]
    assert found == [
        (0, None, None, ""),
        (1, None, None, ""),
        (0, 3, 3, "GPU-aa0044"),
        (1, 1, 1, "GPU-8f3b22"),
    ]
    document = json.loads(json.dumps(plan_to_json(plan)))["nodes"][1]["ranks"][0]
    assert (document["gpu_index"], document["gpu_physical_index"]) == (0, 3)
    assert document["gpu_uuid"] == "GPU-aa0044"


def test_which_gpus_a_node_takes_is_no_disagreement_between_nodes(tmp_path):
    config = ParallelConfig(tensor_parallel_size=2)
    plans = [
        plan_topology(config, host=choose_devices(host(tmp_path), typed), device_type="cuda")
        for typed in ("0,1", "3,2")
    ]
    assert plans[0].fingerprint() == plans[1].fingerprint()
