"""The real HTTP server in a thread, over a fake engine core: for tests with real clients."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvloop

from tests.support.fake_core import FakeCore
from vcli.runtime.engine.async_engine import AsyncEngine
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.server.api_server import ApiServer
from vcli.runtime.server.app import build_app
from vcli.runtime.server.listen import bind_listener, url_of
from vcli.runtime.server.metrics import ServerMetrics

NAME = "tiny"


@dataclass
class Serving:
    """A running server and what is behind it."""

    core: FakeCore
    engine: AsyncEngine
    server: ApiServer
    url: str
    loop: asyncio.AbstractEventLoop
    client: openai.OpenAI
    http: httpx.Client
    thread: threading.Thread

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the server's event loop."""
        done: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(function()))
        return done.result(10)


@contextlib.contextmanager
def serving_core(
    core: FakeCore,
    tokenizer: Tokenizer,
    *,
    max_model_len: int = 200,
    default_sampling: dict[str, float] | None = None,
) -> Iterator[Serving]:
    """A server on a free port until the block ends."""
    ready: Future[tuple[AsyncEngine, ApiServer, str, asyncio.AbstractEventLoop]] = Future()

    async def main() -> None:
        metrics = ServerMetrics(NAME)
        engine = AsyncEngine(
            core.client_socket,
            tokenizer,
            max_model_len=max_model_len,
            default_sampling=default_sampling,
            observer=metrics,
        )
        await engine.start()
        app = build_app(
            engine,
            served_name=NAME,
            metrics=metrics,
            server_info={"plan": {"world_size": 1}},
            version="1.2.3",
        )
        listener = bind_listener("127.0.0.1", 0)
        server = ApiServer(app, listener)
        ready.set_result((engine, server, url_of(listener), asyncio.get_running_loop()))
        await server.serve()
        await engine.close()

    thread = threading.Thread(target=lambda: uvloop.run(main()), name="server")
    with core:
        thread.start()
        engine, server, url, loop = ready.result(10)
        try:
            with (
                openai.OpenAI(
                    base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10
                ) as client,
                httpx.Client(base_url=url, timeout=10) as http,
            ):
                yield Serving(core, engine, server, url, loop, client, http, thread)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(server.stop_now)
            thread.join(10)
            assert not thread.is_alive()
