"""The documentation of the symptoms, made from the catalogue: one Markdown page."""

import re

from vcli.diagnostics.symptoms import CATALOGUE, Role, Sign, Symptom

_INTRODUCTION = """# Symptoms

What failures of vLLM, SGLang, torch, NCCL, Ray and vcli look like in a log, what causes them, and
what mends them. `vcli explain FILE` finds them: the first cause, and not what follows from it.

Made by `scripts/make-check-pages` from the catalogue."""


def symptoms_page() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for heading, symptoms in CATALOGUE.items():
        lines += ["", f"## {heading}"]
        for symptom in symptoms:
            lines += ["", *_section(symptom)]
    return "\n".join(lines) + "\n"


def _section(symptom: Symptom) -> list[str]:
    lines = [f"### {symptom.title[0].upper()}{symptom.title[1:]}", ""]
    lines += [f"- Line: `{sign.needle.strip()}`" for sign in _shown_signs(symptom)]
    if symptom.also:
        groups = [
            " or ".join(f"`{sign.needle.strip()}`" for sign in group) for group in symptom.also
        ]
        lines.append(f"- Together with: {'; and '.join(groups)}")
    lines += [f"- Cause: {_text(symptom.cause)}", f"- Remedy: {_text(symptom.remedy)}"]
    if symptom.check:
        lines.append(f"- Check: [{symptom.check}](checks/{symptom.check}.md)")
    if symptom.below:
        lines.append("- The hint that vcli prints below the line goes before this remedy")
    if symptom.role not in (Role.CAUSE, Role.OWN):
        lines.append("- A consequence: the cause is another line")
    if symptom.reports:
        lines.append(f"- Reported in: {symptom.reports}")
    return lines


def _shown_signs(symptom: Symptom) -> list[Sign]:
    return list({sign.needle: sign for sign in symptom.signs}.values())


def _text(template: str) -> str:
    """Placeholders by their names in capitals, and nothing that Markdown takes for a tag."""
    text = re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), template)
    return re.sub(r"<([^>]+)>", r"`<\1>`", text)
