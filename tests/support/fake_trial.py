"""What the processes of a trial would write: a healthy one, and changes to it."""

from collections.abc import Mapping
from typing import Any

from vcli.diagnostics.trial import Trial

LARGE = 256 << 20
TP = {"kind": "TP", "ranks": [0, 1]}
STEPS: Mapping[str, Mapping[str, Any]] = {
    "device": {"name": "NVIDIA H200", "uuid": "GPU-0", "capability": [9, 0],
               "architectures": ["sm_80", "sm_90"], "torch": "2.11.0+cu130", "nccl": "2.28.9"},
    "start method": {"cuda_initialized": True, "default": "forkserver", "fork": "spawn",
                     "reasons": ["fork, asked for, is not possible here",
                                 "CUDA was initialised in this process by torch"]},
    "product": {"num_wrong": 0, "ms": 0.25},
    "host copies": {"to_device_GBps": 55.0, "from_device_GBps": 53.0, "gen": 5, "max_gen": 5,
                    "width": 16, "max_width": 16},
    "join": {},
    "gloo": {},
    "peer memory": {"pairs": [{"src": 0, "dst": 1, "GBps": 380.0, "wrong_bytes": 0},
                              {"src": 1, "dst": 0, "GBps": 371.0, "wrong_bytes": 0}],
                    "reason": ""},
    "first sum": TP,
    "results": {**TP, "wrong": []},
    "all-reduce 8192": {**TP, "num_bytes": 8192, "us": 18.0, "busbw_GBps": 0.4},
    f"all-reduce {LARGE}": {**TP, "num_bytes": LARGE, "us": 888.0, "busbw_GBps": 302.0},
    "graph": {"us": 14.2},
    "end": {},
}  # fmt: skip


def trial(*, until: str = "", ranks: int = 2, **changes: Any) -> Trial:
    """A trial in which every rank did every step, up to `until`.

    `changes`: a step (`_` for a space) -> what it found instead, or a list with a value for each
    rank; `broken` -> the events of the end; other names are fields of the trial.
    """
    broken = changes.pop("broken", ())
    found = {name.replace("_", " "): value for name, value in changes.items()}
    events: list[dict[str, Any]] = []
    for step, usual in STEPS.items():
        change = found.pop(step, {})
        for rank in range(ranks):
            lead = {"rank": rank, "step": step}
            events.append({**lead, "state": "started"})
            if step == until:
                continue
            own = change[rank] if isinstance(change, list) else change
            events.append({**lead, "state": "done", "seconds": 0.1, **usual, **own})
        if step == until:
            break
    fields = {name.replace(" ", "_"): value for name, value in found.items()}
    fields = {"devices": tuple(range(ranks)), **fields}
    return Trial(events=(*events, *broken), **fields)


def hung(step: str, *ranks: int, seconds: float = 20.0) -> list[dict[str, Any]]:
    """The end of a trial in which these ranks hung."""
    return [{"rank": rank, "step": step, "state": "hung", "seconds": seconds} for rank in ranks]


def failed(step: str, rank: int, message: str = "", status: int | None = None) -> dict[str, Any]:
    """The end of a trial in which this rank failed, or died with `status`."""
    event = {"rank": rank, "step": step, "state": "failed", "message": message}
    return event if status is None else {**event, "exit_status": status}
