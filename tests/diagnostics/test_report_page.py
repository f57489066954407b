"""The page of `doctor --html`: safe to open, whole, and written in one piece or not at all."""

import io
import json
import re
import resource
import stat
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vcli.cli.doctor_page import PageFile
from vcli.cli.environment import Environment
from vcli.cli.main import main
from vcli.cli.views.report_page import report_page
from vcli.topology import ConfigError

HOSTILE = "</title><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


class Tags(HTMLParser):
    """Start tags with their attributes, and tags that were never closed."""

    VOID = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def document(status: str = "fail", text: str = HOSTILE) -> dict[str, Any]:
    item = {
        "id": "LIM-01", "group": "lim", "status": status, "title": text, "measured": text,
        "expected": text, "why": text, "remedy": text, "seconds": 0.1, "node_rank": 0,
    }  # fmt: skip
    quiet = {**item, "id": "NET-01", "group": "net", "status": "pass", "why": "", "remedy": ""}
    return {
        "checks": [item, quiet],
        "summary": {"interrupted": False, "launch_refused": False},
        "host": {"hostname": text},
        "plan": {text: text},
        "changes": [{"subject": text, "before": text, "now": text}],
    }


def page_of(content: dict[str, Any]) -> str:
    return report_page(content, headline=HOSTILE, closing=HOSTILE, made_at="now")


def doctor(*arguments: str, cwd: Path, environ: dict[str, str] | None = None) -> tuple[int, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    status = main(
        Environment(
            argv=("doctor", "env", *arguments), environ=environ or {}, cwd=cwd, stdout=stdout,
            stderr=stderr,
        )
    )  # fmt: skip
    return status, stderr.getvalue()


def test_a_hostile_host_name_stays_text() -> None:
    tags = Tags()
    tags.feed(page_of(document()))
    assert tags.open == []
    names = [name for name, _ in tags.seen]
    assert names.count("script") == 1, "only the page's own"
    assert "img" not in names
    assert not any(key.startswith("on") for _, attributes in tags.seen for key in attributes)


def test_nothing_comes_from_elsewhere() -> None:
    text = report_page(document(text="x"), headline="x", closing="x", made_at="now")
    assert not re.search(r"\b(?:src|href)=|url\(|@import|https?://", text)
    assert "default-src 'none'" in text


def test_the_verdict_stands_first_and_the_remedy_before_the_groups() -> None:
    text = page_of(document(text="plain"))
    words = "<h1>Something does not work", "What to do", "<code>plain</code>", "<details open>"
    order = [text.index(word) for word in words]
    assert order == sorted(order)


def test_a_group_without_a_problem_is_folded_and_gives_nothing_to_do() -> None:
    text = page_of(document("pass", "plain"))
    assert "This machine is fit" in text
    assert "What to do" not in text
    assert "<details open>" not in text


def test_it_has_a_light_and_a_dark_side() -> None:
    text = page_of(document(text="x"))
    assert "color-scheme:light dark" in text
    assert "prefers-color-scheme:dark" in text


def test_secrets_are_removed(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz"
    environ = {"NCCL_SOCKET_IFNAM": f"{secret}", "http_proxy": f"http://me:{secret}@proxy:80"}
    status, _ = doctor("--html", "r.html", cwd=tmp_path, environ=environ)
    assert status in (0, 1)
    text = (tmp_path / "r.html").read_text()
    assert "ENV-01" in text
    assert secret not in text


def test_the_page_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "real.html"
    target.write_text("old")
    (tmp_path / "link.html").symlink_to(target)
    doctor("--html", "link.html", cwd=tmp_path)
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert (tmp_path / "link.html").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "real.html"]


@pytest.mark.parametrize(
    ("typed", "said", "hint"),
    [
        (".", "is a folder", "report.html"),
        ("/dev/null", "no ordinary file", "--html report.html"),
        ("no/such/r.html", "there is no folder", "mkdir -p"),
        ("/proc/r.html", "cannot be written", "--html report.html"),
    ],
)
def test_a_place_that_cannot_hold_a_page_is_exit_2(
    tmp_path: Path, typed: str, said: str, hint: str
) -> None:
    status, text = doctor("--html", typed, cwd=tmp_path)
    assert status == 2
    assert said in text
    assert hint in text


def test_no_permission_is_told_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written by this user"):
        PageFile.at("r.html", tmp_path)


@pytest.mark.process
def test_a_full_disk_is_exit_1_and_keeps_the_old_page(tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("old")
    done = subprocess.run(
        [sys.executable, "-m", "vcli.cli", "doctor", "env", "--html", "r.html"],
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "r.html cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "r.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.process
@pytest.mark.parametrize("flag", ["--html", "--save-facts", "--save-baseline", "--bundle"])
def test_a_file_that_cannot_be_written_leaves_one_document_with_the_status(
    tmp_path: Path, flag: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vcli.cli", "doctor", "env", "--json", flag, "r.tgz"],
        cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    content = json.loads(done.stdout)
    assert done.returncode in (1, 2)
    assert (content["schema"], content["exit_code"]) == ("vcli.doctor/1", done.returncode)
    assert "cannot be written: File too large" in content["error"]
    assert content["error"] in done.stderr
