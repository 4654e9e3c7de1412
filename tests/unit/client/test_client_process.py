"""No client hangs its process: in a reference cycle, after a fork, over two event loops, at the interpreter's exit.

Each case is a script in a child process with a limit, since what it holds against is a process that never ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.server import FakeServer

LIMIT_S = 120.0
"""A script takes half a second; one that hangs never ends."""

HEAD = """
import asyncio, gc, os, signal, sys, threading, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12, of every fork
import numpy as np
from edge_runtime import AsyncClient, Client
endpoint = sys.argv[1]
X = np.zeros((1, 4), np.float32)

def caught(function):
    try:
        function()
    except Exception as error:
        return error
    raise SystemExit("nothing was raised")

def in_child(function):
    # The child's exit status is the test's: 0 only where the function returned True within 60 s.
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(0 if function() else 3)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, status
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(tmp_path / "infer.sock") as server:
        yield server


def run(script: str, endpoint: str) -> None:
    """Run a script to its end. Fails when it raises, complains, or hangs."""
    ran = subprocess.run(
        [sys.executable, "-c", HEAD + script, endpoint],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# ---- garbage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["client.infer('echo', {'x': X})", "client.models()", "client.is_live()"])
def test_a_client_in_a_reference_cycle_is_collected(server: FakeServer, call: str) -> None:
    run(
        f"""
def use():
    client = Client(endpoint)
    {call}
    error = caught(lambda: client.infer("nobody", {{"x": X}}))
    error.held = (client, error)  # as a caught exception holds the frame, and that the client
for _ in range(10):
    use()
    gc.collect()
""",
        server.endpoint,
    )


def test_a_client_in_a_reference_cycle_gives_its_descriptors_back(server: FakeServer) -> None:
    run(
        """
def use():
    client = Client(endpoint)
    client.infer("echo", {"x": X})
    client.itself = client
def descriptors():
    return len(os.listdir("/proc/self/fd"))
use(); gc.collect()
before = descriptors()
for _ in range(20):
    use()
gc.collect()
assert descriptors() <= before, (before, descriptors())
""",
        server.endpoint,
    )


@pytest.mark.parametrize("model", ["echo", "silent"])
def test_a_client_that_is_dropped_after_submit_ends_its_thread(server: FakeServer, model: str) -> None:
    timeout_ms = 0 if model == "silent" else 60_000
    run(
        f"""
import time
def use():
    client = Client(endpoint)
    client.itself = client
    return client.submit("{model}", {{"x": X}}, timeout_ms={timeout_ms})
gc.disable()  # each client is collected right after its request was handed over
futures = [(use(), gc.collect())[0] for _ in range(20)]
for future in futures:
    assert (future.exception(60) is None) == ("{model}" == "echo")
end_s = time.monotonic() + 60
while threading.active_count() > 1:
    gc.collect()
    assert time.monotonic() < end_s, threading.enumerate()
    time.sleep(0.01)
""",
        server.endpoint,
    )


def test_an_async_client_in_a_reference_cycle_is_collected(server: FakeServer) -> None:
    run(
        """
async def use():
    client = AsyncClient(endpoint)
    await client.infer("echo", {"x": X})
    client.itself = client
for _ in range(10):
    asyncio.run(use())
    gc.collect()
""",
        server.endpoint,
    )


def test_a_client_whose_future_holds_it_ends_with_the_interpreter(server: FakeServer) -> None:
    run(
        """
client = Client(endpoint)
future = client.submit("silent", {"x": X})
future.add_done_callback(lambda _: client)
server_went_on = client.submit("echo", {"x": X}).result(60)
""",
        server.endpoint,
    )


# ---- the interpreter's exit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["client.infer('echo', {'x': X})", "client.submit('echo', {'x': X}).result(60)"])
def test_the_interpreter_exits_with_an_open_client(server: FakeServer, use: str) -> None:
    run(f"client = Client(endpoint)\n{use}\n", server.endpoint)


def test_the_interpreter_exits_while_calls_wait(server: FakeServer) -> None:
    run(
        """
client = Client(endpoint)
for _ in range(3):
    threading.Thread(target=client.infer, args=("silent", {"x": X}), daemon=True).start()
client.submit("silent", {"x": X})
client.infer("echo", {"x": X})
""",
        server.endpoint,
    )


def test_the_interpreter_exits_with_an_open_async_client(server: FakeServer) -> None:
    run(
        """
client = AsyncClient(endpoint)
async def use():
    await client.infer("echo", {"x": X})
asyncio.run(use())
""",
        server.endpoint,
    )


def test_a_client_outlives_the_thread_that_made_it(server: FakeServer) -> None:
    run(
        """
made = []
def make():
    made.append(Client(endpoint))
    made[0].infer("echo", {"x": X})
thread = threading.Thread(target=make)
thread.start()
thread.join()
made[0].infer("echo", {"x": X})
made[0].submit("echo", {"x": X}).result(60)
made[0].close()
""",
        server.endpoint,
    )


# ---- fork -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "client.infer('echo', {'x': X}, timeout_ms=100)",
        "client.submit('echo', {'x': X}, timeout_ms=100)",
        "client.models()",
        "client.is_live()",
    ],
)
@pytest.mark.parametrize("use", ["client.infer('echo', {'x': X})", "client.submit('echo', {'x': X}).result(60)"])
def test_a_client_in_use_says_in_the_child_of_a_fork_that_it_is_the_parents(
    server: FakeServer, use: str, call: str
) -> None:
    run(
        f"""
client = Client(endpoint)
{use}
def child():
    error = caught(lambda: {call})
    client.close()
    return isinstance(error, RuntimeError) and "make a new one" in str(error)
in_child(child)
client.infer("echo", {{"x": X}})
client.close()
""",
        server.endpoint,
    )


def test_a_fork_while_a_call_waits_is_seen_by_the_child(server: FakeServer) -> None:
    run(
        """
client = Client(endpoint)
waiting = threading.Thread(target=lambda: caught(lambda: client.infer("silent", {"x": X})))
waiting.start()
client.infer("echo", {"x": X})
in_child(lambda: isinstance(caught(client.models), RuntimeError))
client.close()
waiting.join()
""",
        server.endpoint,
    )


def test_the_child_of_a_fork_lets_go_of_its_parents_client(server: FakeServer) -> None:
    run(
        """
client = Client(endpoint)
client.infer("echo", {"x": X})
client.itself = client
def child():
    global client
    client = None
    gc.collect()
    with Client(endpoint) as own:
        own.infer("echo", {"x": X})
    return True
in_child(child)
client.infer("echo", {"x": X})
client.close()
""",
        server.endpoint,
    )


def test_a_client_not_used_before_the_fork_works_on_both_sides(server: FakeServer) -> None:
    run(
        """
client = Client(endpoint)
def use():
    client.infer("echo", {"x": X})
    client.submit("echo", {"x": X}).result(60)
    client.close()
    return True
in_child(use)
use()
""",
        server.endpoint,
    )


def test_a_process_that_is_spawned_refuses_a_client_as_an_argument(server: FakeServer) -> None:
    run(
        """
import multiprocessing
client = Client(endpoint)
client.infer("echo", {"x": X})
error = caught(lambda: multiprocessing.get_context("spawn").Process(target=print, args=(client,)).start())
assert isinstance(error, TypeError), error
client.close()
""",
        server.endpoint,
    )


def test_an_async_client_in_use_says_in_the_child_of_a_fork_that_it_is_the_parents(server: FakeServer) -> None:
    run(
        """
client = AsyncClient(endpoint)
async def use():
    await client.infer("echo", {"x": X}, timeout_ms=20_000)
async def close():
    await client.close()
loop = asyncio.new_event_loop()
loop.run_until_complete(use())
def child():
    error = caught(lambda: asyncio.run(use()))
    asyncio.run(close())
    return isinstance(error, RuntimeError) and "make a new one" in str(error)
in_child(child)
loop.run_until_complete(use())
loop.run_until_complete(close())
loop.close()
""",
        server.endpoint,
    )


# ---- event loops ----------------------------------------------------------------------------------------------------


def test_an_async_client_goes_on_in_the_next_event_loop(server: FakeServer) -> None:
    run(
        """
client = AsyncClient(endpoint, max_in_flight=2)
async def use():
    await asyncio.gather(*(client.infer("echo", {"x": [[0, 0, 0, 0]]}) for _ in range(8)))
    assert len(await client.models()) == 1
asyncio.run(use())
asyncio.run(use())
async def close():
    await client.close()
asyncio.run(close())
""",
        server.endpoint,
    )


def test_a_call_that_waited_in_an_event_loop_that_was_closed_holds_no_slot_in_the_next(server: FakeServer) -> None:
    run(
        """
client = AsyncClient(endpoint, max_in_flight=1)
loop = asyncio.new_event_loop()
async def begin():
    asyncio.ensure_future(client.infer("silent", {"x": X}))
    asyncio.ensure_future(client.infer("echo", {"x": X}))
    await asyncio.sleep(0.1)
warnings.simplefilter("ignore")
loop.run_until_complete(begin())
for task in asyncio.all_tasks(loop):
    task._log_destroy_pending = False
loop.close()
async def use():
    await client.infer("echo", {"x": X}, timeout_ms=20_000)
    await client.close()
asyncio.run(use())
""",
        server.endpoint,
    )
