"""Why a node can't be reached: what the kernel says, and what listens there."""

import socket
import threading

from vcli.runtime.ipc.curve import job_key
from vcli.runtime.ipc.remote import NodeHub
from vcli.runtime.launch.reach import find_out


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reach = find_out("127.0.0.1", port)
    assert not reach.is_open
    assert "connection refused" in str(reach)


def test_a_node_is_known_by_its_greeting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hub = NodeHub(listener, job_key(None), lambda event: None)
        hub.start()
        reach = find_out("127.0.0.1", listener.getsockname()[1])
        hub.close()
    assert reach.is_node


def test_something_else_is_told_by_what_it_says_or_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "says nothing" in str(find_out("127.0.0.1", port))

    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        reach = find_out("127.0.0.1", server.getsockname()[1])
        thread.join()
    assert reach.is_open
    assert not reach.is_node
    assert "no vcli node" in str(reach)
