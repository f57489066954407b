"""PROC: how the processes are started."""

from vcli.diagnostics.check import Finding, Remedy, check, failed, passed, skipped, warned
from vcli.diagnostics.context import CheckContext
from vcli.diagnostics.text import plural


@check(
    "PROC-01",
    "start method",
    why="the method that was asked for would break the workers here, so another is used",
    expected="the method that was asked for, or the default",
    remedy=Remedy(bare_metal="--start-method {value}   (or leave it out)"),
)
def start_method(context: CheckContext) -> Finding:
    """Takes the decision that the runtime will obey from the plan, with every reason."""
    decision = context.plan.start_method
    wanted = context.plan.config.start_method
    text = f"{decision.value}: {'; '.join(decision.reasons)}"
    if wanted not in (None, "auto", decision.value):
        return warned(text, values={"value": decision.value})
    return passed(text)


@check(
    "PROC-02",
    "no CUDA in the starting process",
    why="CUDA does not survive a fork: the children fail at their first call",
    expected="CUDA untouched where workers are forked",
    remedy=Remedy(
        bare_metal="--start-method spawn, or use CUDA only after the workers are started"
    ),
)
def cuda_in_parent(context: CheckContext) -> Finding:
    """Looks whether this process has CUDA initialised, or an NVIDIA device open.

    Only a forked start suffers; for the others it is said.
    """
    opened = sorted(
        {
            target
            for number in context.files.names("/proc/self/fd")
            if (target := context.files.target(f"/proc/self/fd/{number}")).startswith(
                ("/dev/nvidia-uvm", "/dev/nvidia0")
            )
        }
    )
    if not (context.process.cuda_initialized or opened):
        return passed("CUDA is untouched")
    text = f"CUDA is in use ({', '.join(opened) or context.process.cuda_initialized_by or 'torch'})"
    if _asks_for_fork(context):
        return failed(text)
    return passed(f"{text}, which does not matter to {context.plan.start_method.value}")


@check(
    "PROC-03",
    "one thread before a fork",
    why="a lock that another thread holds stays locked for ever in a forked child",
    expected="one thread where workers are forked",
    remedy=Remedy(
        bare_metal="--start-method spawn, or set OMP_NUM_THREADS=1 before the first import of torch"
    ),
)
def threads_before_fork(context: CheckContext) -> Finding:
    """Counts the threads of the system in this process; the doctor's own do not count.

    The pools of libraries (OpenMP after one matrix product) are seen here, not by Python.
    """
    count = context.process.num_threads
    if count > 1 and _asks_for_fork(context):
        return warned(plural(count, "thread"))
    return passed(plural(count, "thread"))


def _asks_for_fork(context: CheckContext) -> bool:
    return "fork" in (context.plan.config.start_method, context.plan.start_method.value)


@check(
    "PROC-04",
    "main module can be imported again",
    why="each spawned child would start everything again",
    expected="an `if __name__ == '__main__':` guard in the main module",
    remedy=Remedy(
        bare_metal="put the start of the engine below  if __name__ == '__main__':  in the script",
    ),
)
def main_guard(context: CheckContext) -> Finding:
    """Looks for the guard in the main module, where vcli is used as a library.

    vcli's own children start in a module of their own, so the command line never needs it.
    """
    if context.process.main_has_guard is None:
        return skipped("no main module")
    if context.process.main_has_guard:
        return passed("guarded")
    if context.plan.start_method.value != "spawn":
        return passed(f"no guard, and {context.plan.start_method.value} does not need one")
    return failed("the main module has no guard")


CHECKS = (start_method, cuda_in_parent, threads_before_fork, main_guard)
