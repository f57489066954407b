"""Every check has a page, a remedy, a case where it fails or warns, and one where it passes."""

from itertools import chain
from pathlib import Path

import pytest

from tests.cli import test_gpu_checks as test_gpu_trials  # noqa: F401 - named below
from tests.diagnostics import (
    test_environment_checks,
    test_gpu_checks,
    test_host_checks,
    test_limit_checks,
    test_machine_checks,
    test_network_checks,
    test_package_checks,
    test_ray_checks,
    test_start_and_fit_checks,
    test_trial_checks,
)
from vcli.cli.runtime_checks import registry
from vcli.cli.views.check_page import check_page, index_page, page_name
from vcli.diagnostics import Check, CheckRegistry, Dialect, Level, Status

PAGES = Path(__file__).parents[2] / "docs" / "checks"
CHECKS = registry().checks
CASES = list(
    chain(
        test_environment_checks.CASES,
        test_gpu_checks.CUDA_CASES,
        test_gpu_checks.CUDA_LIBRARY_CASES,
        test_gpu_checks.GPU_CASES,
        test_gpu_checks.LINK_CASES,
        test_host_checks.CASES,
        test_limit_checks.CASES,
        test_machine_checks.NUMA_CASES,
        test_machine_checks.LEFTOVER_CASES,
        test_machine_checks.IB_CASES,
        test_machine_checks.NET_CASES,
        test_machine_checks.FIT_CASES,
        test_network_checks.CASES,
        test_package_checks.CASES,
        test_ray_checks.CASES,
        test_start_and_fit_checks.CASES,
        test_trial_checks.DEVICE_CASES,
        test_trial_checks.COLLECTIVE_CASES,
    )
)

#: They inform, and have nothing to fail for.
INFORMING = {"HOST-03", "HOST-10", "LINK-09", "COLL-09"}
#: Verdicts that need more than data: id -> the tests that bring them about.
PROBLEM_ELSEWHERE = {
    "HOST-07": "test_host_checks.test_room_for_caches",
    "PY-05": "test_package_checks.test_two_nccl_libraries_warn_only_if_they_differ",
    "LIM-01": "test_limit_checks.test_several_gpu_ranks_want_a_gibibyte_of_shm",
    "LIM-02": "test_limit_checks.test_a_failure_of_shm_blocks_only_ranks_on_gpus",
    "IB-06": "test_machine_checks.test_counters_that_grow_warn",
    "LINK-11": "test_gpu_checks.test_a_gpu_without_a_near_card_is_named",
    "PROC-05": "test_start_and_fit_checks.test_survivors_fail_and_are_named",
    "PROC-09": "test_gpu_trials.test_a_fork_server_that_nvml_lists_fails",
}
PASS_ELSEWHERE = {
    "PY-05": PROBLEM_ELSEWHERE["PY-05"],
    "LINK-11": PROBLEM_ELSEWHERE["LINK-11"],
    "NUMA-04": "this module",
    "PROC-05": "test_start_and_fit_checks.test_the_workers_of_a_killed_engine_end_at_once",
    "PROC-09": "test_gpu_trials.test_a_fork_server_without_a_context_passes",
}


def by_id(check: Check) -> str:
    return check.id


@pytest.mark.parametrize("check", CHECKS, ids=by_id)
def test_it_has_a_case_that_fails_or_warns(check: Check) -> None:
    problems = [
        case for case in CASES if case.id == check.id and case.status in (Status.WARN, Status.FAIL)
    ]
    assert problems or check.id in INFORMING or check.id in PROBLEM_ELSEWHERE


@pytest.mark.parametrize("check", CHECKS, ids=by_id)
def test_it_has_a_case_that_passes(check: Check) -> None:
    passing = [case for case in CASES if case.id == check.id and case.status is Status.PASS]
    assert passing or check.id in PASS_ELSEWHERE


@pytest.mark.parametrize("name", sorted({*PROBLEM_ELSEWHERE.values(), *PASS_ELSEWHERE.values()}))
def test_the_tests_that_stand_elsewhere_exist(name: str) -> None:
    module, _, function = name.partition(".")
    if function:
        assert hasattr(globals()[module], function)


@pytest.mark.parametrize("check", CHECKS, ids=by_id)
def test_its_page_is_made_from_its_code(check: Check) -> None:
    path = PAGES / page_name(check)
    assert path.exists(), "run scripts/make-check-pages"
    assert path.read_text() == check_page(check), "run scripts/make-check-pages"


def test_no_page_is_of_a_check_that_is_gone() -> None:
    assert {path.name for path in PAGES.glob("*.md")} == {
        "README.md",
        *(page_name(check) for check in CHECKS),
    }
    assert (PAGES / "README.md").read_text() == index_page(CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=by_id)
def test_its_texts_are_complete(check: Check) -> None:
    assert check.explanation.strip()
    assert check.why
    assert check.expected
    for dialect in Dialect:
        assert check.remedy.template(dialect)


def test_requirements_form_no_circle() -> None:
    checks = {check.id: check for check in CHECKS}

    def visit(id_: str, trail: tuple[str, ...]) -> None:
        assert id_ not in trail, trail
        for need in checks[id_].requires:
            visit(need, (*trail, id_))

    for id_ in checks:
        visit(id_, ())


def test_a_fast_run_leaves_out_what_is_of_level_3_and_not_named() -> None:
    deep = {check.id for check in CHECKS if check.level is Level.L3}
    checks = registry()
    assert {"CUDA-07", "LINK-02", "COLL-04"} <= deep
    assert deep.isdisjoint(check.id for check in checks.select([], is_fast=True))
    assert deep.isdisjoint(check.id for check in checks.select(["cuda"], is_fast=True))
    assert deep <= {check.id for check in checks.select([])}
    named = checks.select(["cuda-07", "lim"], is_fast=True)
    assert "CUDA-07" in {check.id for check in named}


def test_no_check_of_level_3_is_part_of_the_preflight() -> None:
    assert [check.id for check in CHECKS if check.level is Level.L3 and check.is_preflight] == []


def test_no_quick_check_requires_a_deep_one() -> None:
    deep = {check.id for check in CHECKS if check.level is Level.L3}
    wrong = [c.id for c in CHECKS if c.level is not Level.L3 and deep.intersection(c.requires)]
    assert wrong == []


def test_an_id_twice_or_a_requirement_of_nothing_is_refused() -> None:
    first = CHECKS[0]
    with pytest.raises(ValueError, match="same id"):
        CheckRegistry([first, first])
    with pytest.raises(ValueError, match="NET-01 requires NET-02"):
        CheckRegistry([check for check in CHECKS if check.id == "NET-01"])


def test_numactl_on_the_path_passes(tmp_path: Path) -> None:
    from tests.support.check_cases import Case, check_case
    from vcli.topology import ProcessFacts

    program = tmp_path / "numactl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    case = Case(
        id="NUMA-04",
        status=Status.PASS,
        environ={"PATH": str(tmp_path)},
        more={"process": ProcessFacts(numa_bind=True)},
    )
    check_case(case, tmp_path)
