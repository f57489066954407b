"""Flags that `topo` alone has: layouts of many nodes, machines to plan for, views."""

from typing import Annotated, Any

import typer

_PARALLEL = "Parallelism"
_FACTS = "Machines to plan for"
_JUDGE = "Judgement"
_SHOW = "What to show"


def _flag(panel: str, *names: str, text: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


DataParallelSizeLocal = Annotated[
    int | None,
    _flag(
        _PARALLEL,
        "--data-parallel-size-local",
        "-dpl",
        text="Replicas of one started instance.",
        metavar="N",
        show_default=False,
    ),
]
DataParallelRank = Annotated[
    int | None,
    _flag(
        _PARALLEL,
        "--data-parallel-rank",
        "-dpr",
        text="Which replica this instance is, where others balance the load.",
        metavar="I",
        show_default=False,
    ),
]
DataParallelExternalLb = Annotated[
    bool,
    _flag(
        _PARALLEL,
        "--data-parallel-external-lb",
        "-dpe",
        text="Somebody else balances: each instance is one replica.",
    ),
]
DataParallelHybridLb = Annotated[
    bool,
    _flag(
        _PARALLEL,
        "--data-parallel-hybrid-lb",
        "-dph",
        text="Each node balances among its own replicas.",
    ),
]
DataParallelBackend = Annotated[
    str,
    _flag(
        _PARALLEL,
        "--data-parallel-backend",
        text="What places replicas: mp or ray.",
        metavar="NAME",
    ),
]
NumRedundantExperts = Annotated[
    int,
    _flag(_PARALLEL, "--num-redundant-experts", text="Copies of busy experts.", metavar="N"),
]
ApiServerCount = Annotated[
    int | None,
    _flag(
        _PARALLEL,
        "--api-server-count",
        text="Processes that serve HTTP; decided by the plan if left out.",
        metavar="N",
        show_default=False,
    ),
]
Headless = Annotated[bool, _flag(_PARALLEL, "--headless", text="No API server on this node.")]
FactsFiles = Annotated[
    list[str] | None,
    _flag(
        _FACTS,
        "--facts",
        text="Facts saved on the machine; once for all nodes, or once for each in their order.",
        metavar="FILE",
        show_default=False,
    ),
]
SaveFacts = Annotated[
    str | None,
    _flag(
        _FACTS,
        "--save-facts",
        text="Write the facts about this machine, for --facts elsewhere.",
        metavar="FILE",
        show_default=False,
    ),
]
AssumedGpus = Annotated[
    int | None,
    _flag(
        _FACTS, "--gpus", text="Assume so many GPUs on each node.", metavar="N", show_default=False
    ),
]
AssumedGpu = Annotated[
    str | None,
    _flag(
        _FACTS,
        "--gpu",
        text="Assume GPUs of this kind: h100, h200, a100, l40s ...",
        metavar="KIND",
        show_default=False,
    ),
]
NetworkSpeed = Annotated[
    str | None,
    _flag(
        _FACTS,
        "--link",
        text="Network of a node: 400Gb, or 8x400Gb for eight adapters.",
        metavar="SPEED",
        show_default=False,
    ),
]
Suggest = Annotated[
    bool, _flag(_JUDGE, "--suggest", text="Rank all layouts of the model on all GPUs.")
]
Compare = Annotated[
    str | None,
    _flag(
        _JUDGE,
        "--compare",
        text='Show a second plan beside this one, like "-tp 8 -pp 2".',
        metavar="FLAGS",
        show_default=False,
    ),
]
BatchRequests = Annotated[
    int, _flag(_JUDGE, "--batch", text="Requests at once, over all replicas.", metavar="N")
]
ContextTokens = Annotated[
    int, _flag(_JUDGE, "--context", text="Tokens of context of each.", metavar="TOKENS")
]
ShowRank = Annotated[
    int | None,
    _flag(
        _SHOW,
        "--rank",
        text="All about one rank, counted over all replicas.",
        metavar="N",
        show_default=False,
    ),
]
ShowGroup = Annotated[
    str | None,
    _flag(
        _SHOW,
        "--group",
        text="The groups of a kind: tp, pp, pcp, dcp, dp, ep.",
        metavar="KIND",
        show_default=False,
    ),
]
Explain = Annotated[
    str | None,
    _flag(
        _SHOW,
        "--explain",
        text="How the groups of a kind are made: tp, pp, pcp, dcp, dp, ep, eplb.",
        metavar="KIND",
        show_default=False,
    ),
]
PlanFormat = Annotated[
    str, _flag(_SHOW, "--format", text="text, csv, dot, mermaid, svg or html.", metavar="NAME")
]
PrintCommands = Annotated[
    bool,
    _flag(
        _SHOW,
        "--print-commands",
        text="The line to type on each node, for vcli, vllm, sglang and torchrun.",
    ),
]
Hosts = Annotated[
    str | None,
    _flag(
        _SHOW,
        "--hosts",
        text="Addresses of the nodes, in the order of their ranks.",
        metavar="A,B,...",
        show_default=False,
    ),
]
HostFile = Annotated[
    str | None,
    _flag(
        _SHOW,
        "--hostfile",
        text="File with one host a line.",
        metavar="FILE",
        show_default=False,
    ),
]
