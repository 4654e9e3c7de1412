"""Starts the daemon on models, sends it real images and a photograph, shows answers and latencies, and stops it.

    make demo        or, once set up:  python -m demo.run_demo [--quick] [--stay]

Everything goes through the public doors: `edge-runtime serve` as a process of its own, `edge_runtime.Client` over
ZeroMQ, curl over HTTP, and where mosquitto is installed, a broker of our own and no library of ours at all. Each step
is bounded in time, and the daemon is stopped however this program ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from demo.broker import free_ports, own_broker
from demo.daemon import Daemon, DemoFailed, running_daemon, short_folder
from demo.digits import Digits, as_text, load_held_out
from demo.latency import DaemonWay, Figures, Flood, Images, Raw, Way, flood, measure, percentile
from demo.make_vision_model import PICTURE_SHAPE
from demo.program import run
from demo.screen import Screen
from demo.train_digits import REPORT_FILE
from edge_runtime import Client

MODELS = Path(__file__).parent / "models"
DIGITS_MODEL = MODELS / "digits" / "1" / "model.onnx"
PHOTO, PHOTO_STEPS = Path(__file__).with_name("seven.jpg"), Path(__file__).with_name("photo.toml")
DRAWN = Path("build/demo")
"""Where the photograph with its answer is left, below the folder in which the demonstration runs."""
VISION_MODEL = MODELS / "mobilenetv2" / "1" / "model.onnx"
SHOWN = 6
FLOOD_TIMEOUT_MS = 250.0


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line. Returns the exit status: 0 on success."""
    parser = argparse.ArgumentParser(prog="python -m demo.run_demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="measure for a moment only")
    parser.add_argument(
        "--stay", action="store_true", help="leave the daemon up at the end, for its page, until Ctrl-C"
    )
    parsed = parser.parse_args(arguments)
    is_quick = parsed.quick
    screen = Screen()

    def show() -> bool:
        return _demonstrate(screen, seconds=0.15 if is_quick else 0.7, rounds=1 if is_quick else 3, stays=parsed.stay)

    return run(screen, show, "The README leads on: a tour in five minutes.")


def _demonstrate(screen: Screen, *, seconds: float, rounds: int, stays: bool) -> bool:
    with short_folder() as folder:
        digits, (http_port,) = load_held_out(), free_ports(1)
        with own_broker(folder) as port, _daemon(screen, folder, http_port, port) as daemon:
            with Client(daemon.endpoint, max_in_flight=1024) as client:
                is_right = _show_digits(screen, client, digits)
                capacity_per_s = _show_latencies(screen, client, digits, rounds, seconds)
                _show_overload(screen, client, digits, capacity_per_s, 4 * seconds)
            is_right = _show_http(screen, digits, http_port) and is_right
            is_right = _show_mqtt(screen, digits, port) and is_right
            is_right = _show_photo(screen, daemon.endpoint) and is_right
            _show_page(screen, http_port, stays=stays)
            return _stop(screen, daemon) and is_right


def _show_page(screen: Screen, port: int, *, stays: bool) -> None:
    """Name the daemon's page, and keep the daemon up for it where that is wanted."""
    with screen.step("The daemon's page, in a browser"):
        screen.line(f"  http://127.0.0.1:{port}/")
        if not stays:
            screen.line("  while it runs: make demo ARGS=--stay leaves it up")
            return
        with contextlib.suppress(KeyboardInterrupt):
            screen.line("  Ctrl-C ends it")
            signal.pause()


def _daemon(screen: Screen, folder: Path, http_port: int, broker_port: int | None) -> AbstractContextManager[Daemon]:
    photo = folder / "photo"
    (photo / "1").mkdir(parents=True)
    shutil.copy(DIGITS_MODEL, photo / "1")
    shutil.copy(PHOTO_STEPS, photo / "model.toml")
    options = ["--models", str(MODELS), "--model", f"photo={photo}", "--http", f"127.0.0.1:{http_port}"]
    if broker_port is not None:
        options += ["--mqtt", f"mqtt://127.0.0.1:{broker_port}/demo"]
    title = "The daemon starts: a folder of two models, one more that takes pictures, a socket and a port"
    return running_daemon(screen, title, folder, options, "models loaded, measured and warm")


def _stop(screen: Screen, daemon: Daemon) -> bool:
    with screen.step("The daemon stops: SIGTERM, answer what was admitted, leave"):
        return daemon.stop(screen)


# ---- answers --------------------------------------------------------------------------------------------------------


def _show_digits(screen: Screen, client: Client, digits: Digits) -> bool:
    """Ask for every held-out image; show some, and every mistake. Returns whether the answers are the model's own."""
    with screen.step(f"{len(digits.labels)} scanned digits that no training has seen, each a request of its own"):
        images = digits.images.astype(np.float32)
        futures = [
            client.submit("digits", {"image": images[row : row + 1]}, timeout_ms=10_000) for row in _rows(images)
        ]
        answers = [future.result(timeout=30) for future in futures]
        found = np.array([int(answer["digit"][0]) for answer in answers])
        chances = np.array([float(answer["scores"].max()) for answer in answers])

        wrong = [row for row in _rows(images) if found[row] != digits.labels[row]]
        right = [row for row in _rows(images) if row not in set(wrong)]
        blocks = [
            _block(screen, digits, row, int(found[row]), chances[row])
            for row in [*right[:: len(right) // SHOWN][:SHOWN], *wrong]
        ]
        _show_side_by_side(screen, blocks)

        stated = json.loads(REPORT_FILE.read_text())["correct"]
        own = Raw(DIGITS_MODEL, 1).answer(images)[1]
        same = int((own == found).sum())
        correct = len(found) - len(wrong)
        percent = screen.paint(f"{correct / len(found):.1%}", "bold", "green")
        screen.line(
            f"  accuracy on the held-out images: {percent} ({correct} of {len(found)}; training stated {stated})"
        )
        screen.line(f"  same digit as the model run in process: {same} of {len(found)}")
        return same == len(found)


def _block(screen: Screen, digits: Digits, row: int, found: int, chance: float) -> list[str]:
    """An image with its answer beside it: 8 lines of equal visible width."""
    label = int(digits.labels[row])
    words = ["", "", f"{found}", f"{chance:.1%}", "", "" if found == label else f"is {label}", "", ""]
    styles = ["green"] if found == label else ["red"]
    return [
        f"{ink}  {screen.paint(word.ljust(7), *styles)}"
        for ink, word in zip(as_text(digits.images[row]), words, strict=True)
    ]


def _show_side_by_side(screen: Screen, blocks: list[list[str]]) -> None:
    columns = max(1, shutil.get_terminal_size((80, 24)).columns // 27)
    for first in range(0, len(blocks), columns):
        for lines in zip(*blocks[first : first + columns], strict=True):
            screen.line("  " + "".join(lines).rstrip())
        screen.line()


def _rows(images: Images) -> range:
    return range(len(images))


# ---- latencies ------------------------------------------------------------------------------------------------------


def _show_latencies(screen: Screen, client: Client, digits: Digits, rounds: int, seconds: float) -> float:
    """One table for both models. Returns how many pictures a second the daemon served at most."""
    cores = len(os.sched_getaffinity(0))
    small, large = digits.images.astype(np.float32), _pictures(digits)
    parts: list[tuple[str, Images, list[Way]]] = [
        ("digits", small, [Raw(DIGITS_MODEL, 1), DaemonWay(client, "digits", 1), DaemonWay(client, "digits", 64)]),
        (
            "mobilenetv2",
            large,
            [
                Raw(VISION_MODEL, 1), *([Raw(VISION_MODEL, cores)] if cores > 1 else []),
                DaemonWay(client, "mobilenetv2", 1), DaemonWay(client, "mobilenetv2", 16),
            ],
        ),
    ]  # fmt: skip
    with screen.step(f"Latencies beside the raw backend, measured in turn ({cores} cores, shared with this client)"):
        table: list[list[str]] = []
        for model, images, ways in parts:
            figures = measure(ways, images, rounds=rounds, seconds=seconds, progress=screen.progress)
            table += [_table_row(model, way, figure) for way, figure in zip(ways, figures, strict=True)]
        screen.end_progress()
        screen.table(
            ["model", "answered by", "in flight", "p50 ms", "p95 ms", "p99 ms", "requests/s", "mean batch rows"],
            table,
            words=2,
        )
        screen.line("  mobilenetv2 has random weights: what it costs is real, what it says is not.")
    return figures[-1].per_s


def _table_row(model: str, way: Way, figures: Figures) -> list[str]:
    times = [f"{time_ms:.3f}" for time_ms in (figures.p50_ms, figures.p95_ms, figures.p99_ms)]
    return [model, way.title, str(way.in_flight), *times, f"{figures.per_s:,.0f}", f"{figures.batch_rows:.1f}"]


def _pictures(digits: Digits) -> Images:
    """The first 32 scans as pictures of the size that the vision model takes. Shape: [32, 3, 224, 224], 0 to 1."""
    side = PICTURE_SHAPE[1] // 8
    enlarged = digits.images[:32].reshape(-1, 1, 8, 8).astype(np.float32).repeat(side, axis=2).repeat(side, axis=3) / 16
    return np.ascontiguousarray(np.broadcast_to(enlarged, (32, *PICTURE_SHAPE)))


def _show_overload(screen: Screen, client: Client, digits: Digits, capacity_per_s: float, seconds: float) -> None:
    """Offer twice the rate served above, each request with a deadline: answered in time, or refused at once."""
    title = f"Twice as many pictures as it can serve, each wanted within {FLOOD_TIMEOUT_MS:.0f} ms"
    with screen.step(title):
        found = flood(
            client, "mobilenetv2", _pictures(digits),
            per_s=2 * capacity_per_s, timeout_ms=FLOOD_TIMEOUT_MS, seconds=seconds,
        )  # fmt: skip
        if found.failures:
            raise DemoFailed(f"{len(found.failures)} requests failed, the first with: {found.failures[0]}")
        starved = told_of_others(found)
        rows = [
            [name, f"{len(times)}", f"{percentile(times, 50):.1f}" if times else "-",
             f"{percentile(times, 99):.1f}" if times else "-"]
            for name, times in (
                ("answered in time", found.answered_ms),
                ("refused, and told when to try again", found.refused_ms),
                ("expired while waiting", found.expired_ms),
                *([("replied to when this client had given up", found.given_up_ms)] if found.given_up_ms else []),
            )
        ]  # fmt: skip
        screen.table(["what became of them", "requests", "p50 ms", "p99 ms"], rows)
        screen.line(
            f"  {found.asked} asked at {2 * capacity_per_s:,.0f} a second, "
            f"{len(found.answered_ms) / found.seconds:,.0f} a second answered, every one accounted for"
        )
        for line in starved:
            screen.line(f"  {line}")


def told_of_others(found: Flood) -> list[str]:
    """What to say of other programs' work; none where they took little.

    Raises DemoFailed where replies were late all the same: the daemon owes each by its deadline.
    """
    took = f"other programs took {found.others:.0%} of the cores' time"
    if found.is_starved:
        return [
            f"{took}: these numbers say more about them than about the daemon.",
            "Requests waited in this client until the daemon could read them; a deadline begins then.",
        ]
    if found.given_up_ms:
        raise DemoFailed(f"{len(found.given_up_ms)} replies were late, though {took}; `edge-runtime status` tells more")
    return []


# ---- HTTP and MQTT --------------------------------------------------------------------------------------------------


def _show_http(screen: Screen, digits: Digits, port: int) -> bool:
    """Ask for one digit with curl, as clients of Triton and KServe ask. Returns whether it was answered."""
    with screen.step("The same over HTTP, as clients of Triton and KServe ask: curl"):
        program = shutil.which("curl")
        if program is None:
            screen.line("  left out: no curl here; sudo apt-get install curl")
            return True
        place = f"http://127.0.0.1:{port}/v2/models/digits/infer"
        screen.line(screen.paint(f'  $ curl -s {place} -d \'{{"inputs": [{{"name": "image", …', "bold"))
        command = [program, "--silent", "--show-error", "--noproxy", "*", "--max-time", "10", place, "-d", "@-"]
        asked = subprocess.run(command, input=_request(digits), capture_output=True, text=True, timeout=20, check=False)
        if asked.returncode != 0:
            raise DemoFailed(f"no answer over HTTP: {asked.stderr.strip() or asked.returncode}")
        return _show_digit(screen, digits, asked.stdout)


def _show_mqtt(screen: Screen, digits: Digits, port: int | None) -> bool:
    """Ask for one digit through a broker from the shell, as any language could. Returns whether it was answered."""
    with screen.step("The same through an MQTT broker: JSON in, JSON out, from a shell"):
        program = shutil.which("mosquitto_rr")
        if port is None or program is None:
            screen.line("  left out: no mosquitto here; sudo apt-get install mosquitto mosquitto-clients")
            return True
        command = ["-V", "5", "-W", "10", "-p", str(port), "-t", "edge/demo/infer/digits", "-e", "reply/me", "-m"]
        screen.line(screen.paint(f'  $ mosquitto_rr {" ".join(command)} \'{{"inputs": [{{"name": "image", …', "bold"))
        asked = subprocess.run(
            [program, *command, _request(digits)], capture_output=True, text=True, timeout=20, check=False
        )
        if asked.returncode != 0:
            raise DemoFailed(f"no answer through the broker: {asked.stderr.strip() or asked.returncode}")
        return _show_digit(screen, digits, asked.stdout)


def _request(digits: Digits) -> str:
    image = {"name": "image", "shape": [1, 64], "datatype": "FP32", "data": digits.images[0].ravel().tolist()}
    return json.dumps({"inputs": [image]})


def _show_digit(screen: Screen, digits: Digits, answer: str) -> bool:
    """Show an answer in JSON, and its digit. Returns whether it has one."""
    outputs = json.loads(answer).get("outputs")
    if outputs is None:
        raise DemoFailed(f"refused: {answer.strip()[:300]}")
    found = next(each["data"][0] for each in outputs if each["name"] == "digit")
    screen.line(f"  {answer.strip()[:150]} …")
    screen.line(f"  digit {screen.paint(str(found), 'green')}; the scan shows a {digits.labels[0]}")
    return True


def _show_photo(screen: Screen, endpoint: str) -> bool:
    """Ask with a JPEG from the shell, and leave it drawn with its answer. Returns whether it is there."""
    with screen.step("A photograph in place of numbers: seven lines of model.toml say how it is read"):
        words = ["infer", "photo", os.path.relpath(PHOTO), "--draw", str(DRAWN)]
        screen.line(screen.paint(f"  $ edge-runtime {' '.join(words)}", "bold"))
        command = [sys.executable, "-m", "edge_runtime", *words, "--connect", endpoint]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if asked.returncode != 0:
            raise DemoFailed(f"no answer to the photograph: {asked.stderr.strip() or asked.returncode}")
        for line in asked.stdout.rstrip().splitlines():
            screen.line(f"  {line}")
        screen.line(f"  the photograph with its answer: {screen.paint(str(DRAWN / PHOTO.name), 'green')}")
        return (DRAWN / PHOTO.name).exists()


if __name__ == "__main__":
    sys.exit(main())
