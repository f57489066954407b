"""Lines that follow from a failure somewhere else."""

from typing import Final

from vcli.diagnostics.symptoms.progress import SERVES
from vcli.diagnostics.symptoms.symptom import Role, Sign, Symptom

_FIRST_ERROR: Final = "look for the first error of any rank, here or in the logs of the others"

CONSEQUENCES: Final = (
    Symptom(
        name="reader-late",
        title="a worker has not read its messages for a minute",
        role=Role.CONSEQUENCE,
        signs=(
            Sign("No available shared memory broadcast block"),
            Sign("No available block found in 60 second"),
        ),
        min_hits=2,
        ended_by=SERVES,
        cause="every hang looks like this: one worker is stuck, mostly in a collective that "
        "another never entered, or in a long compilation",
        remedy="py-spy dump --pid <each worker> shows which one stands elsewhere; "
        "NCCL_DEBUG=INFO and vcli doctor link tell about copies between GPUs",
        reports="vllm #46611, #27313",
    ),
    Symptom(
        name="collective-timeout",
        title="a collective operation timed out",
        role=Role.CONSEQUENCE,
        signs=(Sign("Watchdog caught collective operation timeout"),),
        cause="one rank did not come to it: it failed, hangs, or is in another operation",
        remedy="the rank whose last operation has the lowest SeqNum is the one to look at; "
        "TORCH_FR_BUFFER_SIZE=2000 records them",
    ),
    Symptom(
        name="call-timeout",
        title="the workers did not answer a call in time",
        role=Role.CONSEQUENCE,
        signs=(Sign("RPC call to ", r"RPC call to \w+ timed out"),),
        cause="at least one worker is stuck or gone",
        remedy="py-spy dump --pid <each worker> shows which one stands elsewhere",
        reports="vllm #41725",
    ),
    Symptom(
        name="engine-dead",
        title="the engine has died",
        role=Role.CONSEQUENCE,
        signs=(
            Sign("EngineDeadError"),
            Sign("Engine core initialization failed"),
            Sign("WorkerProc initialization failed due to an exception in a background process"),
            Sign("Engine loop is not running"),
            Sign("died unexpectedly, shutting down executor"),
        ),
        cause="a worker or the engine core failed first; this line only tells that it is gone",
        remedy=_FIRST_ERROR,
    ),
    Symptom(
        name="scheduler-dead",
        title="a scheduler process of SGLang has died",
        role=Role.CONSEQUENCE,
        signs=(
            Sign("scheduler is dead. Please check if there are relevant logs"),
            Sign("sigquit from a child process", r"[Rr]eceived sigquit from a child process"),
        ),
        cause="the process failed first; the parent only saw it end",
        remedy=_FIRST_ERROR,
    ),
    Symptom(
        name="worker-lost",
        title="a worker's process is gone",
        role=Role.CONSEQUENCE,
        signs=(
            Sign("ActorDiedError", r"(?:exceptions\.)?(?:Ray)?ActorDiedError"),
            Sign("RayActorError"),
            Sign("ChildFailedError: "),
            Sign("exitcode", r"failed \(exitcode: -?\d+\) local_rank: \d+"),
            Sign("Exited with exit code", r"srun: error: .*Exited with exit code [1-9]"),
            Sign("with signal Signals.SIGKILL", r"died with .*SIGKILL"),
        ),
        cause="it failed, or was killed; its own log has the reason",
        remedy=_FIRST_ERROR + "; exit -9 or 137: the kernel's log (dmesg) for memory",
    ),
    Symptom(
        name="communicator-aborted",
        title="NCCL gave up because another rank is gone",
        role=Role.CONSEQUENCE,
        signs=(
            Sign("NCCL communicator was aborted on rank"),
            Sign("ncclRemoteError: "),
            Sign("ncclUniqueId from [", r"got error: (?:Connection reset|Broken pipe|.*closed)"),
        ),
        cause="the error of NCCL that comes before it, on this rank or another, is the reason",
        remedy=_FIRST_ERROR + "; NCCL_DEBUG=WARN prints NCCL's own",
    ),
    Symptom(
        name="nccl-call-failed",
        title="a call to NCCL failed on this rank",
        role=Role.CONSEQUENCE,
        signs=(Sign("ncclSystemError: "), Sign("ncclUnhandledCudaError: ")),
        cause="the system or CUDA refused NCCL something; the line says which kind, not what",
        remedy="NCCL_DEBUG=WARN prints NCCL's own error, with what it asked for; 'Last error' "
        "below the line may have it, too",
    ),
    Symptom(
        name="connection-closed",
        title="the other end of a connection is gone",
        role=Role.ECHO,
        signs=(
            Sign("Connection was likely closed. Did the remote server shutdown or crash"),
            Sign("Connection closed by remote peer"),
            Sign(" closed by peer", r"gloo/transport/tcp.*[Cc]onnection closed by peer"),
            Sign(" reset by peer", r"(?:gloo/|TCPStore|SocketImpl).*reset by peer"),
            Sign("Broken pipe", r"(?:BrokenPipeError|SocketImpl|TCPStore|sendBytes).*Broken pipe"),
        ),
        cause="the process at the other end has ended",
        remedy=_FIRST_ERROR,
    ),
    Symptom(
        name="others-stopped",
        title="the launcher stops the other ranks",
        role=Role.ECHO,
        signs=(
            Sign("closing signal SIGTERM"),
            Sign("Killing local vLLM worker processes"),
            Sign("died, exit code: -15"),
            Sign("Job step aborted: Waiting up to"),
            Sign("Terminated by signal 15"),
        ),
        cause="one rank ended, so the launcher ends the others",
        remedy=_FIRST_ERROR,
    ),
)
