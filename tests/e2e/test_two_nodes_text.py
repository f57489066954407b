"""Two hosts say what one says: greedy text of the demo equals that of transformers."""

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import NUM_TOKENS
from tests.support.job import Job, job_of
from tests.support.lab import Lab, why_no_lab

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_lab()), reason=why_no_lab() or "there is a lab"),
]


@pytest.fixture
def job(lab: Lab, tmp_path: Path, demo_model: Path) -> Iterator[Job]:
    with job_of(lab.hosts, tmp_path, demo_model) as running:
        yield running


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["-pp", "2"], id="pp2"),
        pytest.param(["-tp", "2"], id="tp2-over-both"),
        pytest.param(["-tp", "2", "-pp", "2"], id="tp2pp2"),
    ],
)
def test_greedy_tokens_over_two_hosts_equal_transformers(
    job: Job, layout: list[str], prompt_ids: list[list[int]], reference_texts: list[str]
) -> None:
    token = {"VCLI_JOB_TOKEN": "0123456789abcdef"}
    leader, follower = job.start_all(*layout, environ=token)
    url = leader.wait_serving()
    follower.wait_line("serves at")
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "skip_special_tokens": False}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda ids: job.ask(url, ids, **options), prompt_ids))
    found = [answer["choices"][0]["text"] for answer in answers]
    assert found == reference_texts
