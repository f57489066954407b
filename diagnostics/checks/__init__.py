"""The built-in checks, a module for each group."""

from vcli.diagnostics.check import Check
from vcli.diagnostics.checks import (
    capacity,
    collectives,
    cuda,
    cuda_library,
    devices,
    disk,
    environment,
    estimate,
    fit,
    gpu,
    gpu_health,
    host,
    hub,
    infiniband,
    interfaces,
    known_faults,
    leftovers,
    limits,
    link,
    messaging,
    network,
    numa,
    nvlink,
    packages,
    ray,
    start,
    trials,
)

__all__ = ["builtin_checks"]


def builtin_checks() -> tuple[Check, ...]:
    """All checks that need nothing but this host."""
    return (
        *host.CHECKS,
        *disk.CHECKS,
        *leftovers.CHECKS,
        *packages.CHECKS,
        *environment.CHECKS,
        *hub.CHECKS,
        *cuda.CHECKS,
        *cuda_library.CHECKS,
        *devices.CHECKS,
        *gpu.CHECKS,
        *gpu_health.CHECKS,
        *link.CHECKS,
        *nvlink.CHECKS,
        *numa.CHECKS,
        *limits.CHECKS,
        *messaging.CHECKS,
        *network.CHECKS,
        *interfaces.CHECKS,
        *infiniband.CHECKS,
        *start.CHECKS,
        *estimate.CHECKS,
        *fit.CHECKS,
        *capacity.CHECKS,
        *known_faults.CHECKS,
        *trials.CHECKS,
        *collectives.CHECKS,
        *ray.CHECKS,
    )
