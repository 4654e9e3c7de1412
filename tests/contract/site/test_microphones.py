"""`source = "audio"`: a microphone, or a file in its place, as windows of a model; what it is when it gives none."""

from __future__ import annotations

import io
import json
import os
import struct
import threading
import time
import urllib.request
from contextlib import contextmanager
from datetime import datetime

import av
import numpy as np
import psutil
import pytest

from edge_runtime.config.settings import MetricsSettings
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import ConfigError
from edge_runtime.series.sound_files import wav_of
from edge_runtime.site.microphone import Cut, Microphone, MicrophonePlace
from edge_runtime.site.reader import SourceState
from edge_runtime.site.settings import PublishRule
from tests.contract.running_daemon import ANSWER_S, put_model, running_daemon
from tests.contract.series.test_series_doors import LISTENS
from tests.contract.site.test_camera_source import GREEN, write_video
from tests.contract.site.test_cameras import Fleet, next_result
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.home_assistant import UNAVAILABLE, HomeAssistant
from tests.fakes.mqtt_peer import Peer
from tests.models import series_models
from tests.models.series_models import HIGH_HZ, LOW_HZ, RATE, tone

SHORT = Cut(RATE, 1600, 800)
"""Windows of a tenth of a second, two in each."""


class Heard:
    """A microphone and the windows that it gives."""

    def __init__(self, address, cut=SHORT, silence_s=5.0, **options):
        self.has_news = threading.Event()
        self.arrivals = threading.Semaphore(0)
        self.is_lost = threading.Event()
        self.cut = cut
        self.microphone = Microphone(MicrophonePlace(str(address)), silence_s=silence_s, changed=self.change)
        self.view = self.microphone.look(self.arrive, **options)

    def __enter__(self):
        self.microphone.start()
        self.view.ask(self.cut)
        return self

    def __exit__(self, *_):
        self.microphone.close()

    def arrive(self):
        self.arrivals.release()
        self.has_news.set()

    def change(self):
        if self.microphone.state is SourceState.LOST:
            self.is_lost.set()

    def window(self):
        """The next window."""
        while True:
            self.has_news.clear()
            if (sound := self.view.take()) is not None:
                return sound
            assert self.has_news.wait(ANSWER_S), self.microphone.reason

    def reason(self):
        """Until it is lost; the reason."""
        assert self.is_lost.wait(ANSWER_S)
        return self.microphone.reason

    def child(self):
        """The process that reads it."""
        (child,) = readers()
        return child


def readers():
    return [each for each in psutil.Process().children() if "read_microphone" in " ".join(each.cmdline())]


def write_wav(path, samples, rate=RATE):
    path.write_bytes(wav_of(samples, rate))
    return path


def loudest(samples, rate=RATE):
    """The frequency that is strongest, in Hz."""
    return np.abs(np.fft.rfft(samples * np.hanning(len(samples)))).argmax() * rate / len(samples)


RAMP = np.linspace(-1, 1, 8000, dtype=np.float32)


# ---- a microphone by itself -----------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_file_is_windows_as_asked_at_its_own_pace_again_and_again(tmp_path):
    began_s = time.time()
    with Heard(write_wav(tmp_path / "a.wav", RAMP)) as heard:
        windows = [heard.window() for _ in range(12)]
    assert [each.number for each in windows] == list(range(1, 13))
    wanted = [RAMP[at : at + 1600] for at in range(0, 8000 - 1599, 800)]
    for index, each in enumerate(windows):
        assert each.samples == pytest.approx(wanted[index % 9], abs=1e-4), "no window has the file's end and beginning"
    times = [each.captured_s for each in windows]
    assert times[8] - times[0] >= 0.35, "half a second of sound takes half a second"
    assert all(began_s <= each <= time.time() for each in times)


def test_a_sound_of_another_rate_and_of_two_channels_is_brought_to_the_models(tmp_path):
    for rate in (8000, 44_100):
        left = tone(LOW_HZ, 1, rate)
        data = io.BytesIO()
        with av.open(data, "w", format="wav") as container:
            stream = container.add_stream("pcm_s16le", rate=rate, layout="stereo")
            both = (np.stack([left, np.zeros_like(left)], 1).reshape(1, -1) * 32767).astype(np.int16)
            frame = av.AudioFrame.from_ndarray(both, format="s16", layout="stereo")
            frame.sample_rate = rate
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
        (tmp_path / "a.wav").write_bytes(data.getvalue())
        with Heard(tmp_path / "a.wav") as heard:
            heard.window()
            samples = heard.window().samples
        assert loudest(samples) == pytest.approx(LOW_HZ, abs=10)
        assert np.abs(samples).max() == pytest.approx(0.25, abs=0.02), "half of the left, half of the silent right"


@pytest.mark.parametrize(("name", "codec", "rate"), [("a.flac", "flac", 16_000), ("a.mp3", "libmp3lame", 44_100)])
def test_a_packed_file_is_heard_as_a_bare_one(tmp_path, name, codec, rate):
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        samples = (tone(HIGH_HZ, 1, rate) * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate)
        for each in resampler.resample(frame):
            container.mux(stream.encode(each))
        container.mux(stream.encode())
    with Heard(tmp_path / name) as heard:
        windows = [heard.window() for _ in range(4)]
    assert loudest(windows[-1].samples) == pytest.approx(HIGH_HZ, abs=10)


def test_a_file_that_changes_its_rate_midway_is_heard_on(tmp_path):
    parts = b""
    for rate in (48_000, 16_000):
        data = io.BytesIO()
        with av.open(data, "w", format="adts") as container:
            stream = container.add_stream("aac", rate=rate, layout="mono")
            samples = tone(LOW_HZ, 0.5, rate)[None]
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate = rate
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
        parts += data.getvalue()
    (tmp_path / "a.aac").write_bytes(parts)
    with Heard(tmp_path / "a.aac") as heard:
        windows = [heard.window() for _ in range(10)]
        assert heard.microphone.losses == 0
    assert [loudest(each.samples) for each in windows[1:10:2]] == pytest.approx([LOW_HZ] * 5, abs=15)


def test_two_who_listen_for_other_windows_share_one_reader(tmp_path):
    with Heard(write_wav(tmp_path / "a.wav", tone(LOW_HZ, 2))) as heard:
        other, has_news = Cut(8000, 4000, 2000), threading.Event()
        view = heard.microphone.look(has_news.set)
        view.ask(other)
        assert has_news.wait(ANSWER_S)
        slow = view.take()
        assert len(slow.samples) == 4000
        assert loudest(slow.samples, 8000) == pytest.approx(LOW_HZ, abs=5)
        numbers = [heard.window().number for _ in range(5)]
        assert numbers == list(range(numbers[0], numbers[0] + 5)), "windows of a quarter second hold up none of others"
        assert len(readers()) == 1


def test_a_reader_that_is_killed_comes_back_and_its_numbers_go_on(tmp_path):
    with Heard(write_wav(tmp_path / "a.wav", RAMP)) as heard:
        before = [heard.window().number for _ in range(3)]
        heard.child().kill()
        assert heard.reason() == "its process ended"
        after = [heard.window().number for _ in range(3)]
        assert min(after) > max(before)
        assert (heard.microphone.state, heard.microphone.reason) == (SourceState.ONLINE, "")


def test_a_view_of_the_newest_only_has_one_that_waits(tmp_path):
    with Heard(write_wav(tmp_path / "a.wav", RAMP), is_newest_only=True) as heard:
        for _ in range(6):
            assert heard.arrivals.acquire(timeout=ANSWER_S)
        newest = heard.view.take().number
        assert newest >= 6
        following = heard.view.take()
        assert following is None or following.number > newest


def broken_wav(rate=RATE, samples=b""):
    head = b"RIFF\xff\xff\xff\xffWAVEfmt " + struct.pack("<IHHIIHH", 16, 3, 1, rate, rate * 4, 4, 32)
    return head + b"data" + struct.pack("<I", 0xFFFFFFFF) + samples


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"this is a shopping list\n" * 100, "it is not a sound that this copy of PyAV can read"),
        (b"", "it is not a sound that this copy of PyAV can read"),
        (bytes(1 << 20), "it is not a sound that this copy of PyAV can read"),
        (wav_of(RAMP[:0], RATE), "it has no samples"),
        (wav_of(RAMP[:1000], RATE), "it is 0.0625 s long; a window has 0.1 s"),
        (None, "there is no such file or device"),
    ],
)
def test_a_file_that_gives_no_window_is_lost_for_a_reason_in_our_words(tmp_path, data, reason):
    if data is not None:
        (tmp_path / "a.wav").write_bytes(data)
    with Heard(tmp_path / "a.wav") as heard:
        assert heard.reason() == reason


def test_a_film_without_sound_is_lost_for_that_reason(tmp_path):
    write_video(tmp_path / "a.mkv", "libx264", [GREEN] * 5)
    with Heard(tmp_path / "a.mkv") as heard:
        assert heard.reason() == "it has no sound"


def test_a_source_that_sends_nothing_is_lost_and_silence_is_not_nothing(tmp_path):
    os.mkfifo(tmp_path / "a.wav")
    with Heard(tmp_path / "a.wav", silence_s=0.5) as heard:
        assert heard.reason() == "no sound came for 0.5 s"
    with Heard(write_wav(tmp_path / "b.wav", np.zeros(8000, np.float32)), silence_s=0.5) as heard:
        windows = [heard.window() for _ in range(12)]
        assert heard.microphone.losses == 0
    assert not any(each.samples.any() for each in windows)


def test_a_file_without_an_end_is_heard_in_bounded_memory(tmp_path):
    with (tmp_path / "a.wav").open("wb") as file:
        file.write(broken_wav())
        file.truncate(3 << 30)  # of zeros, which lie on no disk
    with Heard(tmp_path / "a.wav") as heard:
        for _ in range(10):
            heard.window()
        assert heard.child().memory_info().rss < 400 << 20


@pytest.fixture
def alsa(tmp_path, monkeypatch):
    """ALSA's own library, with a device that gives what a file has as fast as it is read."""
    (tmp_path / "alsa").mkdir()
    (tone(HIGH_HZ, 60) * 32767).astype("<i2").tofile(tmp_path / "alsa" / "mic.raw")
    (tmp_path / "alsa" / "alsa.conf").write_text(
        "pcm.null { type null }\n"
        f'pcm.mic {{ type file slave.pcm null file "/dev/null" infile "{tmp_path}/alsa/mic.raw" format raw }}\n'
    )
    monkeypatch.setenv("ALSA_CONFIG_PATH", str(tmp_path / "alsa" / "alsa.conf"))


@pytest.mark.usefixtures("alsa")
def test_a_device_of_alsa_is_heard_by_its_name():
    with Heard("mic") as heard:
        heard.window()
        assert loudest(heard.window().samples) == pytest.approx(HIGH_HZ, abs=10)


@pytest.mark.usefixtures("alsa")
def test_a_device_that_gives_faster_than_the_clock_is_waited_for():
    with Heard("mic", Cut(RATE, RATE, RATE)) as heard:
        began_s = time.time()
        while heard.window().number < 6:
            pass
        assert time.time() - began_s >= 0.5, "five seconds may come at once, and no more"


@pytest.mark.usefixtures("alsa")
def test_a_device_that_is_not_there_is_lost_in_our_words():
    with Heard("hw:7") as heard:
        assert heard.reason() in (
            "it cannot be read: its name is not known here, or it broke off", "there is no such file or device",
            "there is no such device",
        )  # fmt: skip


def test_a_device_without_alsas_own_files_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("ALSA_CONFIG_PATH", str(tmp_path / "alsa.conf"))
    with Heard("hw:0") as heard:
        assert "apt install libasound2-data" in heard.reason()


@pytest.mark.parametrize("address", ["", "a.wav", "../a.wav", "/dev/snd/pcmC0D0c", "ftp://host/a.wav", "hw:0;ls"])
def test_an_address_that_cannot_be_is_refused(address):
    with pytest.raises(ConfigError, match=r"publish\.audio"):
        MicrophonePlace(address).shown  # noqa: B018


def test_a_password_is_not_shown():
    assert MicrophonePlace("rtsp://user:secret@host/stream").shown == "rtsp://host/stream"


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "audio"}, {"audio": "hw:0"}, {"source": "audio", "audio": "hw:0", "fps": 2.0},
        {"source": "audio", "audio": "hw:0", "picture": True}, {"source": "audio", "audio": "hw:0", "track": True},
        {"source": "audio", "audio": "hw:0", "camera": "door"},
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match=r"audio|fps|picture|track|camera"):
        PublishRule("m", **fields)


# ---- a daemon that listens ------------------------------------------------------------------------------------------

SHAKES = """[input.samples]
rate = 1000
window = 100
normalise = "mean"
[output.rms]
answer = "number"
unit = "g"
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "listener", series_models.listener, toml=LISTENS)
    put_model(models, "bare", series_models.shaking, toml=SHAKES.partition("[output")[0], samples=100)
    put_model(models, "shaking", series_models.shaking, toml=SHAKES, samples=100)
    return models


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path / "broker") as broker:
        yield broker


@contextmanager
def serving(models, broker, folder, *rules, **settings):
    """A daemon with these rules, a client of it, and a listener on what it publishes."""
    mqtt = settings.pop("mqtt", None) or MqttSettings(
        url=f"{broker.url}/dev1", reconnect_min_s=0.05, state_interval_s=0.3
    )
    with Peer(broker.url) as listener:
        listener.subscribe("edge/dev1/result/#", 1)
        options = {"mqtt": mqtt, "publish": tuple(rules), **settings}
        with running_daemon(models, folder / "run", **options) as daemon, Client(daemon.endpoints[0]) as client:
            yield daemon, client, listener


def rule(model, path, **fields):
    return PublishRule(model, source="audio", audio=str(path), **fields)


def best(said):
    return said["classes"][0]["label"]


@needs_mosquitto
def test_words_are_published_when_windows_agree_on_them_with_their_times(models, broker, tmp_path):
    write_wav(tmp_path / "a.wav", np.concatenate([np.zeros(2 * RATE), tone(LOW_HZ, 2), tone(HIGH_HZ, 2)]))
    with serving(models, broker, tmp_path, rule("listener", tmp_path / "a.wav", name="kitchen")) as (_, client, said):
        results = [next_result(said, "edge/dev1/result/listener/kitchen") for _ in range(3)]
        assert [best(each) for each in results] == ["silence", "low", "high"]
        first = results[1]
        assert (first["name"], first["window_s"]) == ("kitchen", 1.0)
        assert first["window"] in (5, 6), "the first two of three windows that are more low than silent"
        captured, told = (datetime.fromisoformat(first[key]) for key in ("captured", "time"))
        assert captured <= told
        assert "windows" not in first
        (source,) = client.stats()["mqtt"]["sources"]
        assert (source["source"], source["state"], source["from"]) == ("audio", "online", str(tmp_path / "a.wav"))
        counters = client.stats()["metrics"]["counters"]
        assert counters["audio_windows"] >= 6
        assert "audio_windows_dropped" not in counters


@needs_mosquitto
def test_every_window_is_published_with_every_and_one_a_while_with_every_s(models, broker, tmp_path):
    write_wav(tmp_path / "a.wav", tone(50, 1, 1000), 1000)
    rules = [
        rule("shaking", tmp_path / "a.wav", on="every"),
        rule("bare", tmp_path / "a.wav", on="every", every_s=0.35),
    ]
    with serving(models, broker, tmp_path, *rules) as (_, _, listener):
        of = {"shaking": [], "bare": []}
        while len(of["bare"]) < 6:
            message = listener.next()
            of[message.topic.rpartition("/")[2]].append(json.loads(message.payload))
        numbers = [each["window"] for each in of["shaking"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert {each["number"]["unit"] for each in of["shaking"]} == {"g"}
        assert [each["number"]["value"] for each in of["shaking"]] == pytest.approx(
            [0.5 / 2**0.5] * len(numbers), rel=1e-2
        )
        assert of["bare"][-1]["window"] - of["bare"][0]["window"] > 5, "not each is run"
        (output,) = of["bare"][0]["outputs"]
        assert (output["name"], output["shape"]) == ("rms", [1, 1])


@needs_mosquitto
def test_a_lost_microphone_is_a_state_a_metric_and_a_reason_for_health(models, broker, tmp_path):
    path = write_wav(tmp_path / "a.wav", tone(50, 1, 1000), 1000)
    mqtt = MqttSettings(
        url=f"{broker.url}/dev1", reconnect_min_s=0.05, state_interval_s=0.3, home_assistant="homeassistant"
    )
    options = {"metrics": MetricsSettings(port=0), "mqtt": mqtt}
    with (
        serving(models, broker, tmp_path, rule("shaking", path), **options) as (daemon, _, _),
        Fleet(broker.url) as fleet,
        HomeAssistant(broker.url) as assistant,
    ):
        wait_microphone(fleet, path, "online")
        assistant.wait(lambda: assistant.states().get("dev1: shaking number") not in (None, UNAVAILABLE))
        path.rename(tmp_path / "b.wav")
        state = wait_microphone(fleet, path, "lost")
        assert state["health"] == "degraded"
        assert state["reasons"] == [f"microphone {path}: there is no such file or device"]
        with urllib.request.urlopen(daemon.metrics_url) as page:
            assert f'edge_runtime_microphone_online{{microphone="{path}"}} 0.0' in page.read().decode()
        assistant.wait(lambda: assistant.states()["dev1: shaking number"] == UNAVAILABLE)
        (tmp_path / "b.wav").rename(path)
        assert wait_microphone(fleet, path, "online")["health"] == "ok"
        assistant.wait(lambda: assistant.states()["dev1: shaking number"] != UNAVAILABLE)


def wait_microphone(fleet, path, wanted):
    while True:
        state = json.loads(fleet.next().payload)
        if state.get("microphones", {}).get(str(path), {}).get("state") == wanted:
            return state


@needs_mosquitto
def test_windows_that_a_model_refuses_are_dropped_and_counted_with_the_reason(models, broker, tmp_path):
    samples = np.full(3000, np.nan, "<f4")
    (tmp_path / "a.wav").write_bytes(broken_wav(1000, samples.tobytes()))
    with serving(models, broker, tmp_path, rule("shaking", tmp_path / "a.wav")) as (_, client, _):
        end_s = time.monotonic() + ANSWER_S
        while client.stats()["metrics"]["counters"].get("audio_windows_dropped", 0) < 3:
            assert time.monotonic() < end_s
        (source,) = client.stats()["mqtt"]["sources"]
        assert source["state"] == "online"
        assert "samples that are not numbers" in source["reason"]
        assert source["dropped"] >= 3


@needs_mosquitto
def test_a_model_without_windows_says_what_to_write(models, broker, tmp_path):
    bare = tmp_path / "models"
    put_model(bare, "plain", series_models.shaking)
    write_wav(tmp_path / "a.wav", RAMP)
    with serving(bare, broker, tmp_path, rule("plain", tmp_path / "a.wav")) as (_, client, _):
        end_s = time.monotonic() + ANSWER_S
        while "rate, window and hop" not in client.stats()["mqtt"]["sources"][0]["reason"]:
            assert time.monotonic() < end_s
