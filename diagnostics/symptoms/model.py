"""The model: its shape, its files, its place on the nodes."""

from typing import Final

from vcli.diagnostics.symptoms.symptom import Sign, Symptom

MODEL: Final = (
    Symptom(
        name="sizes-do-not-divide",
        title="the model's shape does not divide by the parallel size",
        signs=(
            Sign(
                "attention heads (",
                r"attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
                r"\((?P<ranks>\d+)\)",
            ),
            Sign(
                "is not divisible by",
                r"AssertionError: (?P<heads>\d+) is not divisible by (?P<ranks>\d+)",
            ),
        ),
        cause="{heads} heads, or columns, cannot be shared evenly by {ranks} ranks",
        remedy="vcli topo --model MODEL --suggest lists sizes that fit; a divisor of {heads} for "
        "-tp, and -pp for the rest",
        check="FIT-02",
        reports="vllm #2652, PR #52535",
    ),
    Symptom(
        name="model-not-on-node",
        title="a node does not have the model",
        signs=(
            Sign(", ip=", r"ip=(?P<node>[\w.:]+)\).*(?:HFValidationError|is not a local folder)"),
            Sign(
                ", ip=",
                r"ip=(?P<node>[\w.:]+)\).*(?:Cannot find any model weights|"
                r"FileNotFoundError|does not appear to have a file named)",
            ),
        ),
        cause="the folder of the model is missing, or incomplete, on {node}",
        remedy="copy it to the same path on every node, or use a shared file system; a Hub name "
        "lets each node download it",
        check="FIT-03",
        reports="vllm #10886, #5727",
    ),
    Symptom(
        name="weights-damaged",
        title="a weight file is damaged",
        signs=(
            Sign("Error while deserializing header"),
            Sign("SafetensorError", r"SafetensorError: .*(?:incomplete|[Ii]nvalid|HeaderToo)"),
        ),
        cause="a safetensors file is cut short, or a git-lfs pointer stands in its place",
        remedy="vcli doctor fit-03 --model MODEL names the file; download it again",
        check="FIT-03",
    ),
    Symptom(
        name="model-gated",
        title="the Hub does not give the model out",
        signs=(
            Sign("Cannot access gated repo"),
            Sign("GatedRepoError", r"errors\.GatedRepoError"),
        ),
        cause="the model's licence was not accepted, or no token was given",
        remedy="accept it on the model's page; then HF_TOKEN=<token> on every node",
        check="ENV-06",
    ),
    Symptom(
        name="model-offline",
        title="the model is not in the cache, and the Hub cannot be reached",
        signs=(
            Sign("LocalEntryNotFoundError: "),
            Sign("OfflineModeIsEnabled: "),
            Sign("We couldn't connect to 'https://huggingface.co'", r"(?:OSError|Error): We could"),
        ),
        cause="the network, a proxy, or HF_HUB_OFFLINE=1 keeps the Hub away, and not all files "
        "were downloaded before",
        remedy="download it where there is a network (hf download MODEL) and name the folder",
        check="ENV-06",
    ),
    Symptom(
        name="model-unknown",
        title="the model's architecture is not known",
        signs=(
            Sign("Model architectures [", r"architectures \[(?P<name>[^\]]+)\].*not supported"),
        ),
        cause="the engine has no code for {name}",
        remedy="upgrade the engine, or look in its list of models",
        check="FIT-01",
    ),
)
