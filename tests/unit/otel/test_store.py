"""Bodies on disk: in order, within their bound, and there for the next daemon."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.otel.store import BodyStore


def opened(folder: Path | None, most_bytes: int = 100) -> BodyStore:
    store = BodyStore(folder, most_bytes)
    store.open()
    return store


def test_store_gives_bodies_back_oldest_first_also_to_the_next_daemon(tmp_path):
    store = opened(tmp_path / "telemetry")
    assert [store.put("traces", b"one"), store.put("logs", b"two"), store.put("metrics", b"three")] == [0, 0, 0]
    (tmp_path / "telemetry" / "00000000000000000009-traces.json.gz.part").write_bytes(b"half")
    store = opened(tmp_path / "telemetry")
    found = []
    while (oldest := store.oldest()) is not None:
        found.append(oldest)
        store.drop_oldest()
    assert found == [("traces", b"one"), ("logs", b"two"), ("metrics", b"three")]
    assert not list((tmp_path / "telemetry").iterdir())
    assert store.nbytes == 0


def test_full_store_gives_up_the_oldest_bodies(tmp_path):
    store = opened(tmp_path)
    assert [store.put("traces", bytes([each]) * 40) for each in range(4)] == [0, 0, 1, 1]
    assert store.oldest() == ("traces", b"\x02" * 40)
    assert (len(store), store.nbytes) == (2, 80)
    assert store.put("traces", bytes(101)) == 1  # larger than all
    assert len(store) == 2


def test_store_without_a_folder_keeps_nothing():
    store = opened(None)
    assert store.put("traces", b"one") == 1
    assert store.oldest() is None


def test_store_goes_on_where_somebody_removed_a_file(tmp_path):
    store = opened(tmp_path)
    store.put("traces", b"one")
    store.put("logs", b"two")
    min(tmp_path.iterdir()).unlink()
    assert store.oldest() == ("logs", b"two")
