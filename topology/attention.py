"""Which attention back end the layers use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from vcli.topology.decision import Decision
from vcli.topology.errors import ConfigError

AttentionBackendName = Literal["torch", "flashinfer", "triton"]

AUTO: Final = "auto"
ATTENTION_BACKENDS: Final[tuple[AttentionBackendName, ...]] = get_args(AttentionBackendName)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """What paged kernels can do; all of them need CUDA."""

    title: str
    dtypes: tuple[str, ...]
    head_sizes: tuple[int, ...]

    def objections(self, *, device_type: str, dtype: str, head_size: int) -> list[str]:
        """Why they cannot be used; empty if they can."""
        against = []
        if device_type != "cuda":
            against.append(f"{self.title} needs CUDA, the device is {device_type}")
        if dtype not in self.dtypes:
            against.append(f"{self.title} does {' and '.join(self.dtypes)}, not {dtype}")
        if head_size not in self.head_sizes:
            sizes = ", ".join(map(str, self.head_sizes))
            against.append(f"{self.title} does head sizes {sizes}, not {head_size}")
        return against


_TRITON: Final = _Kernels(
    title="Triton", dtypes=("bfloat16", "float16"), head_sizes=(16, 32, 64, 128, 256)
)
_FLASHINFER: Final = _Kernels(
    title="FlashInfer", dtypes=("bfloat16", "float16"), head_sizes=(64, 128, 256)
)
_KERNELS: Final[Mapping[AttentionBackendName, _Kernels]] = {
    "triton": _TRITON,
    "flashinfer": _FLASHINFER,
}


def decide_attention_backend(
    *,
    device_type: str,
    dtype: str,
    head_size: int,
    flashinfer_available: bool,
    requested: str = AUTO,
) -> Decision[AttentionBackendName]:
    """What is requested; `auto` is our Triton kernels where they can do the shape, else torch.

    Raises:
        ConfigError: an unknown name, or one that cannot do this device, dtype or head size.
    """
    shape = f"{device_type}, {dtype}, head size {head_size}"
    if requested == AUTO:
        against = _TRITON.objections(device_type=device_type, dtype=dtype, head_size=head_size)
        if against:
            return Decision(name="attention", value="torch", reasons=tuple(against))
        reason = f"{shape}: paged kernels that need no plan from the host"
        return Decision(name="attention", value="triton", reasons=(reason,))
    name = check_attention_backend(requested)
    kernels = _KERNELS.get(name)
    against = (
        kernels.objections(device_type=device_type, dtype=dtype, head_size=head_size)
        if kernels
        else []
    )
    if against:
        raise ConfigError(
            f"--attention-backend {name}: {'; '.join(against)}",
            hint="--attention-backend auto takes what can do this",
        )
    if name == "flashinfer" and not flashinfer_available:
        raise ConfigError(
            "--attention-backend flashinfer: FlashInfer is not installed",
            hint="pip install 'vcli-toolkit[gpu]', or --attention-backend auto",
        )
    return Decision(name="attention", value=name, reasons=(f"asked for; {shape}",))


def check_attention_backend(name: str) -> AttentionBackendName:
    """The name of a back end.

    Raises:
        ConfigError: there is none of this name.
    """
    for known in ATTENTION_BACKENDS:
        if name == known:
            return known
    raise ConfigError(
        f"--attention-backend {name!r} is unknown",
        hint=f"one of {', '.join((AUTO, *ATTENTION_BACKENDS))}",
    )
