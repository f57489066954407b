"""How long until workers that import torch and transformers are ready, by start method.

    python benchmarks/start_methods.py [--workers 4] [--rounds 7] [--modules torch transformers]

Each round starts everything from nothing: for the fork server that is the server, its import and
the workers; for spawn all workers at once. Then one of the workers is killed and started again.
The methods take turns, so that a busy machine is busy for both.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vcli.runtime.log import configure_logging
from vcli.runtime.process.child import ChildSpec
from vcli.runtime.process.fork_owner import ForkServer
from vcli.runtime.process.group import ChildGroup
from vcli.runtime.process.starter import Starter

DEADLINE_S = 300.0


def start(starter: Starter | None, num_workers: int, modules: list[str]) -> ChildGroup:
    """The workers, when all are ready."""
    group = ChildGroup(lambda message: None, lambda report: None)
    specs = [
        ChildSpec(
            target="tests.support.importing_worker:import_all",
            arguments=(modules,),
            title=f"Worker_TP{rank}",
            omp_num_threads=1,
            log_level="CRITICAL",
        )
        for rank in range(num_workers)
    ]
    group.start(specs, starter=starter)
    group.wait_ready(DEADLINE_S)
    return group


def one_round(method: str, num_workers: int, modules: list[str]) -> tuple[float, float]:
    """Seconds until all workers are ready, and until one that was started again is."""
    begin_s = time.perf_counter()
    server = ForkServer.start(preload=modules) if method == "forkserver" else None
    starter = server.starter if server is not None else None
    group = start(starter, num_workers, modules)
    ready_s = time.perf_counter() - begin_s
    try:
        begin_s = time.perf_counter()
        again = start(starter, 1, modules)
        restart_s = time.perf_counter() - begin_s
        again.shutdown(0.0, asked=False)
        return ready_s, restart_s
    finally:
        group.shutdown(0.0, asked=False)
        if server is not None:
            server.close()


def main() -> None:
    """Measure and print; the JSON document stands in the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--modules", nargs="+", default=["torch", "transformers"])
    options = parser.parse_args()
    configure_logging("Benchmark", "CRITICAL")  # that workers are killed is meant
    modules = [name for name in options.modules if importlib.util.find_spec(name)]
    measured: dict[str, list[tuple[float, float]]] = {"spawn": [], "forkserver": []}
    one_round("spawn", 1, modules)  # the files are in the page cache from here on
    for _ in range(options.rounds):
        for method, rounds in measured.items():
            rounds.append(one_round(method, options.workers, modules))
    document: dict[str, object] = {"workers": options.workers, "modules": modules}
    for index, what in enumerate(("ready", "restart")):
        medians = {}
        for method, rounds in measured.items():
            seconds = [values[index] for values in rounds]
            medians[method] = statistics.median(seconds)
            low, high = min(seconds), max(seconds)
            print(f"{what:8} {method:10} {low:7.3f} {medians[method]:7.3f} {high:7.3f} s")
            document[f"{what}_{method}_s"] = [low, medians[method], high]
        ratio = medians["forkserver"] / medians["spawn"]
        print(f"{what:8} ratio of the medians {ratio:.3f}")
        document[f"{what}_ratio"] = ratio
    print(json.dumps(document))


if __name__ == "__main__":
    main()
