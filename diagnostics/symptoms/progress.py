"""Lines that several symptoms share: it goes on, and nothing goes on."""

from typing import Final

from vcli.diagnostics.symptoms.symptom import Sign

#: Tokens come out, or the server is ready; a hang before these lines was none.
SERVES: Final = (
    Sign("Application startup complete"),
    Sign("Uvicorn running on"),
    Sign("The server is fired up and ready to roll"),
    Sign("Avg generation throughput: ", r"Avg generation throughput: (?!0\.0 )"),
    Sign("gen throughput (token/s): ", r"gen throughput \(token/s\): (?!0\.00)"),
    Sign("# Avg bus bandwidth"),
    Sign(" · try:", r"serving .+ at http.* · try:"),
)

#: The ranks have met.
JOINED: Final = (
    *SERVES,
    Sign("Init COMPLETE"),
    Sign("vLLM is using nccl=="),
    Sign("Init torch distributed ends"),
    Sign("Connected all rings"),
    Sign("Loading safetensors checkpoint shards"),
    Sign("Starting to load model"),
)

#: Somebody waited long, or gave up.
HANGS: Final = (
    Sign("No available shared memory broadcast block"),
    Sign("No available block found in 60 second"),
    Sign("Watchdog caught collective operation timeout"),
    Sign("core engine proc", r"Waiting for \d+ local, \d+ remote core engine proc"),
    Sign("DUE TO TIME LIMIT"),
    Sign("KeyboardInterrupt"),
    Sign(" timed out", r"RPC call to \w+ timed out"),
)
