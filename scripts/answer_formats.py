"""What a right answer of each demonstration service looks like: its format, and the part that decides its content."""

from __future__ import annotations

import re

_LINE = r"[^\n]*\S"
_FORMATS = {
    "intelligent-triage": re.compile(rf"Department: {_LINE}\nReason: {_LINE}\.\nUrgency: (?:high|medium|low)"),
    "pre-assessment": re.compile(r"1\. [^\n]+\?(?:\n\d\. [^\n]+\?){2,7}"),
    "analysis-assistant": re.compile(rf"Findings: {_LINE}\nConsider: {_LINE}\nNext step: {_LINE}"),
    "record-generation": re.compile(rf"S: {_LINE}\nO: {_LINE}\nA: {_LINE}\nP: {_LINE}"),
}
_DECISIVE_LINES = {
    "intelligent-triage": ("Department:", "Urgency:"),
    "pre-assessment": ("1.",),
    "analysis-assistant": ("Findings:", "Consider:"),
    "record-generation": ("O:", "A:"),
}


def has_format(service: str, answer: str) -> bool:
    """Whether ``answer``, and nothing beside it, is in the format of ``service``. KeyError for an unknown service."""
    answer = answer.strip()
    if not _FORMATS[service].fullmatch(answer):
        return False
    if service != "pre-assessment":
        return True
    numbers = [int(line.partition(".")[0]) for line in answer.splitlines()]
    return numbers == list(range(1, len(numbers) + 1))


def decisive_part(service: str, answer: str) -> list[str]:
    """The lines that must agree with the reference for the content to count as right, as triage's department does."""
    return [line.strip() for line in answer.splitlines() if line.startswith(_DECISIVE_LINES[service])]
