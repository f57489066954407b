"""Shared memory, locked memory, files, threads, memory of the host."""

from typing import Final

from vcli.diagnostics.symptoms.progress import SERVES
from vcli.diagnostics.symptoms.symptom import Sign, Symptom

_CREATE_SEGMENT: Final = Sign(
    "Error while creating shared memory segment", r"memory segment \S+ \(size (?P<size>\d+)\)"
)
_MORE_SHM: Final = (
    "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at "
    "/dev/shm; remove what dead processes left: vcli doctor lim-03"
)

LIMITS: Final = (
    Symptom(
        name="nccl-shm-invalid",
        title="NCCL reports an invalid argument where /dev/shm is full",
        signs=(_CREATE_SEGMENT,),
        also=((Sign("invalid argument", r"NCCL WARN Cuda failure (?:\d+ )?'invalid argument'"),),),
        cause="/dev/shm has no room for another segment of {size} bytes; 'invalid argument' "
        "means that here",
        remedy=_MORE_SHM,
        check="LIM-01",
        reports="nccl #1518",
    ),
    Symptom(
        name="nccl-shm-full",
        title="NCCL finds no room in /dev/shm",
        signs=(
            Sign("posix_fallocate failed", r"NCCL WARN.*posix_fallocate failed ?: No space left"),
            Sign("failed to extend /dev/shm/nccl", r"NCCL WARN.*extend /dev/shm/nccl"),
            _CREATE_SEGMENT,
        ),
        cause="/dev/shm is full; in a container it has 64 MiB unless told otherwise, and NCCL "
        "takes about 10 MiB per pair of ranks and channel",
        remedy=_MORE_SHM,
        check="LIM-01",
        reports="nccl #290, #525, #342",
    ),
    Symptom(
        name="nccl-shm-attach",
        title="ranks of one host do not share /dev/shm",
        signs=(
            Sign(
                "Error while attaching to shared memory segment",
                r"segment /dev/shm/nccl-.*(?:No such file|\(size \d+\)$)",
            ),
        ),
        cause="a rank looked for the segment of another and did not find it: they take each other "
        "for neighbours on one host, but are in different containers; or it came too late",
        remedy="one container for all ranks of a host, or --ipc=host for each, or a different "
        "NCCL_HOSTID in each",
        reports="nccl #2190, vllm #18831",
    ),
    Symptom(
        name="shm-unusable",
        title="shared memory cannot be had",
        signs=(
            Sign("might be caused by insufficient shared memory (shm)"),
            Sign("workers are out of shared memory"),
            Sign("unable to ", r"unable to (?:open|mmap|resize|write to).*</?torch_\d"),
            Sign("No space left on device", r"No space left on device:? '?/(?:dev/shm/|psm_)"),
        ),
        cause="/dev/shm is full or cannot be written",
        remedy=_MORE_SHM,
        check="LIM-02",
    ),
    Symptom(
        name="barrier-without-shm",
        title="a barrier hangs, and only the kernel's age was warned of",
        signs=(
            Sign("Watchdog caught collective operation timeout", r"OpType=(?:ALLREDUCE|BARRIER)"),
            Sign("DUE TO TIME LIMIT"),
        ),
        also=((Sign("below the recommended minimum of 5.5.0"),),),
        cause="on such nodes shared memory is often switched off, and the ranks of a node meet "
        "in /dev/shm; the warning about the kernel points elsewhere",
        remedy="vcli doctor lim-02 tells whether /dev/shm can be written; NCCL_SHM_DISABLE=1 "
        "goes without it, more slowly",
        check="LIM-02",
        reports="accelerate #1929",
    ),
    Symptom(
        name="locked-memory",
        title="too little memory may be locked for RDMA",
        signs=(
            Sign("ibv_reg_mr_iova2 failed", r"failed.*(?:Cannot allocate memory|errno 12)"),
            Sign("ibv_reg_mr failed", r"failed.*(?:Cannot allocate memory|errno 12)"),
            Sign("ibv_create_cq failed", r"failed.*Cannot allocate memory"),
            Sign("ibv_create_qp failed", r"failed.*Cannot allocate memory"),
        ),
        cause="ulimit -l is too low: NCCL over InfiniBand locks the memory that it sends from",
        remedy="docker run --ulimit memlock=-1; hosts: memlock unlimited in "
        "/etc/security/limits.conf, then log in again; Slurm: "
        "PropagateResourceLimitsExcept=MEMLOCK",
        check="LIM-04",
        reports="nccl-tests #206",
    ),
    Symptom(
        name="open-files",
        title="too many open files",
        signs=(
            Sign(
                "Too many open files",
                r"^(?!.*\blike\b)(?=.*(?:[Ee]rror|errno|[Ff]ailed|exception)).*Too many open files",
            ),
        ),
        cause="the limit of open files (ulimit -n) is reached: each connection and queue takes one",
        remedy="ulimit -n 65536 before the start; docker run --ulimit nofile=65536:65536",
        check="LIM-05",
        reports="vllm #7920",
    ),
    Symptom(
        name="threads",
        title="no more threads can be started",
        signs=(
            Sign("pthread_create", r"pthread_create(?: failed)?.*: Resource temporarily unavailab"),
            Sign("can't start new thread", r"RuntimeError: can't start new thread"),
            Sign("libgomp: Thread creation failed"),
            Sign("fork: retry: Resource temporarily unavailable"),
            Sign("what():  Resource temporarily unavailable"),
        ),
        cause="a limit of processes and threads is reached (ulimit -u, or the control group's "
        "pids.max)",
        remedy="docker run --pids-limit=-1, podPidsLimit of the kubelet, or ulimit -u; fewer "
        "threads: OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1, and no Ray on one node",
        check="LIM-06",
        reports="vllm #6295",
    ),
    Symptom(
        name="killed-for-memory",
        title="the kernel killed a process for memory",
        signs=(
            Sign(
                " of memory: Killed process", r"Killed process (?P<pid>\d+)(?: \((?P<who>[^)]+))?"
            ),
            Sign("oom_kill event", r"slurmstepd: error: Detected \d+ oom[_-]kill event"),
            Sign("OOMKilled", r"(?:[Rr]eason\W+OOMKilled|\"OOMKilled\": true)"),
        ),
        cause="the memory of the host, or of its control group, was full; the process that was "
        "killed could not say so itself",
        remedy="raise the memory limit (docker -m, resources.limits.memory, --mem of Slurm), or "
        "load with fewer ranks at once",
        check="HOST-05",
    ),
    Symptom(
        name="memory-policy",
        title="memory cannot be bound to a NUMA node",
        signs=(
            Sign("set_mempolicy: Operation not permitted"),
            Sign("setting membind: Operation not permitted"),
            Sign("numa_migrate_pages failed. errno: 1"),
        ),
        ended_by=SERVES,
        cause="the container may not set a memory policy; numactl then ends before Python starts, "
        "so there is no traceback",
        remedy="docker run --cap-add SYS_NICE (or --security-opt seccomp=unconfined), or start "
        "without --numa-bind",
        check="NUMA-03",
        reports="vllm #24016, PR #45438",
    ),
    Symptom(
        name="disk-full",
        title="the disk is full",
        signs=(Sign("[Errno 28] No space left on device"),),
        cause="a file could not be written: a cache, a download, or a temporary file",
        remedy="df -h names the file system; point HF_HOME, TRITON_CACHE_DIR or TMPDIR elsewhere",
        check="HOST-07",
    ),
)
