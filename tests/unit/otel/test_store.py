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
    put = [("traces", b"one"), ("logs", b"two"), ("metrics", b"three"), ("traces", b"four")]
    assert [store.put(*each) for each in put] == [0, 0, 0, 0]
    (tmp_path / "telemetry" / "00000000000000000009-traces.json.gz.part").write_bytes(b"half")
    store = opened(tmp_path / "telemetry")
    found = []
    for signal in ("traces", "logs", "metrics"):
        while (oldest := store.oldest(signal)) is not None:
            found.append(oldest)
            store.drop_oldest(signal)
    assert found == [b"one", b"four", b"two", b"three"]
    assert not list((tmp_path / "telemetry").iterdir())
    assert store.nbytes == 0


def test_full_store_gives_up_the_oldest_bodies(tmp_path):
    store = opened(tmp_path)
    assert [store.put("traces", bytes([each]) * 40) for each in range(4)] == [0, 0, 1, 1]
    assert store.oldest("traces") == b"\x02" * 40
    assert (len(store), store.nbytes) == (2, 80)
    assert store.put("traces", bytes(101)) == 1  # larger than all
    assert len(store) == 2


def test_store_without_a_folder_keeps_nothing():
    store = opened(None)
    assert store.put("traces", b"one") == 1
    assert store.oldest("traces") is None


def test_store_goes_on_where_somebody_removed_a_file(tmp_path):
    store = opened(tmp_path)
    store.put("logs", b"one")
    store.put("logs", b"two")
    min(tmp_path.iterdir()).unlink()
    assert store.oldest("logs") == b"two"


def test_flood_of_traces_pushes_no_metrics_off_the_disk(tmp_path):
    store = opened(tmp_path)
    for number in range(3):
        store.put("metrics", bytes([number]) * 10)
    lost = sum(store.put("traces", b"t" * 20) for _ in range(50))
    assert (lost, store.nbytes) == (47, 90)
    assert store.oldest("metrics") == b"\x00" * 10
    for number in range(30):  # what is kept of metrics alone makes room for more of them, once they hold most
        store.put("metrics", bytes([number]) * 10)
    assert store.oldest("metrics") != b"\x00" * 10
    assert store.oldest("traces") == b"t" * 20


def test_files_of_others_in_its_folder_are_left_alone(tmp_path):
    (tmp_path / "00000000000000000009-profiles.json.gz").write_bytes(b"p" * 99)
    store = opened(tmp_path)
    assert (len(store), store.nbytes, store.put("logs", b"l" * 50)) == (0, 0, 0)
    assert len(list(tmp_path.iterdir())) == 2
