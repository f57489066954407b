"""OpenMP threads of each worker: all workers of a node together fill its CPUs once."""

from vcli.topology.decision import Decision


def decide_omp_num_threads(
    *, num_cpus: int, num_local_workers: int, requested: int | None = None
) -> Decision[int]:
    """Threads per worker; `num_cpus` counts what affinity and cgroup quota allow."""
    if requested is not None and requested > 0:
        return Decision(
            name="omp_num_threads", value=requested, reasons=("OMP_NUM_THREADS is set",)
        )
    workers = max(1, num_local_workers)
    return Decision(
        name="omp_num_threads",
        value=max(1, num_cpus // workers),
        reasons=(f"{num_cpus} usable CPUs for {workers} local worker(s)",),
    )
