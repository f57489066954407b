"""Secrets of twenty shapes never come through, and what is no secret does."""

import pytest

from vcli.diagnostics.redact import MASK, is_secret_name, redact, redact_environ, redact_values

HEX = "9f86d081884c7d659a2feaa0c55ad015"
SHAPES = [
    "http://user:{}@proxy.corp:3128",
    "redis://:{}@10.0.0.1:6379/0",
    "https://{}@github.com/org/repo.git",
    "https://bucket/x?X-Amz-Signature={}&x=1",
    "https://host/path?access_token={}",
    "https://host/file?sig={}",
    "Authorization: Bearer {}",
    "curl -H 'authorization: Basic {}'",
    "--api-key {}",
    "--job-token={}",
    "HF_TOKEN={}",
    "export WANDB_API_KEY={}",
    'password: "{}"',
    '{{"client_secret": "{}"}}',
    "AWS_SECRET_ACCESS_KEY={}",
    "vcli serve --ssl-key-password {}",
    "db_passwd={}",
    "Cookie: session={}",
    "--hf-token '{}'",
    "MYSQL_PWD={}",
    "x-api-key: {}",
    "credentials={}",
]
TELLING = [
    "hf_abcdefghijklmnopqrstuvwxyzABCD",
    "sk-proj-abcdefghijklmnopqrstuvwxyz0123",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuv",
    "glpat-abcdefghijklmnopqrst",
    "AKIAIOSFODNN7EXAMPLE",
    "xoxb-1234567890-abcdefghij",
    "AIzaSyA1234567890abcdefghijklmnopqrstuvw",
    "nvapi-abcdefghijklmnopqrstuvwxyz0123",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP",
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_secret_is_taken_out_of_text(shape: str) -> None:
    text = shape.format(HEX)
    assert HEX not in redact(f"before {text} after"), redact(text)
    assert MASK in redact(text)


@pytest.mark.parametrize("secret", TELLING)
def test_a_value_that_gives_itself_away_is_taken_out(secret: str) -> None:
    assert secret not in redact(f"the value is {secret}.")


def test_a_private_key_is_taken_out() -> None:
    text = "-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----\nrest"
    assert redact(text) == f"{MASK}\nrest"


@pytest.mark.parametrize(
    "text",
    [
        "GPU-4f2a9c1e-0d3b-11ee-be56-0242ac120002",
        "8,192 tokens, 3.1 tokens a step",
        "port 8000 (HTTP) is in use by pid 12 (python -m vcli serve)",
        "export GLOO_SOCKET_IFNAME=eth0",
        "http://10.0.0.1:8000/v1/models?limit=10",
        "docker run --shm-size=1G --ulimit memlock=-1:-1",
        "0000:1b:00.0, driver 580.95.05",
        "NCCL_IB_HCA=mlx5_0,mlx5_1",
        "export LD_LIBRARY_PATH=/usr/local/cuda/lib64:/opt/x",
        "--max-num-batched-tokens 2048, or --tokenizer ./folder",
        "the author=me of a pattern=x, export VCLI_JOB_TOKEN=$(openssl rand -hex 16)",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("HUGGING_FACE_HUB_TOKEN", True),
        ("WANDB_API_KEY", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("VCLI_JOB_TOKEN", True),
        ("DB_PASSWORD", True),
        ("MYSQL_PWD", True),
        ("SSH_PRIVATE_KEY", True),
        ("PWD", False),
        ("PATH", False),
        ("NCCL_DEBUG", False),
        ("KEYBOARD", False),
        ("MAX_NUM_BATCHED_TOKENS_PER_STEP", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("OMP_NUM_THREADS", False),
    ],
)
def test_names_of_secret_variables(name: str, is_secret: bool) -> None:
    assert is_secret_name(name) is is_secret


def test_the_environment_loses_the_values_of_secret_names() -> None:
    clean = redact_environ({"HF_TOKEN": "plainword", "http_proxy": "http://u:p@h:1", "A": "b"})
    assert clean == {"HF_TOKEN": MASK, "http_proxy": f"http://{MASK}@h:1", "A": "b"}


def test_nested_data_is_cleaned_and_numbers_stay() -> None:
    data = {"a": [f"token={HEX}", 3], "api_key": "x1", "n": {"m": None}}
    assert redact_values(data) == {"a": [f"token={MASK}", 3], "api_key": MASK, "n": {"m": None}}
