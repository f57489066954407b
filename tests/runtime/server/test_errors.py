"""Wrong requests: the right status, OpenAI's error body, the field by name."""

from pathlib import Path

import openai
import pytest

from tests.support.fake_core import FakeCore
from tests.support.serving_core import NAME, Serving, serving_core
from tests.support.tiny_tokenizer import tiny_tokenizer
from vcli.runtime.server.body import MAX_BODY_BYTES

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": NAME, "prompt": "x"}


def error_of(served: Serving, path: str, body: dict[str, object], status: int = 400) -> dict:
    answer = served.post(path, **body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 1000),
        ("max_tokens", 0),
        ("max_tokens", 500),
        ("min_tokens", 500),
        ("seed", 2**70),
        ("stop", [""]),
        ("stop_token_ids", [99999]),
        ("stop_token_ids", [2**64]),
        ("stop_token_ids", [1] * 1025),
        ("stop", ["a"] * 65),
        ("stop", "a" * 5000),
        ("top_k", 2**31),
        ("top_k", 2**64),
        ("top_k", 10**4000),
        ("max_tokens", 2**64),
        ("min_tokens", 2**64),
        ("n", 2**64),
        ("temperature", 10**400),
        ("truncate_prompt_tokens", 5),
        ("cache_salt", "x"),
        ("presence_penalty", 3),
        ("logit_bias", {"5": 1}),
        ("best_of", 2),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_wrong_or_unsupported_field_is_named_on_both_routes(
    served: Serving, field: str, value: object
) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        error = error_of(served, path, {**body, field: value})
        assert error["param"] == field
        assert field in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], []),
        ("tool_choice", "required", "none"),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("modalities", ["audio"], ["text"]),
        ("top_logprobs", 3, None),
        ("continue_final_message", True, False),
    ],
)
def test_unsupported_chat_field_is_refused_unless_it_asks_for_nothing(
    served: Serving, field: str, value: object, neutral: object
) -> None:
    assert error_of(served, "/v1/chat/completions", {**CHAT, field: value})["param"] == field
    for harmless in (neutral, None):
        answer = served.post("/v1/chat/completions", **CHAT, **{field: harmless})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [("echo", True, False), ("suffix", "end", ""), ("best_of", 3, 1), ("logprobs", 50, 0)],
)
def test_unsupported_completion_field_is_refused_unless_it_asks_for_nothing(
    served: Serving, field: str, value: object, neutral: object
) -> None:
    assert error_of(served, "/v1/completions", {**TEXT, field: value})["param"] == field
    assert served.post("/v1/completions", **TEXT, **{field: neutral}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/v1/completions", {"model": NAME}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": ""}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": []}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": [[]]}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": [-5]}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": [1] * 200}, "prompt"),
        ("/v1/completions", {**TEXT, "prompt": 5}, "prompt"),
        ("/v1/completions", {**TEXT, "stop": 5}, "stop"),
        ("/v1/completions", {**TEXT, "stop_token_ids": [True]}, "stop_token_ids[0]"),
        ("/v1/completions", {**TEXT, "temperature": "hot"}, "temperature"),
        ("/v1/chat/completions", {"model": NAME, "messages": []}, "messages"),
        (
            "/v1/chat/completions",
            {"model": NAME, "messages": [{"content": "x"}]},
            "messages[0].role",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_malformed_body_is_400_and_names_the_place(
    served: Serving, path: str, body: dict[str, object], parameter: str
) -> None:
    assert error_of(served, path, body)["param"] == parameter


def test_body_that_is_no_json_is_400(served: Serving) -> None:
    answer = served.http.post(
        "/v1/completions", content=b"{", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": True}, "n: must be a number, it is true"),
        ({"temperature": True}, "temperature: must be a number, it is true"),
        ({"temperature": "hot"}, 'temperature: must be a number, it is "hot"'),
        ({"seed": 1.5}, "seed: must be an integer, it is 1.5"),
        ({"max_tokens": 1e20}, "max_tokens: must be an integer, it is 1e20"),
        ({"stop": ["a", 5]}, 'stop: must be a string or a list of strings, it is ["a",5]'),
        ({"stream": "yes please"}, 'stream: must be true or false, it is "yes please"'),
        ({"stream_options": []}, "stream_options: must be an object, it is []"),
        ({"seed": 2**64}, "seed=18446744073709551616 must fit 64 bits"),
        ({"model": [0] * 99}, f"model: must be a string, it is [{'0,' * 29}0..."),
        ({"echo": True}, "echo=true is not supported (leave it out)"),
    ],
)
def test_message_has_the_field_what_it_must_be_and_its_value(
    served: Serving, body: dict[str, object], message: str
) -> None:
    assert error_of(served, "/v1/completions", {"prompt": "x", **body})["message"] == message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": 5}, "[0].content: must be a string or a list of parts"),
        ({"content": [5]}, "[0].content: must be a string or a list of parts"),
        ({"content": [{"type": "text", "text": 5}]}, "[0].content[0].text must be a string"),
        ({"content": [{"type": ["x"]}]}, '[0].content[0] has type ["x"], only text'),
        ({"content": "x", "role": "wizard"}, "'function', it is \"wizard\""),
        ({"content": "x", "tool_calls": 5}, "[0].tool_calls: must be a list, it is 5"),
    ],
)
def test_wrong_message_is_told_in_the_words_of_json(
    served: Serving, message: dict[str, object], words: str
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        error = error_of(served, path, {"messages": [{"role": "user", **message}]})
        assert words in error["message"]


def test_long_names_are_cut_where_they_are_repeated(served: Serving) -> None:
    for path, body in (("/v1/completions", {**TEXT, "model": "m" * 9999}), (f"/{'a' * 9999}", {})):
        assert len(error_of(served, path, body, 404)["message"]) < 200


NO_PROMPTS = [None, 5, True, {}, [True], [1.0], [1, "a"], ["a", 1], [[1], "a"], [[1.0]], [[True]]]


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=str)
def test_prompt_of_no_known_form_is_refused_with_the_forms(served: Serving, prompt: object) -> None:
    error = error_of(served, "/v1/completions", {"prompt": prompt})
    assert error["param"] == "prompt"
    for form in ("string", "list of strings", "list of token ids", "list of lists of token ids"):
        assert form in error["message"]


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": None, "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "tool_calls": [{}]}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
    ],
)
def test_message_of_unknown_role_or_without_content_is_refused(
    served: Serving, message: dict[str, object], parameter: str
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        assert error_of(served, path, {"messages": [message]})["param"] == parameter


@pytest.mark.parametrize(
    "field",
    [
        *("model", "n", "stream", "stream_options", "temperature", "top_k", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "min_tokens", "max_tokens", "skip_special_tokens"),
        *("include_stop_str_in_output", "logprobs", "chat_template_kwargs", "nobody_knows"),
        *("add_special_tokens", "add_generation_prompt", "truncate_prompt_tokens"),
    ],
)
def test_null_is_the_same_as_nothing_on_both_routes(served: Serving, field: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        answer = served.post(path, **{**body, field: None})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == 1


def test_more_prompts_and_choices_than_one_request_may_have_are_refused(served: Serving) -> None:
    many = error_of(served, "/v1/completions", {"prompt": ["a"] * 2049})
    assert (many["param"], "2048" in many["message"]) == ("prompt", True)
    assert error_of(served, "/v1/completions", {"prompt": ["a"] * 100, "n": 100})["param"] == "n"


def test_prompt_too_long_tells_both_numbers(served: Serving) -> None:
    error = error_of(served, "/v1/completions", {**TEXT, "prompt": [1] * 250})
    assert "250 tokens" in error["message"]
    assert "199" in error["message"]


def test_unknown_model_path_and_method(served: Serving) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-none") as raised:
        served.client.completions.create(model="gpt-none", prompt="x")
    assert raised.value.code == "model_not_found"
    assert error_of(served, "/v1/nothing", {}, 404)["code"] == "not_found"
    assert served.http.get("/v1/completions").status_code == 405
    assert served.post("/v1/completions", prompt="x").status_code == 200  # no model: the served one


def test_model_without_chat_template_says_so(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, chat_template=None)
    with serving_core(FakeCore(lambda request: []), tokenizer) as served:
        error = error_of(served, "/v1/chat/completions", CHAT)
        assert "no chat template" in error["message"]
        assert served.post("/v1/completions", **TEXT).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_the_core_refuses_is_400_with_its_words_also_when_streamed(
    start, stream: bool
) -> None:
    with start() as served:
        served.core.refusal = "needs 9 KV blocks, there are 4"
        error = error_of(served, "/v1/completions", {**TEXT, "stream": stream})
        assert "9 KV blocks" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_bug_is_500_with_a_body_and_the_server_goes_on(
    start, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    with start() as served:
        monkeypatch.setattr(served.engine, "run", broken)
        error = error_of(served, "/v1/completions", {**TEXT, "stream": stream}, 500)
        assert "bug in vcli: ZeroDivisionError: oh" in error["message"]
        monkeypatch.undo()
        assert served.post("/v1/completions", **TEXT).status_code == 200


@pytest.mark.parametrize(
    ("options", "named", "limit"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_completion_tokens": 500}, "max_completion_tokens", "max_model_len=200"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens", "at most"),
        ({"max_tokens": 500}, "max_tokens", "max_model_len=200"),
        ({"max_tokens": 1, "max_completion_tokens": 500}, "max_completion_tokens", "max_model_len"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 and 20"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "0 and 20"),
        ({"messages": [{"role": "user", "content": "é" * 200}]}, "messages", "max_model_len=200"),
    ],
)
def test_chat_errors_name_the_field_as_the_client_wrote_it(
    served: Serving, options: dict[str, object], named: str, limit: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.client.chat.completions.create(**{**CHAT, **options})
    assert raised.value.param == named
    words = raised.value.body["message"].replace("=", " ").split()
    assert words[0] == named
    assert limit in raised.value.body["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_fewer_tokens_than_the_least_are_told_by_the_clients_name(
    served: Serving, name: str
) -> None:
    error = error_of(served, "/v1/chat/completions", {**CHAT, name: 2, "min_tokens": 3})
    assert (error["param"], f"above {name}=2" in error["message"]) == ("min_tokens", True)


def test_every_error_has_a_word_for_its_code(start, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's client has `code` as a text."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    with start() as served:
        codes = {
            "invalid_value": served.post("/v1/completions", **TEXT, n=0),
            "model_not_found": served.post("/v1/completions", prompt="x", model="none"),
            "not_found": served.post("/nowhere"),
            "method_not_allowed": served.http.get("/v1/completions"),
            "unsupported_media_type": served.http.post("/tokenize", content=b"{}"),
            "body_too_large": served.http.post("/tokenize", content=b" " * (MAX_BODY_BYTES + 1)),
        }
        monkeypatch.setattr(served.engine, "run", broken)
        codes["internal_error"] = served.post("/v1/completions", **TEXT)
        served.server.begin_drain()
        codes["shutting_down"] = served.post("/v1/completions", **TEXT)
        assert {word: answer.json()["error"]["code"] for word, answer in codes.items()} == {
            word: word for word in codes
        }
