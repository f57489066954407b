"""Takes secrets out of text before anybody sees it."""

import re
from collections.abc import Mapping
from typing import Any, Final

MASK: Final = "[removed]"

#: Words in the name of a variable, field or flag whose value is nobody's business; the short ones
#: only as whole words, so that PATH, author and tokenizer stay.
_SECRET_NAME: Final = (
    r"(?:token(?!s|iz)|secret|passw(?:or)?d|passphrase|credentials?|cookie|session[_-]?key|"
    r"api[_-]?key|access[_-]?key|private[_-]?key|signing[_-]?key|encryption[_-]?key|"
    r"authorization|bearer|license[_-]?key|"
    r"(?<![A-Za-z])(?:auth|pwd|dsn|sas|pat|otp)(?![A-Za-z]))"
)
#: Folders of the shell, and counts of tokens.
_HARMLESS_NAMES: Final = ("PWD", "OLDPWD", "TOKENIZERS_PARALLELISM")
_SECRET_VARIABLE: Final = re.compile(
    rf"(?:^|[_\-.]){_SECRET_NAME}s?(?:$|[_\-.\d])|(?:^|[_\-.])key(?:$|[_\-.])", re.IGNORECASE
)

_PATTERNS: Final = (
    # user:password@ in a URL, whatever the scheme
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@]+@"), rf"\1{MASK}@"),
    # secrets as query parameters
    (
        re.compile(
            rf"(?i)([?&;](?:[\w-]*{_SECRET_NAME}|key|sig|signature|x-amz-[\w-]+)=)[^&\s\"']+"
        ),
        rf"\1{MASK}",
    ),
    # -----BEGIN ... PRIVATE KEY----- blocks
    (
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|\Z)", re.S),
        MASK,
    ),
    # HTTP authorization
    (re.compile(r"(?i)\b(bearer|basic|digest)\s+[A-Za-z0-9+/=._~-]{6,}"), rf"\1 {MASK}"),
    # --flag value, --flag=value, NAME=value, "name": "value", name: value
    (
        re.compile(
            rf"(?i)(?P<name>[\"']?[\w.-]*{_SECRET_NAME}[\w.-]*[\"']?\s*[:=]\s*)(?!\$)"
            r"(?P<value>\"[^\"]*\"|'[^']*'|[^\s,;&\"'}]+)"
        ),
        rf"\g<name>{MASK}",
    ),
    (
        re.compile(rf"(?i)(--?[\w-]*{_SECRET_NAME}[\w-]*\s+)(?!-)(\"[^\"]*\"|'[^']*'|\S+)"),
        rf"\1{MASK}",
    ),
    # values that give themselves away
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), MASK),
    (re.compile(r"\b(?:sk|pk|rk)[-_](?:[a-z]+[-_])*[A-Za-z0-9_-]{16,}"), MASK),
    (re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,})"), MASK),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), MASK),
    (re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"), MASK),
    (re.compile(r"\bAIza[\w-]{30,}"), MASK),
    (re.compile(r"\bnv(?:api|cr)-[\w-]{16,}"), MASK),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), MASK),
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return name not in _HARMLESS_NAMES and bool(_SECRET_VARIABLE.search(name))


def redact(text: str) -> str:
    """The text without secrets."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with the values of secret ones removed, and secrets in the others too."""
    return {
        name: MASK if is_secret_name(name) else redact(value) for name, value in environ.items()
    }


def redact_values(value: Any) -> Any:
    """Plain JSON data without secrets in any string."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            key: MASK
            if isinstance(item, str) and item and is_secret_name(str(key))
            else redact_values(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(item) for item in value]
    return value
