"""Objects through the codec, alone and through a ring."""

import functools
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from vcli.runtime.ipc.broadcast import BroadcastReader, BroadcastWriter
from vcli.runtime.ipc.codec import OUT_OF_BAND_BYTES, CodecError, decode, encode
from vcli.runtime.messages import (
    ModelRunnerOutput,
    NewRequestData,
    RunningRequests,
    SchedulerOutput,
    TokenLogprobs,
)
from vcli.runtime.sampling_params import SamplingParams


@pytest.fixture
def queue():
    writer = BroadcastWriter.create(1, 1 << 20, "codec")
    reader = BroadcastReader.attach(writer.reader_handle(0))
    yield writer, reader
    reader.close()
    writer.close()


@dataclass
class Thing:
    name: str
    values: np.ndarray


def scheduler_output() -> SchedulerOutput:
    new = NewRequestData(
        number=3,
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=[7],
        sampling=SamplingParams(temperature=0.5, stop_token_ids=(2,)),
    )
    running = RunningRequests(
        numbers=[1, 2], token_ids=[9, -1], num_computed_tokens=[5, 6], new_block_ids=[[], [8]]
    )
    return SchedulerOutput(
        step=5, new=[new], running=running, num_scheduled_tokens=[3, 1, 1], removed=[0]
    )


def runner_output() -> ModelRunnerOutput:
    logprobs = TokenLogprobs(7, -0.25, [7, 8], [-0.25, -2.0])
    return ModelRunnerOutput(step=5, numbers=[3], token_ids=[7], logprobs=[logprobs, None])


@pytest.mark.parametrize("message", [scheduler_output(), runner_output()])
def test_messages_of_a_step_are_msgpack_and_hold_no_pickle(message):
    buffers = encode(message)
    assert len(buffers) == 1
    assert buffers[0][0] != pickle.dumps(0, 5)[0]
    assert decode(buffers) == message


def test_a_running_request_costs_few_bytes():
    numbers = list(range(256))
    running = RunningRequests(
        numbers=numbers,
        token_ids=[100_000] * 256,
        num_computed_tokens=[4_000] * 256,
        new_block_ids=[[] for _ in numbers],
    )
    output = SchedulerOutput(step=1, new=[], running=running, num_scheduled_tokens=[1] * 256)
    assert len(encode(output)[0]) / 256 < 14


@pytest.mark.parametrize(
    "value",
    [
        None,
        (1, "a", b"b" * 100, None, 2.5, True),
        (),
        {"a": [1, (2, 3)], "b": {4}},
        ("execute", (1, 2), {"k": "v"}),
        2**80,
        ValueError("broken"),
    ],
    ids=repr,
)
def test_ordinary_objects_come_back(value):
    back = decode(encode(value))
    assert repr(back) == repr(value)


def test_large_arrays_travel_out_of_band_and_small_ones_do_not():
    large, small = np.arange(OUT_OF_BAND_BYTES, dtype=np.uint8), np.arange(10)
    buffers = encode(Thing("t", large))
    assert len(buffers) == 2
    assert len(buffers[0]) < 500
    assert np.shares_memory(np.frombuffer(buffers[1], np.uint8), large)
    assert len(encode(Thing("t", small))) == 1


@pytest.mark.parametrize("dtype", [np.int64, np.float32, object, [("a", "i4"), ("b", "f8")]])
def test_strided_arrays_come_back_equal_and_their_bytes_go_out_of_band(dtype):
    sent = np.zeros((300, 400), dtype)
    sent[:] = np.arange(120_000).reshape(300, 400).astype(dtype)
    strided = sent[::3, 10::7]
    buffers = encode(strided)
    assert len(buffers) == (1 if dtype is object else 2)
    assert (decode(buffers) == strided).all()


def test_a_thousand_arrays_fill_the_list_of_buffers_and_the_rest_stays_in_the_pickle():
    arrays = [np.full(OUT_OF_BAND_BYTES, i % 251, np.uint8) for i in range(1030)]
    buffers = encode(arrays)
    assert len(buffers) == 1025
    assert all((got == sent).all() for got, sent in zip(decode(buffers), arrays, strict=True))


def test_a_copy_is_writable_and_survives_the_record(queue):
    writer, reader = queue
    sent = np.arange(20_000, dtype=np.int32)
    writer.send(encode(("x", sent)))
    _, got = decode(reader.recv())
    writer.send([b"z" * 100_000] * 4)
    reader.recv()
    got[0] += 0
    assert (got == sent).all()


def test_without_copy_an_array_is_a_read_only_view_of_the_ring(queue):
    writer, reader = queue
    writer.send(encode(np.arange(20_000, dtype=np.int64)))
    got = decode(reader.recv(), copy=False)
    assert (got == np.arange(20_000)).all()
    assert not got.flags.writeable
    assert not got.flags.owndata
    assert got.ctypes.data % 64 == 0


def test_an_array_larger_than_the_ring_comes_writable_without_a_second_copy(queue):
    writer, reader = queue
    reader_done = []
    thread = threading.Thread(target=lambda: reader_done.append(decode(reader.recv(10.0))))
    thread.start()
    sent = np.arange(1_000_000, dtype=np.int64)
    writer.send(encode(sent), 10.0)
    thread.join(10.0)
    assert (reader_done[0] == sent).all()
    assert reader_done[0].flags.writeable


def test_functions_without_an_importable_name_go_by_value():
    offset = 10

    def add(x):
        return x + offset

    assert decode(encode(add))(1) == 11
    assert decode(encode((lambda: 3,)))[0]() == 3
    assert decode(encode(functools.partial(add, 5)))() == 15


def test_importable_functions_go_by_name():
    assert len(encode(functools.reduce)[0]) < 60
    assert decode(encode(functools.reduce)) is functools.reduce


def test_a_function_of_main_runs_in_a_process_that_cannot_import_it():
    script = (
        "import sys\n"
        "from vcli.runtime.ipc.codec import encode\n"
        "class Doubler:\n"
        "    def __init__(self, x): self.x = x\n"
        "    def value(self): return 2 * self.x\n"
        "def method(x): return Doubler(x).value()\n"
        "sys.stdout.buffer.write(encode((method, Doubler(4)))[0])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    method, doubler = decode([run.stdout])
    assert (method(3), doubler.value()) == (6, 8)


@pytest.mark.parametrize("buffers", [[], [b""], [b"\x07abc"]])
def test_what_encode_did_not_make_is_refused(buffers):
    with pytest.raises(CodecError):
        decode(buffers)


def test_the_codec_does_not_import_torch():
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from vcli.runtime.ipc.codec import decode, encode\n"
        "print(decode(encode({'a': [1]})))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "{'a': [1]}\n"


def tensors():
    torch = pytest.importorskip("torch")
    base = torch.arange(12_000, dtype=torch.float32).reshape(120, 100)
    return {
        "float32": base,
        "bfloat16": base.to(torch.bfloat16),
        "float8": base.to(torch.float8_e4m3fn),
        "bool": base > 5,
        "strided": base[::2, 1::3],
        "transposed": base.t(),
        "expanded": base[:, :1].expand(120, 50),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7, dtype=torch.int64),
        "conjugate": torch.complex(base, -base).conj(),
        "with gradient": torch.ones(3000, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(3000)),
    }


@pytest.mark.parametrize("copy", [True, False])
def test_tensors_of_every_kind_come_back_equal(queue, copy):
    torch = pytest.importorskip("torch")
    writer, reader = queue
    for name, sent in tensors().items():
        writer.send(encode({"t": sent}), 5.0)
        got = decode(reader.recv(5.0), copy=copy)["t"]
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape), name
        assert got.requires_grad == sent.requires_grad, name
        assert type(got) is type(sent), name
        as_bytes = [t.detach().resolve_conj().contiguous().reshape(-1) for t in (got, sent)]
        assert torch.equal(*(t.view(torch.uint8) for t in as_bytes)), name
        reader.release()


@pytest.mark.parametrize("copy", [True, False])
def test_a_tensor_that_came_is_writable_memory_of_its_own(queue, copy):
    torch = pytest.importorskip("torch")
    writer, reader = queue
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        sent = torch.ones(100, 300).to(dtype)[::2, ::3]
        writer.send(encode(sent), 5.0)
        got = decode(reader.recv(5.0), copy=copy)
        reader.release()
        writer.send([b"\xff" * 200_000] * 3, 5.0)
        reader.recv(5.0)
        assert torch.equal(got.float(), sent.float())
        got.fill_(2.0)
        assert got.float().sum() == 2 * got.numel()


def test_a_large_tensor_is_not_copied_into_the_pickle():
    torch = pytest.importorskip("torch")
    sent = torch.arange(100_000, dtype=torch.bfloat16)
    first, data = encode(sent)
    assert len(first) < 300
    assert np.frombuffer(data, np.uint8).ctypes.data == sent.data_ptr()
