"""Whatever is typed: a view, or one message with a hint and exit 2; never a bug."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.topo_runs import LLAMA_8B, QWEN3_MOE, SMOLLM2, model_folder, run_topo

SIZES = st.sampled_from(("1", "1", "2", "3", "4", "8", "16"))
VIEWS = st.sampled_from(
    (
        *([], [], ["--json"], ["--suggest"], ["--rank", "3"], ["--group", "ep"]),
        *(["--group", "tp", "--json"], ["--explain", "dcp"], ["--explain", "eplb"]),
        *(["--compare", "-tp 2 -pp 2"], ["--compare", "-dp 4 -n 2"], ["--print-commands"]),
        *(["--format", name] for name in ("csv", "dot", "mermaid", "svg", "html")),
    )
)
MACHINES = st.sampled_from(
    (
        *([], ["--device", "cpu"], ["--device", "cuda"], ["--gpus", "8"], ["--gpus", "3"]),
        *(["--gpu", "l4"], ["--gpus", "16", "--gpu", "b200", "--link", "8x400Gb"]),
        ["--gpus", "1", "--gpu", "t4", "--link", "1Gb"],
    )
)
MODELS = st.sampled_from((None, None, LLAMA_8B, SMOLLM2, QWEN3_MOE))
SWITCHES = st.lists(
    st.sampled_from(
        (
            *("-ep", "--moe", "--enable-eplb", "-dpe", "-dph", "--headless"),
            *("-dpl=2", "-dpr=1", "--num-redundant-experts=4", "--api-server-count=2"),
            *("--batch=1", "--batch=5000", "--context=100000", "--block-size=7"),
            *("--distributed-executor-backend=external_launcher", "--start-method=fork"),
            *("--max-model-len=100", "--gpu-memory-utilization=0.1", "--dtype=float32"),
        )
    ),
    max_size=3,
    unique=True,
)


@given(
    sizes=st.tuples(SIZES, SIZES, SIZES, st.sampled_from("1112"), st.sampled_from("1112")),
    nnodes=st.sampled_from(("1", "1", "2", "4")),
    switches=SWITCHES,
    view=VIEWS,
    machine=MACHINES,
    model=MODELS,
)
@settings(max_examples=150, deadline=None)
def test_any_flags_give_a_view_or_one_user_error(
    sizes: tuple[str, ...],
    nnodes: str,
    switches: list[str],
    view: list[str],
    machine: list[str],
    model: dict[str, object] | None,
) -> None:
    flags = ("-tp", "-pp", "-dp", "-pcp", "-dcp")
    arguments = [word for pair in zip(flags, sizes, strict=True) for word in pair]
    # `-dpl=2`: only one letter may stand before the sign.
    arguments += [word for switch in switches for word in switch.split("=")]
    arguments += ["-n", nnodes, *machine, *view]
    with tempfile.TemporaryDirectory() as folder:
        if model is not None:
            arguments.insert(0, str(model_folder(Path(folder), model)))
        ran = run_topo(arguments)

    assert ran.status in (0, 2), (arguments, ran.err)
    if "--json" in view:
        assert json.loads(ran.out)["exit_code"] == ran.status
    elif ran.status == 0:
        assert ran.out
    else:
        assert ran.err.count("error: ") == 1, arguments
        assert "→" in ran.err, (arguments, ran.err)
