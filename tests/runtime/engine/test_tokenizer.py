"""Token ids and chat prompts equal those of transformers' tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from tests.support.tiny_tokenizer import CHAT_TEMPLATE, END, START, tiny_tokenizer, write_tokenizer
from vcli.runtime.engine.tokenizer import Tokenizer
from vcli.runtime.errors import RequestError
from vcli.topology.errors import ConfigError

TEXTS = [
    "hello world",
    "",
    "  two  spaces\n\ttab",
    "naïve 日本語 🙂‍↔️",
    "<|im_end|> <|end|>",
    "a" * 300,
]
CHATS = [
    [{"role": "user", "content": "What is 2+2?"}],
    [
        {"role": "system", "content": "Be <brief> & 'nice'."},
        {"role": "user", "content": "日本"},
        {"role": "assistant", "content": "🙂"},
        {"role": "user", "content": ""},
    ],
]
#: uses the helpers that real templates use
RICH_TEMPLATE = """\
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {% generation %}{{ bos_token }}{{ message | tojson }}{% endgeneration %}
{% endfor %}
{{ ns.count }}{{ eos_token if add_generation_prompt }}{{ tools is none }}{{ extra | default('-') }}
"""


def reference(folder: Path) -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def test_demo_model_gives_transformers_ids(demo_model: Path) -> None:
    ours, theirs = Tokenizer.from_folder(demo_model), reference(demo_model)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )
    for chat in CHATS:
        for add in (True, False):
            assert ours.encode_messages(chat, add_generation_prompt=add) == (
                theirs.apply_chat_template(chat, add_generation_prompt=add, return_dict=False)
            )
    assert theirs.eos_token_id in ours.eos_token_ids


@pytest.mark.parametrize("adds_bos", [True, False])
def test_tokenizer_json_alone_decides_on_added_tokens_as_for_transformers(
    tmp_path: Path, adds_bos: bool
) -> None:
    write_tokenizer(tmp_path, add_bos_token=not adds_bos, add_eos_token=True)
    if adds_bos:
        path = str(tmp_path / "tokenizer.json")
        backend = tokenizers.Tokenizer.from_file(path)
        backend.post_processor = TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, backend.token_to_id(START))]
        )
        backend.save(path)
    ours, theirs = Tokenizer.from_folder(tmp_path), reference(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert (ours.encode("a")[0] == ours.backend.token_to_id(START)) is adds_bos


def test_template_with_all_helpers_renders_as_transformers_does(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template=RICH_TEMPLATE)
    ours, theirs = Tokenizer.from_folder(tmp_path), reference(tmp_path)
    chat = [*CHATS[1], {"role": "skip", "content": "x"}, {"role": "tool", "content": None}]
    for extra in ({}, {"extra": "more"}):
        assert ours.encode_messages(chat, arguments=extra) == theirs.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, **extra
        )


@pytest.mark.parametrize("form", ["string", "named", "file"])
def test_chat_template_is_found_in_each_form(tmp_path: Path, form: str) -> None:
    config: dict[str, object] = {"chat_template": CHAT_TEMPLATE}
    if form == "named":
        config["chat_template"] = [
            {"name": "tool_use", "template": "wrong"},
            {"name": "default", "template": CHAT_TEMPLATE},
        ]
    elif form == "file":
        config["chat_template"] = "wrong"
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = tiny_tokenizer(tmp_path, **config)
    prompt = tokenizer.decode(tokenizer.encode_messages(CHATS[0]), skip_special_tokens=False)
    assert prompt == f"{START}user\nWhat is 2+2?{END}\n{START}assistant\n"


def test_special_token_as_object_and_eos_ids_of_all_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token={"content": END, "special": True})
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20, "do_sample": True})
    )
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 8}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == (tokenizer.backend.token_to_id(END), 7, 8)
    assert tokenizer.default_sampling == {"temperature": 0.6, "top_k": 20}


def test_token_that_only_the_configuration_names_is_added_as_transformers_does(
    tmp_path: Path,
) -> None:
    write_tokenizer(
        tmp_path,
        pad_token="<|pad|>",
        added_tokens_decoder={"261": {"content": "<|tool|>", "special": False}},
    )
    ours, theirs = Tokenizer.from_folder(tmp_path), reference(tmp_path)
    text = "a<|tool|>b<|pad|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == "a<|tool|>b"


def test_no_chat_template_is_a_wrong_request_that_says_so(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_messages(CHATS[0])


def test_template_that_refuses_is_a_wrong_request_with_its_words(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        tiny_tokenizer(tmp_path, chat_template=template).encode_messages(CHATS[0])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ 'a' * 'b' }}",
    ],
)
def test_template_cannot_reach_python_nor_change_the_messages(tmp_path: Path, attack: str) -> None:
    tokenizer = tiny_tokenizer(tmp_path, chat_template=attack)
    with pytest.raises(RequestError, match="refused"):
        tokenizer.encode_messages(CHATS[0])


def test_template_with_a_syntax_error_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        tiny_tokenizer(tmp_path, chat_template="a\n{% for %}")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_damaged_or_missing_tokenizer_is_a_configuration_error(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_token_bytes_are_exact_also_for_a_part_of_a_character(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    text = "é w🙂"
    assert b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text)) == (
        text.encode()
    )
    assert tokenizer.token_bytes(tokenizer.backend.token_to_id(END)) == END.encode()


def test_engine_and_server_need_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import vcli.runtime.engine.async_engine, vcli.runtime.server.api_server\n"
        "import vcli.runtime.server.app, vcli.runtime.server.listen\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
