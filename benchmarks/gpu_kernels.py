"""The Triton kernels on one NVIDIA GPU: right or not, then how fast. Needs torch and triton only.

    python benchmarks/gpu_kernels.py [--quick]

Times are microseconds of one call among some twenty in one CUDA graph, median of several replays;
inputs rotate, so that they come from memory and not from the L2 cache. Tables come last. The
sections are in `gpu_kernel_attention`, `gpu_kernel_linear` and `gpu_kernel_layers`.
"""

import argparse
import time

import torch
from gpu_kernel_attention import check_attention, time_decode, time_flashinfer, time_prefill
from gpu_kernel_layers import check_rest, time_layers, time_small
from gpu_kernel_linear import time_skinny
from gpu_kernel_timing import COMPILE_S, LINES, count_compilations, say


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few forms of each kernel")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    count_compilations()
    sections = {
        "relative errors: attention": check_attention,
        "relative errors: the rest": check_rest,
        "layers of Qwen3 0.6B, decode": lambda: time_layers(quick),
        "small kernels": lambda: time_small(quick),
        "prefill": lambda: time_prefill(quick),
        "linear, few rows": lambda: time_skinny(quick),
        "decode": lambda: time_decode(quick),
        "FlashInfer decode": lambda: time_flashinfer(quick),
    }
    for name, section in sections.items():
        begin_s = time.perf_counter()
        say(f"{name}:")
        try:
            section()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - border: one section must not hide the others
            say(f"  FAILED: {type(error).__name__}: {str(error)[:300]}")
        say(f"  ({time.perf_counter() - begin_s:.1f} s)")
        torch.cuda.empty_cache()
        print(f"done: {name}", flush=True)
    say(f"{len(COMPILE_S)} kernels compiled in {sum(COMPILE_S):.1f} s")
    print("\n".join(LINES))


if __name__ == "__main__":
    main()
