"""The catalogue against logs: each report is recognised, none of the healthy logs is."""

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from vcli.cli.runtime_checks import registry
from vcli.cli.views.symptom_page import symptoms_page
from vcli.diagnostics.explain import Explanation, explain_log, explain_text
from vcli.diagnostics.symptoms import SYMPTOMS, Role, Sign, Symptom

FOLDER = Path(__file__).parent / "fixtures" / "explain"
HEALTHY = sorted((FOLDER / "healthy").glob("*.log"))
PAGE = Path(__file__).parents[2] / "docs" / "symptoms.md"

#: Log -> the symptom it shows. Named after the report whose failure it is, where there is one.
CAUSES = {
    "accelerate-1929": "barrier-without-shm",
    "accelerate-2328": "p2p-by-name",
    "cuda-oom": "gpu-out-of-memory",
    "engine-dead-alone": "engine-dead",
    "gloo-loopback": "gloo-loopback",
    "gpustack-4678": "compat-library",
    "host-oom": "killed-for-memory",
    "nccl-1170": "ib-names-differ",
    "nccl-1241": "duplicate-gpu",
    "nccl-1518": "nccl-shm-invalid",
    "nccl-1788": "nvls",
    "nccl-2013": "ib-rails",
    "nccl-2190": "nccl-shm-attach",
    "nccl-257": "iommu-hang",
    "nccl-290": "nccl-shm-full",
    "nccl-388": "nccl-connect-blocked",
    "nccl-426": "ib-completion",
    "nccl-tests-206": "locked-memory",
    "pytorch-107021": "rendezvous-without-host",
    "pytorch-107177": "rank-0-late",
    "pytorch-150532": "name-unresolvable",
    "pytorch-35710": "fabric-manager",
    "pytorch-53395": "rendezvous-alone",
    "pytorch-84803": "iommu",
    "ray-14535": "ray-object-store",
    "ray-44063": "ray-versions",
    "ray-46548": "ray-node-dead",
    "ray-63917": "ray-gang-split",
    "sglang-1509": "no-peer-access",
    "sglang-2561": "master-unreachable",
    "sglang-3204": "memory-error",
    "sglang-4233": "gpu-held",
    "sglang-836": "gloo-container",
    "sglang-868": "gloo-mesh",
    "shm-bus-error": "shm-unusable",
    "uvicorn-port": "port-taken",
    "vllm-10886": "model-not-on-node",
    "vllm-13388": "ray-placement-waits",
    "vllm-13521": "ray-address-family",
    "vllm-15217": "too-few-gpus",
    "vllm-16334": "rendezvous-alone",
    "vllm-20282": "mixed-gpus",
    "vllm-20305": "gpu-held",
    "vllm-24016": "memory-policy",
    "vllm-26028": "ray-too-few-gpus",
    "vllm-2652": "sizes-do-not-divide",
    "vllm-28572": "mixed-gpus",
    "vllm-39015": "port-taken",
    "vllm-41848": "visible-devices-uuid",
    "vllm-44878": "data-parallel-loopback",
    "vllm-46611": "reader-late",
    "vllm-4940": "forward-compatibility",
    "vllm-51513": "p2p-data-lost",
    "vllm-51986": "mnnvl-workspace",
    "vllm-52504": "nccl-known-fault",
    "vllm-58290": "communicator-incomplete",
    "vllm-6295": "threads",
    "vllm-7151": "cuda-after-fork",
    "vllm-7815": "ray-node-address",
    "vllm-7920": "open-files",
    "vllm-8735": "p2p-probe-stuck",
    "vllm-pr43095": "ray-two-addresses",
    "xid": "xid",
}
BAD_PORT = (
    "OSError: [Errno 98] Address already in use",
    "zmq.error.ZMQError: Address already in use (addr='tcp://10.0.0.1:5555')",
)


def explain(*lines: str) -> Explanation:
    return explain_log(["".join(f"{line}\n" for line in lines).encode()])


def names(explained: Explanation) -> list[str]:
    return [match.symptom.name for match in explained.matches]


def log(name: str) -> bytes:
    return (FOLDER / f"{name}.log").read_bytes()


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_cause_is_found_and_no_follower_is_told(name: str) -> None:
    explained = explain_log([log(name)])
    assert names(explained) == [CAUSES[name]]
    match = explained.matches[0]
    lines = re.sub(r"\x1b\[\d+m", "", log(name).decode()).replace("\t", " ").split("\n")
    for item in match.evidence:
        assert item.text.strip("…") in lines[item.line - 1]
    assert "{" not in match.cause + match.remedy


def test_every_log_of_the_folder_is_in_the_table() -> None:
    assert {path.stem for path in FOLDER.glob("*.log")} == set(CAUSES)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_log_shows_no_failure(path: Path) -> None:
    assert names(explain_log([path.read_bytes()])) == []


@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.parametrize(
    "prefix",
    [
        "\x1b[1;36m(Worker_TP3 pid=812)\x1b[0m ",
        "(node1 r12 Worker_PP1_TP3) ",
        "[rank12]: ",
        "12: ",
        "[1,12]<stderr>: ",
        "[pod/vllm-0/engine] 2025-11-03T14:02:11.100Z ",
        "vllm-1  | ",
        "Nov 03 14:02:11 gpu-1 engine[4101]: ",
    ],
)
def test_a_prefix_before_each_line_changes_nothing(name: str, prefix: str) -> None:
    lines = log(name).decode().split("\n")
    text = "\n".join(prefix + line for line in lines)
    assert names(explain_log([text.encode()])) == [CAUSES[name]]


@pytest.mark.parametrize("name", CAUSES)
def test_the_size_of_chunks_changes_nothing(name: str) -> None:
    data = log(name)
    cuts = random.Random(7).sample(range(len(data)), 40)
    borders = [0, *sorted(cuts), len(data)]
    chunks = [data[a:b] for a, b in pairwise(borders)]
    assert explain_log(chunks) == explain_log([data])


def test_colours_within_the_words_change_nothing() -> None:
    explained = explain(
        "a", "\x1b[31mOSError\x1b[0m: [Errno 98] \x1b[1mAddress\x1b[0m already in use"
    )
    assert names(explained) == ["port-taken"]
    assert "\x1b" not in explained.matches[0].evidence[0].text


def test_the_first_of_two_causes_is_told_first_whatever_the_catalogue_says() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert names(explain(*BAD_PORT, oom)) == ["port-taken", "gpu-out-of-memory"]
    assert names(explain(oom, *BAD_PORT)) == ["gpu-out-of-memory", "port-taken"]


def test_a_consequence_that_stands_first_does_not_hide_the_cause() -> None:
    explained = explain("vllm.v1.engine.exceptions.EngineDeadError: gone", "x", BAD_PORT[0])
    assert names(explained) == ["port-taken"]
    assert [match.symptom.name for match in explained.followers] == ["engine-dead"]


def test_an_echo_alone_is_no_failure() -> None:
    explained = explain(
        "[W TCPStore.cpp:125] recvValue failed on SocketImpl(fd=3): Connection was likely closed. "
        "Did the remote server shutdown or crash?",
        "Sending process 12 closing signal SIGTERM",
        "BrokenPipeError: [Errno 32] Broken pipe",
    )
    assert (explained.matches, explained.followers) == ((), ())


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA out of memory",
        "(Worker pid=7) ERROR 10-14 09:13:33 [x.py:6] torch.OutOfMemoryError: CUDA out of memory.",
        "torch.AcceleratorError: CUDA error: out of memory",
    ],
)
def test_a_full_gpu_is_found_without_the_size_that_was_asked_for(line: str) -> None:
    assert names(explain(line)) == ["gpu-out-of-memory"]


@pytest.mark.parametrize(
    "line",
    [
        "INFO retries after `RuntimeError: CUDA out of memory.` with half the batch",
        "WARNING: Found ulimit of 1024 and failed to automatically increase. This can cause fd "
        "limit errors like `OSError: [Errno 24] Too many open files`.",
        "get_mempolicy: Operation not permitted",
        "ras/client_support.cc:160 NCCL WARN Call to bind failed: Address already in use",
        "INFO Port 8000 is already in use, trying port 8001",
        "WARNING: The object store is using /tmp instead of /dev/shm because /dev/shm has only "
        "67108864 bytes available.",
        "[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97"
        " - Address family not supported by protocol).",
        "[W socket.cpp:601] [c10d] The IPv6 network addresses of (localhost, 51595) cannot be "
        "retrieved (gai error: -2 - Name or service not known).",
        "[c10d] The client socket has failed to connect to 10.0.0.1:29500 (errno: 111 - Connection "
        "refused).",
        "NCCL INFO Call to connect returned Connection refused, retrying",
        "DMAR: IOMMU enabled",
        "AMD-Vi: Interrupt remapping enabled",
        "Detected kernel version 4.18.0, which is below the recommended minimum of 5.5.0; this can "
        "cause the process to hang.",
        "INFO Waiting for creating a placement group of specs for 10 seconds. "
        "specs=[{'node:10.0.0.1': 0.001, 'GPU': 1.0}]",
    ],
)
def test_a_warning_that_healthy_engines_print_is_no_failure(line: str) -> None:
    assert names(explain(*[line] * 3)) == []


def test_what_went_on_afterwards_was_no_hang() -> None:
    late = "No available shared memory broadcast block found in 60 seconds."
    ready = "INFO:     Application startup complete."
    assert names(explain(late, late, ready)) == []
    assert names(explain(late, ready, late, late)) == ["reader-late"]
    assert names(explain(late, ready, late)) == []
    cache = "INFO generating GPU P2P access cache in /root/.cache/vllm/gpu_p2p_0,1.json"
    assert names(explain(cache, "INFO reading GPU P2P access cache from /root/x.json")) == []


def test_secrets_stay_out_of_the_evidence() -> None:
    explained = explain(f"HF_TOKEN=hf_abcdefghijklmnopqrstuv api_key='s3cr3t' {BAD_PORT[0]}")
    text = explained.matches[0].evidence[0].text
    assert "hf_abc" not in text
    assert "s3cr3t" not in text
    assert "Address already in use" in text


def test_a_long_line_is_cut_around_what_was_found() -> None:
    explained = explain("x " * 5000 + BAD_PORT[0] + " y" * 5000)
    text = explained.matches[0].evidence[0].text
    assert BAD_PORT[0] in text
    assert len(text) < 300


def test_a_progress_bar_before_the_words_is_left_out() -> None:
    explained = explain("loading 10%\rloading 20%\r" + BAD_PORT[0])
    assert explained.matches[0].evidence[0].text == BAD_PORT[0]


def test_utf_16_is_read() -> None:
    data = "".join(f"line {i}\r\n" for i in range(40)) + BAD_PORT[0] + "\r\n"
    explained = explain_log([data.encode("utf-16")])
    assert (names(explained), explained.matches[0].line) == (["port-taken"], 41)


def test_bytes_that_are_no_utf_8_are_read() -> None:
    explained = explain_log([b"caf\xe9 \xff\xfe\n", BAD_PORT[0].encode()])
    assert (names(explained), explained.matches[0].line) == (["port-taken"], 2)


def test_an_unknown_log_tells_the_first_rank_and_the_end_of_its_traceback() -> None:
    explained = explain(
        "(Worker_TP0 pid=11) INFO all is well, 0 errors",
        "(Worker_TP1 pid=12) ERROR 10-14 [w.py:7] Traceback (most recent call last):",
        '(Worker_TP1 pid=12) ERROR 10-14 [w.py:7]   File "a.py", line 3, in f',
        "(Worker_TP0 pid=11) ERROR 10-14 [w.py:9] KeyError: of another rank",
        "(Worker_TP1 pid=12) ERROR 10-14 [w.py:7]     g()",
        "(Worker_TP1 pid=12) ERROR 10-14 [w.py:7] ZeroDivisionError: division by zero",
    )
    first = explained.first_failure
    assert first is not None
    assert (first.line, first.speaker) == (6, "Worker_TP1 pid=12")
    assert first.text.endswith("ZeroDivisionError: division by zero")


def test_a_short_text_gives_causes_alone() -> None:
    match = explain_text(
        "Traceback ...\nRuntimeError: CUDA error: uncorrectable ECC error encountered"
    )
    assert match is not None
    assert match.symptom.check == "GPU-04"
    assert explain_text("EngineDeadError: gone") is None
    assert explain_text("") is None


def test_memory_and_work_do_not_grow_with_the_log() -> None:
    noise = b"".join(
        b"(Worker_TP%d) INFO step %d NCCL WARN retry, timeout\n" % (i % 8, i) for i in range(2000)
    )
    asked = 0

    def chunks():
        nonlocal asked
        for _ in range(300):
            asked += 1
            yield noise
        yield BAD_PORT[0].encode()

    explained = explain_log(chunks())
    assert asked == 300
    assert explained.num_lines == 600_001
    assert explained.matches[0].line == 600_001


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.name)
def test_a_symptom_names_a_check_that_exists_and_is_complete(symptom: Symptom) -> None:
    assert symptom.check is None or symptom.check in {check.id for check in registry().checks}
    assert symptom.title
    assert symptom.cause
    assert symptom.remedy
    assert all(sign.needle for sign in symptom.signs)


def test_names_are_unique() -> None:
    assert len({symptom.name for symptom in SYMPTOMS}) == len(SYMPTOMS)


def test_a_symptom_needs_its_context_and_its_number_of_hits() -> None:
    symptom = Symptom(
        name="s",
        title="t",
        cause="{a} of {b}",
        remedy="r",
        signs=(Sign("boom", r"boom (?P<a>\d)"),),
        also=((Sign("why"), Sign("because")),),
        min_hits=2,
    )

    def found(*lines: str) -> list[str]:
        data = "\n".join(lines).encode()
        return [match.cause for match in explain_log([data], symptoms=(symptom,)).matches]

    assert found("boom 1", "boom 2") == []
    assert found("because", "boom 1") == []
    assert found("boom 1", "boom 2", "because") == ["1 of B"]
    assert symptom.role is Role.CAUSE


def test_the_page_is_made_from_the_catalogue() -> None:
    assert PAGE.read_text() == symptoms_page(), "run scripts/make-check-pages"
