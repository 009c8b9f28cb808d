"""What p2pd says when it does not reach a peer, in words for people."""

from __future__ import annotations

import re


def explain(text: str) -> str:
    """p2pd's reason for not reaching a peer, in one line with what to do."""
    said = re.sub(r"\s*\n\s*\*?\s*", "; ", text.strip())
    if "peer id mismatch" in text:
        found = re.search(r"remote key matches (\w+)", text)
        who = f"another peer, {found[1]}," if found else "another peer"
        return f"{who} answers there; ask for the current address"
    return f"no swarm peer answers there ({said}); check host and port"


def why_not_dialled(text: str) -> str:
    """p2pd's reason for not reaching a peer it has addresses of, short enough for a log line."""
    tries = re.findall(r"^\s*\* \[([^\]]+)\] (.*)$", text, re.MULTILINE)
    if not tries:
        return re.sub(r"\s*\n\s*\*?\s*", "; ", text.strip())
    reasons: dict[str, list[str]] = {}
    for address, said in tries:
        why = said.rsplit(": ", 1)[-1].strip()
        why = "not reached a moment ago" if why == "dial backoff" else why
        reasons.setdefault(why, []).append(address)
    return "; ".join(f"{why} at {', '.join(at)}" for why, at in reasons.items())
