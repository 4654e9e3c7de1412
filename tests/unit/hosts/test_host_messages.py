"""Messages between the daemon and hosts: decoded on many threads at once."""

from __future__ import annotations

import subprocess
import sys

from edge_runtime.hosts import messages as host_messages

DECODES = f"""
import sys, threading
import msgspec
import {host_messages.__name__} as messages

sys.setswitchinterval(1e-6)
sent = (
    (messages.Loaded((), (), None, "", "", 1, 1, False), messages.HostReport),
    (messages.Interrupt(1, 2), messages.HostOrder),
    (messages.Run((messages.SlotPlace((1, 2), 0, 8),), 8), messages.RunnerOrder),
    (messages.Responded(), messages.RunnerReport),
    (messages.Kill(1), messages.ParentOrder),
    (messages.ResponseTaken(True), messages.RespondReport),
)
barrier = threading.Barrier(8)

def decode_all():
    for message, kind in sent:
        data = msgspec.msgpack.encode(message)
        barrier.wait()
        assert messages.decode(data, kind) == message

threads = [threading.Thread(target=decode_all) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_that_decode_the_first_messages_at_once_do_not_end_the_process() -> None:
    for _ in range(8):
        ended = subprocess.run([sys.executable, "-c", DECODES], capture_output=True, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
