"""`vcli topo` in this process, with streams, variables and models of the test's own."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vcli.cli.environment import Environment
from vcli.cli.main import main

#: A machine as flags describe it.
H200 = ["--gpus", "8", "--gpu", "h200", "--link", "400Gb"]
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value


def run_topo(
    arguments: list[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    is_terminal: bool = False,
) -> Ran:
    """`vcli topo ARGUMENTS`; a terminal is as wide as COLUMNS says, 80 without."""
    wrapper = Terminal if is_terminal else io.TextIOWrapper
    stdout = wrapper(io.BytesIO(), encoding="utf-8")
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    status = main(
        Environment(
            argv=("topo", *arguments),
            environ=dict(environ or {}),
            cwd=cwd or Path.cwd(),
            stdout=stdout,
            stderr=stderr,
        )
    )
    out, err = stdout.buffer, stderr.buffer
    assert isinstance(out, io.BytesIO)
    assert isinstance(err, io.BytesIO)
    return Ran(status=status, out=out.getvalue().decode(), err=err.getvalue().decode())


def model_folder(folder: Path, config: Mapping[str, Any] = LLAMA_8B) -> Path:
    """A folder with the config.json of a model and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def warning_ids(arguments: list[str]) -> list[str]:
    """The warnings of a plan, by number."""
    ran = run_topo([*arguments, "--json"])
    assert ran.status == 0, ran.out
    return [warning["id"] for warning in ran.document["warnings"]]
