"""What vcli itself says when one of its processes fails, and the hint that it prints below."""

from typing import Final

from vcli.diagnostics.symptoms.symptom import Role, Sign, Symptom

#: Of these, one at least stands behind the name of a process that is one of vcli's.
_WHO: Final = (
    r"\berror: (?P<who>(?:\w+ \(rank \d+\)(?: pid \d+)?|\w+ pid \d+"
    r"|(?:EngineCore|ApiServer|ForkServer|Executor|node\d+))(?: on \S+)?)"
    r" failed in (?P<phase>[\w /-]+): "
)
#: `  → hint`, and how it is written where the terminal has no arrow.
_HINT: Final = (
    Sign("→ ", r"  → (?P<remedy>\S.*)"),
    Sign("-> ", r"  -> (?P<remedy>\S.*)"),
)


def _failed(pattern: str) -> Sign:
    return Sign(" failed in ", _WHO + pattern)


OWN: Final = (
    Symptom(
        name="own-killed",
        title="a process of vcli was killed by SIGKILL",
        signs=(_failed(r"killed by SIGKILL"),),
        below=_HINT,
        cause="{who} was killed from outside in {phase} and could not say why: by the kernel for "
        "memory, by a person, or by a container's or job's limit",
        remedy="dmesg -T | grep -i 'killed process' names its pid if memory was the reason; then "
        "raise the memory limit, or load with fewer ranks at once",
        check="HOST-05",
    ),
    Symptom(
        name="own-ended-by-signal",
        title="a process of vcli was ended by a signal",
        signs=(_failed(r"killed by (?P<signal>SIG\w+|signal \d+)"),),
        below=_HINT,
        cause="{who} was ended in {phase} by {signal}: SIGSEGV, SIGABRT and SIGILL are crashes in "
        "native code, SIGBUS memory that could not be given, SIGTERM somebody's wish",
        remedy="the lines of this process above have the stack of a crash; "
        "vcli doctor judges memory, /dev/shm and the GPUs",
    ),
    Symptom(
        name="own-ranks-missing",
        title="ranks did not join in time",
        role=Role.OWN,
        signs=(
            Sign("had not joined: ", r"\d+ ranks, \d+ had not joined: (?P<ranks>.*)"),
            Sign("did not come within ", r"\berror: (?P<ranks>.+) did not come within [\d.]+ s"),
        ),
        below=_HINT,
        cause="not there at the deadline: {ranks}; they failed before, were never started, or do "
        "not reach node 0",
        remedy="look at the logs of those ranks; start the nodes within --join-timeout",
    ),
    Symptom(
        name="own-start-timeout",
        title="a start of vcli took longer than its deadline",
        role=Role.OWN,
        signs=(_failed(r"StartTimeout: "),),
        below=_HINT,
        cause="{who} was not ready in time: the line says how far it came",
        remedy="--start-timeout SECONDS gives more time; vcli doctor proc-06 estimates the need",
        check="PROC-06",
    ),
    Symptom(
        name="own-stalled",
        title="a step of vcli does not end",
        role=Role.OWN,
        signs=(
            Sign(" runs for over ", r"\b\w+ runs for over [\d.]+ s: .*\brank \d+ \("),
            Sign(": no answer within ", r"\w+: no answer within [\d.]+ s from "),
            Sign("execute_model gave no result within "),
        ),
        below=_HINT,
        cause="a rank is stuck, or waits in a collective for one that does not come; the line "
        "says what each rank does",
        remedy="vcli doctor --instance shows while it hangs who waits for whom, with the stacks",
    ),
    Symptom(
        name="own-failed",
        title="a process of vcli failed",
        role=Role.OWN,
        signs=(_failed(""),),
        below=_HINT,
        cause="{who} failed in {phase}; the line says why",
        remedy="the traceback above the line, or in the log of that node, says where",
    ),
)
