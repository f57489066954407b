"""Greedy text of the demo equals that of transformers, whatever the layout and the batch."""

import concurrent.futures
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import NUM_TOKENS
from tests.support.serving import serving
from vcli.runtime.engine.tokenizer import Tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def greedy(url: str, ids: list[int]) -> str:
    """What the server adds to `ids`."""
    answer = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": "demo", "prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0,
            "ignore_eos": True, "skip_special_tokens": False,
        },
        timeout=120,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], id="tp1"),
        pytest.param(["-tp", "3"], id="tp3"),
        pytest.param(["-tp", "2"], id="tp2-padded"),
        pytest.param(["-tp", "4"], id="tp4-padded"),
        pytest.param(["-pp", "2"], id="pp2"),
        pytest.param(["-pp", "4"], id="pp4-uneven"),
        pytest.param(["-tp", "3", "-pp", "2"], id="tp3pp2"),
        pytest.param(["-tp", "2", "-pp", "2"], id="tp2pp2-padded"),
    ],
)
def test_greedy_tokens_equal_transformers(
    tmp_path: Path,
    demo_model: Path,
    layout: list[str],
    prompt_ids: list[list[int]],
    reference_texts: list[str],
) -> None:
    arguments = [
        str(demo_model),
        "--served-model-name",
        "demo",
        "--max-model-len",
        "2048",
        "--kv-cache-memory",
        "128M",
    ]
    with serving([*arguments, *layout], folder=tmp_path) as server:
        url = server.wait_serving()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda ids: greedy(url, ids), prompt_ids))
    assert found == reference_texts


def test_eight_requests_together_in_chunks_and_alone_give_the_same(
    tmp_path: Path,
    demo_model: Path,
    prompt_ids: list[list[int]],
    reference_texts: list[str],
) -> None:
    """Chunks of at most 8 tokens, 8 requests beside each other, no prefix to reuse."""
    arguments = [
        str(demo_model), "--served-model-name", "demo", "--max-model-len", "2048",
        "--kv-cache-memory", "128M",
        "--max-num-seqs", "8", "--max-num-batched-tokens", "8", "--no-enable-prefix-caching",
    ]  # fmt: skip
    many = (prompt_ids * 2)[:8]
    with serving(arguments, folder=tmp_path) as server:
        url = server.wait_serving()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda ids: greedy(url, ids), many))
        steps = server.metrics(url)["vcli:engine_steps_total"]
    assert found == (reference_texts * 2)[:8]
    # Alone, each would need one step a token: so they did run together.
    assert steps < 8 * NUM_TOKENS


def test_prefix_hit_computes_only_the_rest_and_changes_no_token(
    tmp_path: Path,
    demo_model: Path,
    prompt_ids: list[list[int]],
    reference_ids: list[list[int]],
) -> None:
    arguments = [
        str(demo_model),
        "--served-model-name",
        "demo",
        "--max-model-len",
        "2048",
        "--kv-cache-memory",
        "128M",
    ]
    prompt = prompt_ids[1] + reference_ids[1][:40]
    block_size = 16
    with serving(arguments, folder=tmp_path) as server:
        url = server.wait_serving()
        first = greedy(url, prompt)
        before = server.metrics(url)
        second = greedy(url, prompt)
        after = server.metrics(url)
    hit = (len(prompt) - 1) // block_size * block_size
    assert hit >= 2 * block_size
    assert first == second
    assert first.startswith(Tokenizer.from_folder(demo_model).decode(reference_ids[1][40:]))

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vcli:prefix_cache_hits_total") == hit
    assert grown("vcli:prompt_tokens_total") == len(prompt)
    assert grown("vcli:computed_prompt_tokens_total") == len(prompt) - hit
