"""The catalogue of symptoms: what failures of engines look like in a log, as data."""

from typing import Final

from vcli.diagnostics.symptoms.consequences import CONSEQUENCES
from vcli.diagnostics.symptoms.gpu import GPU
from vcli.diagnostics.symptoms.limits import LIMITS
from vcli.diagnostics.symptoms.model import MODEL
from vcli.diagnostics.symptoms.nccl import NCCL
from vcli.diagnostics.symptoms.network import NETWORK
from vcli.diagnostics.symptoms.own import OWN
from vcli.diagnostics.symptoms.p2p import P2P
from vcli.diagnostics.symptoms.ray import RAY
from vcli.diagnostics.symptoms.symptom import Role, Sign, Symptom

#: Heading -> its symptoms. Where two claim one line, the first is right: the special before the
#: general.
CATALOGUE: Final = {
    "Network and rendezvous": NETWORK,
    "Ray": RAY,
    "Shared memory and limits": LIMITS,
    "GPU and driver": GPU,
    "Copies between GPUs": P2P,
    "NCCL between nodes": NCCL,
    "Model": MODEL,
    "vcli's own words": OWN,
    "Consequences": CONSEQUENCES,
}
SYMPTOMS: Final[tuple[Symptom, ...]] = tuple(
    symptom for symptoms in CATALOGUE.values() for symptom in symptoms
)

__all__ = ["CATALOGUE", "SYMPTOMS", "Role", "Sign", "Symptom"]
