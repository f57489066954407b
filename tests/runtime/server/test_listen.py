"""The port is taken before anything else is started, and whoever has it is named."""

import os
import socket
import subprocess
import sys

import pytest

from vcli.runtime.server.listen import bind_listener, start_listening, url_of
from vcli.topology.errors import ConfigError, ExitStatus


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_port_zero_gives_a_free_port_and_its_url() -> None:
    with bind_listener("127.0.0.1", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{port_of(listener)}"
        with pytest.raises(ConnectionRefusedError), socket.socket() as client:
            client.connect(listener.getsockname())
        start_listening(listener)
        with socket.socket() as client:
            client.connect(listener.getsockname())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_usual_hosts_are_ipv4(host: str) -> None:
    with bind_listener(host, 0) as listener:
        assert listener.family == socket.AF_INET


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_with_and_without_brackets(host: str) -> None:
    try:
        listener = bind_listener(host, 0)
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error.message}")
    with listener:
        assert url_of(listener) == f"http://[::1]:{port_of(listener)}"


def test_listening_holder_is_named_with_pid_and_command() -> None:
    program = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with pytest.raises(ConfigError) as raised:
            bind_listener("127.0.0.1", port)
        holder.communicate("")
    assert f"port {port}" in raised.value.message
    assert f"pid {holder.pid} (python" in raised.value.message
    assert "--port" in raised.value.hint
    assert raised.value.exit_status == ExitStatus.USAGE


def test_second_server_cannot_take_a_port_that_is_bound_but_not_open_yet() -> None:
    """With SO_REUSEADDR on both sides Linux would let it, and it would fail minutes later."""
    with (
        bind_listener("127.0.0.1", 0) as first,
        pytest.raises(ConfigError, match="does not listen yet"),
    ):
        bind_listener("127.0.0.1", port_of(first))


def test_hint_names_a_port_that_is_free() -> None:
    with bind_listener("127.0.0.1", 0) as first:
        start_listening(first)
        with pytest.raises(ConfigError) as raised:
            bind_listener("127.0.0.1", port_of(first))
    free = int(raised.value.hint.rsplit(" ", 1)[1])
    with bind_listener("127.0.0.1", free) as second:
        assert port_of(second) == free


def test_connections_in_time_wait_do_not_hinder_a_restart() -> None:
    with bind_listener("127.0.0.1", 0) as first:
        start_listening(first)
        port = port_of(first)
        client = socket.create_connection(("127.0.0.1", port))
        server_side, _ = first.accept()
        server_side.close()  # the side that closes first waits in TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    with bind_listener("127.0.0.1", port) as second:
        start_listening(second)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("no.such.host.invalid", 8000, "no.such.host.invalid"),
        ("192.0.2.1", 8000, "192.0.2.1 is not an address of this machine"),
        ("127.0.0.1", 65536, "65536"),
        ("127.0.0.1", -1, "-1"),
        ("a" * 300, 8000, "is not known"),
        ("", 8000, "host '' is empty"),
        ("[]", 8000, "host '[]' is empty"),
    ],
)
def test_wrong_host_or_port_is_a_usage_error_with_a_hint(host: str, port: int, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        bind_listener(host, port)
    assert words in raised.value.message
    assert raised.value.hint


@pytest.mark.process
def test_privileged_port_is_a_usage_error() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to drop privileges to be sure not to have them")
    program = (
        "import os\n"
        "from vcli.runtime.server.listen import bind_listener\n"
        "from vcli.topology.errors import ConfigError\n"
        "''.encode('idna')  # loads what the stripped process may not read any more\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: bind_listener('127.0.0.1', 80)\n"
        "except ConfigError as error: print(error.message, '|', error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    if not done.stdout and done.returncode == 0:
        pytest.skip("this system lets everybody bind port 80")
    assert "privileged" in done.stdout, done.stderr
    assert "--port" in done.stdout
