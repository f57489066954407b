"""Is this machine fit: facts about the host, and checks that judge them."""

from vcli.diagnostics.host import collect_host_facts, has_nvidia_gpu, usable_cpus

__all__ = ["collect_host_facts", "has_nvidia_gpu", "usable_cpus"]
