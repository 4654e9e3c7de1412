"""The next step after a command, as a sentence with a command line in it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def publish_next(groups: Sequence[str], model: str, version: int) -> str:
    """Return the step after a release is published: no device runs it before a group is assigned it."""
    if not groups:
        return "Next: edge-runtime repo add-group GROUP, for devices to run it"
    group = groups[0] if len(groups) == 1 else "GROUP"
    name = f"{model}={version}"
    return (
        f"Next: edge-runtime repo assign {group} {name} --percent 10, or "
        f"edge-runtime repo rollout start {name} --group {group} --mqtt URL"
    )


def assign_next(group: str, name: str, percent: float) -> str:
    """Return the step after a group is assigned a release. name: MODEL=VERSION."""
    look = f"edge-runtime fleet wake {group} --mqtt URL has its devices look now, fleet releases shows how it goes"
    if percent < 100:
        return f"Next: {look}; then edge-runtime repo assign {group} {name}"
    return f"Next: copy the repository to its server; {look}"


def rotate_next(role: str, repository: Path) -> str:
    """Return the step after a role has new keys."""
    copy = f"copy {repository / 'metadata'} to the repository's server: devices learn of it at their next look"
    keys = (
        f"move the new key files below {repository / 'keys'} to where the role's keys belong, and delete the old ones"
    )
    if role == "root":
        return f"Next: {copy}; {keys}; keep every N.root.json: a device that was off walks through them"
    if role in ("snapshot", "timestamp"):
        return f"Next: {copy}; see that cron's `repo refresh` reads the new key"
    return f"Next: {copy}; {keys}"
