"""Which attention back end the layers use."""

from typing import Final, Literal

from vcli.topology.decision import Decision

AttentionBackendName = Literal["torch", "flashinfer"]

FLASHINFER_HEAD_SIZES: Final = (64, 128, 256)
FLASHINFER_DTYPES: Final = ("bfloat16", "float16")


def decide_attention_backend(
    *, device_type: str, dtype: str, head_size: int, flashinfer_available: bool
) -> Decision[AttentionBackendName]:
    """FlashInfer where it can do the shape, else torch's SDPA over gathered pages."""
    against = []
    if device_type != "cuda":
        against.append(f"FlashInfer needs CUDA, the device is {device_type}")
    else:
        if not flashinfer_available:
            against.append("FlashInfer is not installed (pip install 'vcli-toolkit[gpu]')")
        if dtype not in FLASHINFER_DTYPES:
            against.append(f"FlashInfer does {' and '.join(FLASHINFER_DTYPES)}, not {dtype}")
        if head_size not in FLASHINFER_HEAD_SIZES:
            sizes = ", ".join(map(str, FLASHINFER_HEAD_SIZES))
            against.append(f"FlashInfer does head sizes {sizes}, not {head_size}")
    if against:
        return Decision(name="attention", value="torch", reasons=tuple(against))
    return Decision(
        name="attention",
        value="flashinfer",
        reasons=(f"CUDA, {dtype}, head size {head_size}: paged kernels with CUDA graphs",),
    )
