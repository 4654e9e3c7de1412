"""The content of a repository and its next needs, as values for a person or a program. Signs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from edge_runtime.publish.assignments import read_assignments, read_manifest
from edge_runtime.publish.repository import Repository

SOON_DAYS = 30
"""A person who signs needs a few weeks to be found; online roles are over half their time then."""


@dataclass(frozen=True, slots=True)
class KeyState:
    """A key that a role trusts. can_sign: its private half is within reach from here."""

    name: str
    keyid: str
    kind: str
    can_sign: bool


@dataclass(frozen=True, slots=True)
class RoleState:
    """A role as it is published."""

    role: str
    version: int
    expires_utc: datetime
    days_left: float
    threshold: int
    keys: tuple[KeyState, ...]

    @property
    def is_expired(self) -> bool:
        """Return whether devices refuse it."""
        return self.days_left <= 0


@dataclass(frozen=True, slots=True)
class ReleaseSummary:
    """A release of a team."""

    team: str
    model: str
    version: int
    release_counter: int
    nbytes: int
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AssignmentState:
    """The assignment of one model to a group."""

    group: str
    model: str
    release_counter: int
    percent: float


@dataclass(frozen=True, slots=True)
class Survey:
    """The whole repository. advice: sentences on what to do, most urgent first."""

    roles: tuple[RoleState, ...]
    teams: tuple[str, ...]
    groups: tuple[str, ...]
    releases: tuple[ReleaseSummary, ...]
    assignments: tuple[AssignmentState, ...]
    advice: tuple[str, ...]


def survey(repository: Repository) -> Survey:
    """Survey the whole repository. Raises PublishError: a manifest or an assignment is not the signed one."""
    catalog = repository.catalog
    roles = tuple(_role(repository, role) for role in catalog.roles)
    given = {group: read_assignments(repository, group) for group in catalog.owners("fleet")}
    assignments = tuple(
        AssignmentState(group, each.model, each.release.counter, each.percent)
        for group, entries in given.items()
        for each in entries
    )
    releases: list[ReleaseSummary] = []
    for release, target in catalog.releases():
        manifest = read_manifest(repository, release, target)
        users = [group for group, entries in given.items() if any(each.release == release for each in entries)]
        nbytes = sum(artifact.length for artifact in manifest.artifacts)
        releases.append(
            ReleaseSummary(release.team, release.model, manifest.version, release.counter, nbytes, tuple(users))
        )
    releases.sort(key=lambda each: (each.team, each.model, each.release_counter))
    teams, groups = tuple(catalog.owners("team")), tuple(catalog.owners("fleet"))
    return Survey(roles, teams, groups, tuple(releases), assignments, tuple(_advice(repository, roles)))


def _role(repository: Repository, role: str) -> RoleState:
    catalog, keys = repository.catalog, repository.keys
    signed, trust = catalog.signed(role), catalog.role(role)
    left = (signed.expires - repository.now_utc).total_seconds() / 86_400
    found = tuple(
        KeyState(keys.name(keyid), keyid, catalog.key(role, keyid).keytype, keys.can_sign(keyid))
        for keyid in trust.keyids
    )
    return RoleState(role, signed.version, signed.expires, round(left, 2), trust.threshold, found)


def _advice(repository: Repository, roles: tuple[RoleState, ...]) -> list[str]:
    advice: list[str] = []
    for role in sorted(roles, key=lambda role: role.days_left):
        days = repository.days.of(role.role)
        command = "repo refresh" if role.role == "timestamp" else f"repo refresh {role.role}"
        if role.is_expired:
            advice.append(f"{role.role} expired at {role.expires_utc:%Y-%m-%d %H:%M} UTC: run `{command}`")
        elif role.days_left < min(SOON_DAYS, days / 2):
            advice.append(f"{role.role} expires in {role.days_left:.1f} days: run `{command}`")
    for role in roles:
        within = sum(key.can_sign for key in role.keys)
        if within < role.threshold:
            advice.append(f"{role.role}: {within} of its keys are within reach here, {role.threshold} must sign")
    other = sorted({key.name for role in roles for key in role.keys if key.kind != "ed25519"})
    if other:
        advice.append(f"{', '.join(other)}: not ed25519; devices need the cryptography package to verify them")
    return advice
