"""No way to leave a client behind hangs its process or loses an answer that came, over any door.

Each case is a script in a child process, against one daemon with every door open. A script that hangs is ended after
LIMIT_S, and says where each of its threads stands.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.contract.open_doors import OpenDoors, open_doors
from tests.contract.running_daemon import put_held_model, put_model
from tests.fakes.broker import needs_mosquitto
from tests.models import onnx_models

pytestmark = needs_mosquitto

DOORS = ["zmq", "mqtt", "http", "grpc"]

LIMIT_S = 25
"""A script takes half a second, ten on a machine that does much else; a request without an answer fails after 30."""

HEAD = """
import asyncio, atexit, faulthandler, gc, multiprocessing, os, signal, sys, threading, time, warnings, weakref
from concurrent.futures import Future, ThreadPoolExecutor
DOOR, ADDRESS, LIMIT_S, GATE, NUMBER = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
faulthandler.enable()
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # Python 3.12, of every fork
os.environ["GRPC_VERBOSITY"] = "NONE"  # it writes of each fork
import numpy as np
from edge_runtime import AsyncClient, Client, MqttClient, OipClient
X = np.ones((1, 16), np.float32)
HELD = np.full((1, 1), NUMBER, np.float32)  # answered once `open_gate` was called
KIND = {"zmq": Client, "mqtt": MqttClient, "http": OipClient, "grpc": OipClient}[DOOR]
new = lambda **options: KIND(ADDRESS, **options)

def check(client):
    assert client.infer("mlp", {"x": X})["y"].shape == (1, 4)
    return True

def open_gate():
    open(GATE, "w").close()

def caught(function, *kinds):
    try:
        function()
    except kinds or Exception as error:
        return error
    raise AssertionError("nothing was raised")

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def in_child(function):
    # 0 only where the function returned True, and the interpreter ended well.
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(LIMIT_S // 2)
        sys.exit(0 if function() else 3)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == 0, status

def waiters(client, number, daemon=True):
    # Threads that wait for the held answer, and what each of them got.
    got = []
    def wait():
        try:
            got.append(client.infer("held", {"x": HELD})["y"][0, 0])
        except Exception as error:
            got.append(error)
    threads = [threading.Thread(target=wait, daemon=daemon) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads, got

def wait_until(is_so, limit_s=10):
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s, "waited for nothing"
        time.sleep(0.005)

def interrupt_soon(number=signal.SIGINT, seconds=0.2):
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
    signal.setitimer(signal.ITIMER_REAL, seconds)

signal.signal(signal.SIGINT, signal.default_int_handler)
"""

WAYS = {
    # ---- garbage ----------------------------------------------------------------------------------------------------
    "in a reference cycle, with a caught exception that holds it": """
def use():
    client = new()
    check(client)
    error = caught(lambda: client.infer("nobody", {"x": X}))
    error.held = (client, error)
    client.itself = client
use(); gc.collect()
for _ in range(5):
    use(); gc.collect()
""",
    "without close, many times": """
def use():
    check(new())
    gc.collect()
use()
before = descriptors(), threading.active_count()
for _ in range(20):
    use()
wait_until(lambda: (descriptors(), threading.active_count()) <= before)
""",
    "dropped before its answer came": """
future = new().submit("held", {"x": HELD})
gc.collect()
open_gate()
assert future.result(10)["y"][0, 0] == NUMBER
""",
    "dropped in the answer's callback": """
got = Future()
def begin():
    client = new()
    client.submit("mlp", {"x": X}).add_done_callback(lambda future: (got.set_result(future.result()), client.endpoint))
begin()
gc.collect()
assert got.result(10)["y"].shape == (1, 4)
gc.collect()
""",
    "asked by what the garbage collector frees in the middle of its calls": """
client = new()
asked = []
class Owner:
    def __init__(self):
        self.itself = self
    def __del__(self):
        try:
            client.is_live()
        except RuntimeError as error:  # in the middle of a call of the same thread
            asked.append(error)
        asked.append(1)
gc.set_threshold(20, 1, 1)
for _ in range(60):
    Owner()
    check(client)
gc.set_threshold(700, 10, 10)
assert asked
check(client)
client.close()
""",
    "in a generator that was left half way": """
def results():
    with new() as client:
        while True:
            yield client.infer("mlp", {"x": X})
left = results()
next(left)
del left
gc.collect()
still_there = results()
next(still_there)
""",
    # ---- the interpreter's exit -------------------------------------------------------------------------------------
    "open at the interpreter's exit": """
client = new()
check(client)
client.submit("mlp", {"x": X}).result(10)
""",
    "waited for by daemon threads at the exit": """
client = new()
check(client)
waiters(client, 3)
client.submit("held", {"x": HELD})
check(client)
""",
    "with futures that hold it at the exit": """
client = new()
future = client.submit("held", {"x": HELD})
future.add_done_callback(lambda _: client)
check(client)
future.client = client
""",
    "waited for by a thread that the exit waits for": """
client = new()
threads, got = waiters(client, 1, daemon=False)
def open_late():
    wait_until(lambda: not threading.main_thread().is_alive())
    open_gate()
    threads[0].join()
    os._exit(0 if got == [NUMBER] else 3)
threading.Thread(target=open_late).start()
""",
    "closed by atexit while threads wait": """
client = new()
atexit.register(client.close)
check(client)
waiters(client, 2)
client.submit("held", {"x": HELD})
""",
    "made and used by atexit": """
def late():
    client = new()
    check(client)
    client.submit("mlp", {"x": X}).cancel() if DOOR == "mqtt" else None
atexit.register(late)
client = new()
check(client)
""",
    "closed by a finalizer while modules are torn down": """
class Holder:
    def __init__(self):
        self.client = new()
        check(self.client)
        self.future = self.client.submit("held", {"x": HELD})
    def __del__(self):
        self.client.close()
holder = Holder()
sys.modules["holder"] = holder
""",
    "by an exception that ends the main thread": """
client = new()
waiters(client, 1)
check(client)
sys.excepthook = lambda *_: None
atexit.register(lambda: os._exit(0))  # else the status is the exception's
raise ValueError
""",
    "by os._exit in the middle of a wait": """
client = new()
future = client.submit("held", {"x": HELD})
check(client)
os._exit(0)
""",
    # ---- fork and spawn ---------------------------------------------------------------------------------------------
    "used in the child of a fork": """
client = new()
check(client)
client.submit("mlp", {"x": X}).result(10)
def child():
    for call in (lambda: check(client), lambda: client.submit("mlp", {"x": X}), client.models):
        assert "make a new one" in str(caught(call, RuntimeError))
    client.close()
    return True
in_child(child)
check(client)
client.close()
""",
    "held by the child of a fork to its end": """
client = new()
check(client)
future = client.submit("held", {"x": HELD})
in_child(lambda: True)
open_gate()
assert future.result(10)["y"][0, 0] == NUMBER
""",
    "waited for during a fork whose child makes its own": """
client = new()
check(client)
threads, got = waiters(client, 2)
def child():
    global client
    client = None
    gc.collect()
    with new() as own:
        return check(own)
in_child(child)
open_gate()
for thread in threads:
    thread.join()
assert got == [NUMBER] * 2, got
""",
    "made before a fork and used by both sides": """
client = new()
def use():
    check(client)
    client.submit("mlp", {"x": X}).result(10)
    client.close()
    return True
in_child(use)
use()
""",
    "used in the processes of a pool": """
client = new()
check(client)
def use(_):
    with new() as own:
        return check(own)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(use, range(4)) == [True] * 4
check(client)
""",
    "given to a process that is spawned": """
client = new()
check(client)
context = multiprocessing.get_context("spawn")
caught(lambda: context.Process(target=print, args=(client,)).start(), TypeError)
check(client)
client.close()
""",
    # ---- signals ----------------------------------------------------------------------------------------------------
    "interrupted in the middle of a wait": """
client = new()
check(client)
threads, got = waiters(client, 2)
future = client.submit("held", {"x": HELD})
interrupt_soon()
caught(lambda: client.infer("held", {"x": HELD}), KeyboardInterrupt)
check(client)
open_gate()
for thread in threads:
    thread.join()
assert got == [NUMBER] * 2, got
assert future.result(10)["y"][0, 0] == NUMBER
client.close()
""",
    "interrupted twice, the second time while it leaves": """
client = new()
check(client)
sys.unraisablehook = lambda _: None  # the storm reaches finalizers of Python's own half made objects, which say so
for _ in range(20):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005, 0.0002)
        try:
            while True:
                client.infer("mlp", {"x": X})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, RuntimeError):  # the latter of Python's own locks, which such a storm may tear
        pass
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            break
        except KeyboardInterrupt:
            pass
gc.collect()
sys.unraisablehook = sys.__unraisablehook__
future = client.submit("mlp", {"x": X}, timeout_ms=1000)
future.exception(10)
caught(lambda: [client.infer("nobody", {"x": X}, timeout_ms=1000)])
client.close()
check(new())
""",
    "waiting while a handler runs and returns": """
client = new()
check(client)
ran = []
def handler(*_):
    ran.append(1)
    if len(ran) == 2:
        open_gate()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.3 if DOOR == "grpc" else 0.02)  # gRPC looks when none came for 0.2 s
assert client.infer("held", {"x": HELD})["y"][0, 0] == NUMBER
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(ran) >= 2
""",
    "asked by a handler that interrupts its wait": """
client = new()
check(client)
def handler(*_):
    check(client)
    client.submit("mlp", {"x": X}).result(10)
    open_gate()
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
assert client.infer("held", {"x": HELD})["y"][0, 0] == NUMBER
check(client)
client.close()
""",
    "closed by a handler that interrupts its wait": """
client = new()
check(client)
signal.signal(signal.SIGTERM, lambda *_: client.close())
interrupt_soon(signal.SIGTERM)
caught(lambda: client.infer("held", {"x": HELD}), ConnectionError)
client.close()
""",
    "ended by a handler that exits": """
client = new()
check(client)
waiters(client, 1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
interrupt_soon(signal.SIGTERM)
with client:
    client.infer("held", {"x": HELD})
sys.exit(3)
""",
    "asked by handlers at any moment of its calls": """
client = new()
check(client)
asked = []
def handler(*_):
    try:
        asked.append(client.is_live())
    except RuntimeError:  # in the middle of a call of the same thread
        asked.append(False)
    signal.setitimer(signal.ITIMER_REAL, 0.003)  # not sooner: a request may take longer, and they would nest
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001)
end_s = time.monotonic() + 0.7
while time.monotonic() < end_s or not any(asked):
    check(client)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
check(client)
client.close()
""",
    "stopped and continued in the middle of a wait": """
client = new()
check(client)
threads, got = waiters(client, 1)
if (pid := os.fork()) == 0:
    parent = os.getppid()
    time.sleep(0.2)
    os.kill(parent, signal.SIGSTOP)
    open_gate()
    time.sleep(0.3)
    os.kill(parent, signal.SIGCONT)
    os._exit(0)
os.waitpid(pid, 0)
threads[0].join()
assert got == [NUMBER], got
client.close()
""",
    # ---- threads ----------------------------------------------------------------------------------------------------
    "by the thread that made it": """
made = []
def make():
    made.append(new())
    check(made[0])
thread = threading.Thread(target=make)
thread.start()
thread.join()
check(made[0])
made[0].submit("mlp", {"x": X}).result(10)
made[0].close()
""",
    "by threads that die of an exception while they wait": """
import ctypes
client = new()
check(client)
waiting, got = waiters(client, 2)
class Dies(Exception):
    pass
threading.excepthook = lambda *_: None
dying = threading.Thread(target=lambda: client.infer("held", {"x": HELD}), daemon=True)
dying.start()
for thread in (dying, waiting[0]):
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Dies))
check(client)
open_gate()
for thread in (dying, *waiting):
    thread.join()
assert all(each == NUMBER or isinstance(each, Dies) for each in got), got
check(client)
client.close()
""",
    "asked by many threads that end in any order": """
client = new()
check(client)
def use(number):
    for _ in range(number):
        check(client)
    return client.submit("mlp", {"x": X})
with ThreadPoolExecutor(8) as pool:
    futures = list(pool.map(use, range(16)))
assert all(future.result(10)["y"].shape == (1, 4) for future in futures)
""",
    "closed by several threads while others wait": """
client = new()
check(client)
waiting, got = waiters(client, 4)
futures = [client.submit("held", {"x": HELD}) for _ in range(4)]
time.sleep(0.1)
closing = [threading.Thread(target=client.close) for _ in range(4)]
for thread in closing:
    thread.start()
for thread in (*closing, *waiting):
    thread.join()
assert len(got) == 4
assert all(isinstance(each, ConnectionError) for each in got), got
assert all(isinstance(future.exception(10), ConnectionError) for future in futures)
caught(lambda: check(client), ConnectionError)
""",
    "closed by a future's callback": """
client = new()
closed = threading.Event()
def close(_):
    client.close()
    closed.set()
client.submit("mlp", {"x": X}).add_done_callback(close)
assert closed.wait(10)
caught(lambda: check(client), ConnectionError)
client.close()
""",
    "with a callback that raises, and one that asks": """
import logging
logging.getLogger("concurrent.futures").setLevel(logging.CRITICAL)
client = new()
check(client)
got = Future()
def asks(_):
    try:
        got.set_result(check(client))
    except RuntimeError as error:  # where replies come on this very thread
        got.set_exception(error)
first = client.submit("held", {"x": HELD})
first.add_done_callback(lambda _: 1 / 0)
first.add_done_callback(asks)
open_gate()
assert first.result(10)["y"][0, 0] == NUMBER
assert got.exception(10) is None or DOOR == "mqtt"
check(client)
client.close()
""",
    "with futures that were cancelled": """
client = new(max_in_flight=2)
check(client)
futures = [client.submit("held", {"x": HELD}) for _ in range(2)]
for future in futures:
    future.cancel()
threads, got = waiters(client, 1)
open_gate()
threads[0].join()
assert got == [NUMBER], got
check(client)
client.close()
""",
    "full, in a with block that an exception leaves": """
client = new(max_in_flight=1)
def use():
    with client:
        futures.append(client.submit("held", {"x": HELD}))
        threading.Thread(target=lambda: caught(lambda: client.infer("held", {"x": HELD}))).start()
        time.sleep(0.1)
        raise ValueError
futures = []
caught(use, ValueError)
assert isinstance(futures[0].exception(10), ConnectionError)
""",
    # ---- event loops ------------------------------------------------------------------------------------------------
    "asked by an event loop's threads, and the loop is cancelled": """
client = new()
check(client)
async def use():
    loop = asyncio.get_running_loop()
    waiting = loop.run_in_executor(None, lambda: client.infer("held", {"x": HELD}))
    assert await loop.run_in_executor(None, check, client)
    future = asyncio.wrap_future(client.submit("held", {"x": HELD}))
    done, _ = await asyncio.wait([future], timeout=0.05)
    assert not done
    future.cancel()
    open_gate()
    return (await waiting)["y"][0, 0]
assert asyncio.run(use()) == NUMBER
check(client)
""",
}

ASYNC_WAYS = {
    "by a loop that ends in the middle of a wait": """
client = AsyncClient(ADDRESS)
async def use():
    task = asyncio.ensure_future(client.infer("held", {"x": HELD}))
    await client.infer("mlp", {"x": X})
    return task
task = asyncio.run(use())
assert task.cancelled()
asyncio.run(client.infer("mlp", {"x": X}))
asyncio.run(client.close())
""",
    "in a loop that was never closed": """
client = AsyncClient(ADDRESS)
loop = asyncio.new_event_loop()
loop.run_until_complete(client.infer("mlp", {"x": X}))
task = loop.create_task(client.infer("held", {"x": HELD}))
loop.run_until_complete(asyncio.sleep(0.05))
task._log_destroy_pending = False
os.environ["PYTHONWARNINGS"] = "ignore"
warnings.simplefilter("ignore")
""",
    "used by two loops in two threads": """
client = AsyncClient(ADDRESS)
loop = asyncio.new_event_loop()
thread = threading.Thread(target=loop.run_forever)
thread.start()
ask = lambda: asyncio.run_coroutine_threadsafe(client.infer("mlp", {"x": X}), loop).result(10)
ask()
assert "another event loop" in str(caught(lambda: asyncio.run(client.infer("mlp", {"x": X})), RuntimeError))
ask()
asyncio.run_coroutine_threadsafe(client.close(), loop).result(10)
loop.call_soon_threadsafe(loop.stop)
thread.join()
loop.close()
""",
    "interrupted in the middle of a wait": """
client = AsyncClient(ADDRESS)
async def use():
    await client.infer("mlp", {"x": X})
    await client.infer("held", {"x": HELD})
interrupt_soon()
caught(lambda: asyncio.run(use()), KeyboardInterrupt)
async def again():
    await client.infer("mlp", {"x": X})
    await client.close()
asyncio.run(again())
""",
    "with tasks that were cancelled, and others that wait": """
async def use():
    async with AsyncClient(ADDRESS, max_in_flight=8) as client:
        await client.infer("mlp", {"x": X})
        tasks = [asyncio.ensure_future(client.infer("held", {"x": HELD})) for _ in range(8)]
        queued = [asyncio.ensure_future(client.infer("mlp", {"x": X})) for _ in range(4)]
        await asyncio.sleep(0.05)
        for task in (*tasks[::2], queued[0]):
            task.cancel()
        open_gate()
        got = await asyncio.gather(*tasks, *queued, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in got) == 5, got
        assert sum(hasattr(each, "outputs") for each in got) == 7, got
asyncio.run(use())
""",
    "given up by wait_for, many times": """
async def use():
    async with AsyncClient(ADDRESS, max_in_flight=4) as client:
        await client.infer("mlp", {"x": X})
        for _ in range(20):
            try:
                await asyncio.wait_for(client.infer("held", {"x": HELD}), 0.01)
            except (TimeoutError, asyncio.TimeoutError):
                pass
        open_gate()
        await asyncio.gather(*(client.infer("mlp", {"x": X}) for _ in range(20)))
asyncio.run(use())
""",
    "closed while tasks wait": """
async def use():
    client = AsyncClient(ADDRESS, max_in_flight=2)
    await client.infer("mlp", {"x": X})
    tasks = [asyncio.ensure_future(client.infer("held", {"x": HELD})) for _ in range(4)]
    await asyncio.sleep(0.05)
    await client.close()
    got = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, ConnectionError) for each in got), got
asyncio.run(use())
""",
    "closed by a loop that did not use it": """
client = AsyncClient(ADDRESS)
loop = asyncio.new_event_loop()
loop.run_until_complete(client.infer("mlp", {"x": X}))
asyncio.run(client.close())
caught(lambda: loop.run_until_complete(client.infer("mlp", {"x": X})), ConnectionError)
loop.close()
""",
    "in an async generator that was left half way": """
async def results():
    async with AsyncClient(ADDRESS) as client:
        while True:
            yield await client.infer("mlp", {"x": X})
async def use():
    async for _ in results():
        break
    gc.collect()
asyncio.run(use())
""",
    "in a reference cycle, in the middle of a wait": """
async def use():
    client = AsyncClient(ADDRESS)
    await client.infer("mlp", {"x": X})
    client.task = asyncio.ensure_future(client.infer("held", {"x": HELD}))
    client.itself = client
    await asyncio.sleep(0.02)
for _ in range(5):
    asyncio.run(use())
    gc.collect()
""",
    "closed by a signal that the loop handles": """
async def use():
    client = AsyncClient(ADDRESS)
    await client.infer("mlp", {"x": X})
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: asyncio.ensure_future(client.close()))
    interrupt_soon(signal.SIGTERM)
    try:
        await client.infer("held", {"x": HELD})
    except ConnectionError:
        return
    raise AssertionError
asyncio.run(use())
""",
    "used in the child of a fork, in a loop of its own": """
client = AsyncClient(ADDRESS)
loop = asyncio.new_event_loop()
loop.run_until_complete(client.infer("mlp", {"x": X}))
def child():
    assert "make a new one" in str(caught(lambda: asyncio.run(client.infer("mlp", {"x": X})), RuntimeError))
    async def own():
        async with AsyncClient(ADDRESS) as client:
            await client.infer("mlp", {"x": X})
    asyncio.run(own())
    return True
in_child(child)
loop.run_until_complete(client.infer("mlp", {"x": X}))
loop.run_until_complete(client.close())
loop.close()
""",
    "given to a process that is spawned": """
client = AsyncClient(ADDRESS)
asyncio.run(client.infer("mlp", {"x": X}))
context = multiprocessing.get_context("spawn")
caught(lambda: context.Process(target=print, args=(client,)).start(), TypeError)
""",
}

MEMORY_WAYS = {
    "with shared arrays, by a fork while another thread allocates": """
client = Client(ADDRESS)
x = client.allocate((1, 16), np.float32)
client.infer("mlp", {"x": x})
stop = threading.Event()
def allocate():
    while not stop.is_set():
        client.allocate((1 << 18,), np.uint8)
thread = threading.Thread(target=allocate)
thread.start()
for _ in range(2):
    in_child(lambda: caught(lambda: client.allocate((1, 16), np.float32), RuntimeError) is not None)
stop.set()
thread.join()
client.infer("mlp", {"x": x})
client.close()
""",
    "with shared arrays in cycles, at the exit": """
client = Client(ADDRESS)
arrays = [client.allocate((1, 16), np.float32) for _ in range(3)]
client.arrays = arrays
for x in arrays:
    client.infer("mlp", {"x": x}, outputs={"y": client.allocate((1, 4), np.float32)})
future = client.submit("held", {"x": HELD})
""",
}


NOT_OVER_GRPC = {
    "made before a fork and used by both sides": "gRPC begins with the client, and supports no fork from then on",
    "used in the processes of a pool": "gRPC supports no fork of a process with a channel in use",
    "interrupted twice, the second time while it leaves": "hangs in gRPC, where an interrupt may leave its locks held",
    "by threads that die of an exception while they wait": "hangs in gRPC, where it may leave its locks held",
}


@pytest.fixture(scope="module")
def gates(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def models(tmp_path_factory, gates) -> Path:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_held_model(models, gates / "{value}", "max_queue_rows = 64\n[warmup]\nruns = 0\n")
    return models


@pytest.fixture(scope="module")
def doors(models, broker, tmp_path_factory) -> Iterator[OpenDoors]:
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "left", python_models=True) as doors:
        yield doors


NUMBERS = count(1)


@pytest.fixture
def number(gates) -> Iterator[int]:
    """Of the gate of one script; opened afterwards, so that the next script's requests are run."""
    number = next(NUMBERS)
    yield number
    (gates / str(number)).touch()


def start(script: str, door: str, address: str, gate: Path) -> subprocess.Popen[str]:
    """Start a script, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + script, door, address, str(LIMIT_S), str(gate), gate.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(child: subprocess.Popen[str]) -> None:
    """Wait for its end. Fails when it raised, complained, or hung."""
    with child:  # a pipe left open fails a later test
        try:
            said, _ = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)  # it says where its threads stand
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LIMIT_S)
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its children too
                os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
    if child.returncode or said:
        pytest.fail(f"exit status {child.returncode}\n{said}", pytrace=False)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("way", WAYS)
def test_a_client_left(doors: OpenDoors, gates: Path, number: int, way: str, door: str) -> None:
    if door == "grpc" and way in NOT_OVER_GRPC:
        pytest.skip(NOT_OVER_GRPC[way])
    end(start(WAYS[way], door, getattr(doors, door), gates / str(number)))


@pytest.mark.smoke
@pytest.mark.parametrize("way", ASYNC_WAYS)
def test_an_async_client_left(doors: OpenDoors, gates: Path, number: int, way: str) -> None:
    end(start(ASYNC_WAYS[way], "zmq", doors.zmq, gates / str(number)))


@pytest.mark.parametrize("way", MEMORY_WAYS)
def test_a_client_left_with_shared_memory(doors: OpenDoors, gates: Path, number: int, way: str) -> None:
    end(start(MEMORY_WAYS[way], "zmq", doors.zmq, gates / str(number)))
