"""How far a repository had come: what goes back is refused, other keys begin anew."""

from __future__ import annotations

import pytest

from edge_runtime.errors import TrustError
from edge_runtime.updates.trust import check_marks, marks_of
from tests.fakes.tuf_repository import TufRepository


def marks(repository: TufRepository) -> dict[str, int]:
    return marks_of(repository.root, repository.timestamp, repository.snapshot)


def test_a_repository_that_goes_on_is_believed_and_one_that_went_back_is_not() -> None:
    repository = TufRepository()
    before = marks(repository)
    repository.publish("targets")
    after = marks(repository)
    check_marks(after, before)
    with pytest.raises(TrustError, match="version 1, but version 2 was seen here"):
        check_marks(before, after)


@pytest.mark.parametrize("role", ["timestamp", "snapshot"])
def test_versions_raised_without_bound_are_forgotten_with_the_stolen_key(role: str) -> None:
    repository = TufRepository()
    known = {name: 10**9 if name.startswith(role) else version for name, version in marks(repository).items()}
    with pytest.raises(TrustError, match=role):
        check_marks(marks(repository), known)
    repository.rotate(role)
    repository.publish("root")
    check_marks(marks(repository), known)


def test_a_device_that_knows_nothing_believes_any_version() -> None:
    check_marks(marks(TufRepository()), {})
