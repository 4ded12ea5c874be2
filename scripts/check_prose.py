"""Find habits in the prose of README, CONTRIBUTING and docs/ that make readers stumble.

    python scripts/check_prose.py [FILE ...]

Code, tables and the targets of links are not looked at.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNIT = r"(parameter|tensor|step|leaf|layer|channel|row|block|element|token|device|primitive|second)"
COUNTED = r"(\w*bytes?|\w*bits?|numbers?|scales?|constants?|batches|tokens|launches|one|two)"
NOUN = "name the noun"
HABITS = {
    r"\b(in|out)side\s+of\b": "`inside`, `outside`",
    r"\bwhat\s+is\s+(not|no)\b": f"{NOUN}: `values that are not finite`",
    r"\b(?-i:none)\b(?!\s+of)": f"{NOUN}: `no scale`, `has no rule`",
    r"\bof\s+which\s+(only|no|one|each|all|some)\b": "begin a new sentence",
    r"\b(another\s+one\b|the\s+one\s+that\b|that\s+one(['’]s|(?=[,.;:])))": NOUN,
    r"\bthat\s+of\s+another\b": NOUN,
    r"\b(in|or)\s+what\b": NOUN,
    rf"\b{COUNTED}\s+an?\s+{UNIT}\b": "`per`",
    r"\bask(s|ed)?\s+for\b": "`need`, `request`, `set`",
    r"\btells?\s+of\b": "`reports`, `says whether`",
    r"\bby\s+(its|the)\s+(compiler|recipe)\b": "`compiled for`, `with the recipe`",
    r"(^|[.:!]\s+)(The same|Likewise|Not so|Neither)\.": "write a whole sentence",
}
BLANKED = re.compile(
    r"^ *(```|:::|~~~)[^\n]*\n.*?^ *\1[^\n]*$|<!--.*?-->|^ *\|[^\n]*$|``?[^`]+``?|\]\([^)\s]*\)",
    re.DOTALL | re.MULTILINE,
)


def find(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the phrase and what to write instead, for each habit in Markdown."""
    prose = BLANKED.sub(lambda m: re.sub(r"[^\n]", "_", m[0]), text)
    prose = prose.replace("\n\n", "\n¶\n")  # a phrase does not go on in the next paragraph
    for pattern, advice in HABITS.items():
        for match in re.finditer(pattern, prose, re.IGNORECASE | re.MULTILINE):
            yield prose.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), advice


def main(arguments: list[str]) -> int:
    """Print what is found; return 1 if there is anything."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = []
    for page in map(Path, arguments or pages):
        lines += [
            f"{page}:{n}: {phrase!r}: {advice}" for n, phrase, advice in find(page.read_text())
        ]
    print("\n".join(lines), end="\n" * bool(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
