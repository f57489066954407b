"""Our queue beside vLLM's, a pipe per reader and zmq, in one run.

    python benchmarks/ipc_vs_vllm.py --vllm-python VENV/bin/python [--rounds 5] [--only NAME ...]

vLLM lives in an environment of its own; without `--vllm-python` the others are compared. In each
round every contender runs every measurement once, in turns, so what else the machine does hits all
alike; the order turns around from round to round. A ratio is ours to vLLM's of the same round.
Prints min / median / max over the rounds, as a table or with `--json` as one document.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

CONTENDERS = Path(__file__).with_name("ipc_contenders.py")
CELL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Measurement:
    """`cells` by contender; `key` is the figure, `goal` the ratio to vLLM's that we want."""

    name: str
    key: str
    goal: float
    cells: dict[str, dict]


def measurements(readers: list[int], seconds: float, idle_s: float) -> list[Measurement]:
    """All of them, in the order of the table."""
    rows = []
    for n in readers:
        small = {"readers": n, "payload": "bytes100", "mode": "closed", "seconds": seconds}
        everyone = dict.fromkeys(("vcli", "vllm", "pipe", "zmq"), small)
        rows.append(Measurement(f"rt100 x{n}", "round_trip_us", 0.5, everyone))
    for n in readers:
        pickled = {"readers": n, "payload": "step_pickled", "mode": "closed", "seconds": seconds}
        packed = {**pickled, "payload": "step_packed"}
        both = {"vcli": packed, "vllm": pickled, "pipe": pickled}
        rows.append(Measurement(f"step packed x{n}", "round_trip_us", 0.4, both))
        goal = 1.05 if n <= 2 else 0.85
        same = dict.fromkeys(("vcli", "vllm"), pickled)
        rows.append(Measurement(f"step same pickle x{n}", "round_trip_us", goal, same))
    for n in readers:
        paced = {"readers": n, "payload": "bytes100", "mode": "paced", "gap_s": 0.002}
        paced |= {"seconds": max(seconds, 1.0)}
        everyone = dict.fromkeys(("vcli", "vllm", "pipe", "zmq"), paced)
        rows.append(Measurement(f"one-way 2 ms x{n}", "latency_us", 1.0, everyone))
    slow = {"readers": 2, "mode": "paced", "gap_s": 0.02, "seconds": 2.0}
    packed, pickled = {**slow, "payload": "step_packed"}, {**slow, "payload": "step_pickled"}
    cells = {"vcli": packed, "vllm": pickled, "zmq": pickled}
    rows.append(Measurement("reader CPU us, 20 ms", "cpu_us", 0.05, cells))
    large = {"readers": 2, "payload": "array8m", "mode": "closed", "seconds": max(seconds, 1.0)}
    cells = dict.fromkeys(("vcli", "vcli_view", "vllm", "pipe", "zmq"), large)
    rows.append(Measurement("8 MiB to 2, last has it", "latency_us", 0.5, cells))
    idle = {"readers": 2, "payload": "bytes100", "mode": "idle", "seconds": idle_s}
    cells = dict.fromkeys(("vcli", "vllm", "zmq"), idle)
    rows.append(Measurement(f"reader CPU s, idle {idle_s:g} s", "cpu_s", 0.01, cells))
    return rows


class Contender:
    """A server of `ipc_contenders.py`, under the interpreter that has its library."""

    def __init__(self, name: str, python: str) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [python, str(CONTENDERS), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        self.name = name

    def wait_ready(self) -> bool:
        return bool(self._process.stdout.readline())

    def run(self, cell: dict) -> dict:
        self._process.stdin.write(json.dumps(cell) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline() or '{"error": "gone"}')

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(CELL_TIMEOUT_S)


def collect(rows: list[Measurement], contenders: dict[str, Contender], rounds: int) -> dict:
    """Figures by measurement and contender, one per round. ^C ends it with what is there."""
    figures: dict[str, dict[str, list[float]]] = {row.name: {} for row in rows}
    try:
        for number in range(rounds):
            for row in rows:
                names = [name for name in row.cells if name in contenders]
                for name in names if number % 2 == 0 else reversed(names):
                    result = contenders[name].run(row.cells[name])
                    value = result.get(row.key, float("nan"))
                    figures[row.name].setdefault(name, []).append(value)
            print(f"round {number + 1} of {rounds} done", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("stopped: these are the rounds so far", file=sys.stderr)
    return figures


def summary(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def report(rows: list[Measurement], figures: dict) -> list[dict]:
    """A row of figures and ratios for each measurement that was made."""
    lines = []
    for row in rows:
        found = figures[row.name]
        line = {"name": row.name, "unit": row.key, "goal": row.goal}
        line["figures"] = {name: summary(values) for name, values in found.items()}
        for name in ("vcli", "vcli_view"):
            if name in found and "vllm" in found:
                pairs = zip(found[name], found["vllm"], strict=False)
                ratios = [ours / theirs for ours, theirs in pairs]
                line[f"ratio_{name}"] = summary(ratios)
        lines.append(line)
    return lines


def show(lines: list[dict]) -> None:
    for line in lines:
        texts = []
        for name, values in line["figures"].items():
            digits = 4 if line["unit"] == "cpu_s" else 1
            text = " / ".join(f"{values[key]:.{digits}f}" for key in ("min", "median", "max"))
            texts.append(f"{name} {text}")
        for name in ("vcli", "vcli_view"):
            if ratio := line.get(f"ratio_{name}"):
                text = " / ".join(f"{ratio[key]:.3f}" for key in ("min", "median", "max"))
                mark = "ok" if ratio["median"] <= line["goal"] else "MISSED"
                texts.append(f"ratio {name} {text} (goal {line['goal']}: {mark})")
        print(f"{line['name']:<26} " + "\n".ljust(28).join(texts))


def facts() -> dict:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", help="interpreter that can import vllm")
    parser.add_argument("--readers", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a closed loop")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of measurements' names")
    parser.add_argument("--contenders", default="vcli,vcli_view,vllm,pipe,zmq")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    readers = [int(number) for number in options.readers.split(",")]
    rows = [
        row
        for row in measurements(readers, options.seconds, options.idle_seconds)
        if not options.only or row.name.startswith(tuple(options.only))
    ]
    contenders = {}
    for name in options.contenders.split(","):
        python = options.vllm_python if name == "vllm" else sys.executable
        if python:
            contenders[name] = Contender(name, python)
    for name, contender in list(contenders.items()):
        if not contender.wait_ready():
            print(f"{name} cannot be imported there: left out", file=sys.stderr)
            del contenders[name]
    before = facts()
    lines = report(rows, collect(rows, contenders, options.rounds))
    for contender in contenders.values():
        contender.close()
    if options.json:
        print(json.dumps({"host": before, "measurements": lines}, indent=2))
    else:
        print(" ".join(f"{key}={value}" for key, value in before.items()))
        show(lines)


if __name__ == "__main__":
    main()
