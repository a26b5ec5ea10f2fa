"""Whose a model card is: one that hf_zero generated carries a seal, and a later export replaces it unless it was edited."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

CARD = "README.md"
_SEAL = re.compile(r"\n<!-- Generated card \((\w+)\)\. [^\n]*-->\n")
_UNWRITTEN = (
    "[More Information Needed]",
    "has been generated automatically according to the information the Trainer had",
)
"""In the templates of huggingface_hub and PEFT, and in the stock Trainer's card."""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sealed(card: object) -> str:
    """Return the text of a `ModelCard` with a comment by which `is_generated` recognises it."""
    text = str(card).rstrip("\n") + "\n"
    note = "The next export replaces this card. A card that was edited, or that lacks this line, is kept."
    return f"{text}\n<!-- Generated card ({_digest(text)}). {note} -->\n"


def is_generated(path: Path) -> bool:
    """Return whether hf_zero wrote this card and no user edited it."""
    text = path.read_text(encoding="utf-8", errors="replace")
    found = _SEAL.search(text)
    return found is not None and found.end() == len(text) and _digest(text[: found.start()]) == found[1]


def is_unwritten(path: Path) -> bool:
    """Return whether a program wrote this card: a template without its facts, or a generated card with later additions."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return any(part in text for part in _UNWRITTEN) or _SEAL.search(text) is not None
