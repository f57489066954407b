"""A served fake core that answers with a fixed text."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.support.fake_core import FakeCore
from tests.support.serving_core import Serving, serving_core
from tests.support.tiny_tokenizer import tiny_tokenizer
from vcli.runtime.engine.tokenizer import Tokenizer

TEXT = "Hello, wörld! 🙂 STOP and more"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def text() -> str:
    return TEXT


@pytest.fixture
def start(tokenizer: Tokenizer) -> Callable[..., AbstractContextManager[Serving]]:
    """Starts a server whose core holds every request after `holds_after` tokens."""

    def begin(holds_after: int | None = None, **options: object) -> AbstractContextManager[Serving]:
        core = FakeCore(lambda request: tokenizer.encode(TEXT), holds_after=holds_after)
        return serving_core(core, tokenizer, **options)

    return begin


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Serving]:
    """One server for all tests of a file that leave it well."""
    core = FakeCore(lambda request: tokenizer.encode(TEXT))
    with serving_core(core, tokenizer) as serving:
        yield serving


@pytest.fixture
def held(start: Callable[..., AbstractContextManager[Serving]]) -> Iterator[Serving]:
    """A server whose requests stay open after five tokens."""
    with start(holds_after=5) as serving:
        yield serving
