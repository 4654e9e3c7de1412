"""What the process takes of the host."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_runtime.telemetry.host import FIRMWARE_FLAGS, HostProbe


def test_memory_is_what_the_kernel_says_of_this_process() -> None:
    probe = HostProbe()
    rss, pss = probe.rss_bytes(), probe.pss_bytes()
    assert rss is not None
    assert pss is not None
    assert 0.5 < rss / psutil.Process().memory_info().rss < 2
    assert 0 < pss <= rss * 1.1


def test_memory_that_was_taken_shows() -> None:
    probe = HostProbe()
    before = probe.rss_bytes()
    taken = mmap.mmap(-1, 64 << 20)  # of the kernel: an allocator may have as much left over
    taken.write(b"x" * len(taken))
    after = probe.rss_bytes()
    assert before is not None
    assert after is not None
    assert after - before > len(taken) // 2
    taken.close()


def test_cpu_time_grows_with_work() -> None:
    probe = HostProbe()
    before = probe.cpu_seconds()
    sum(range(300_000))
    assert probe.cpu_seconds() > before
    assert probe.cpu_cores() > 0


def test_a_host_that_reports_nothing_gives_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = HostProbe(tmp_path)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert (probe.rss_bytes(), probe.pss_bytes(), probe.memory_available_bytes()) == (None, None, None)


def test_a_snapshot_is_json() -> None:
    snapshot = json.loads(json.dumps(HostProbe().snapshot(), allow_nan=False))
    assert snapshot["rss_bytes"] > 0
    assert isinstance(snapshot["temperatures_celsius"], dict)


@pytest.mark.parametrize(
    ("files", "is_slowed"),
    [
        ({}, None),
        ({"cooling_device0": ("Fan", "3")}, None),
        ({"cooling_device0": ("Processor", "0"), "cooling_device1": ("thermal-cpufreq-0", "0")}, False),
        ({"cooling_device0": ("Processor", "0"), "cooling_device1": ("thermal-cpufreq-0", "2")}, True),
        ({"cooling_device0": ("intel_powerclamp", "-1"), "cooling_device1": ("Processor", "odd")}, None),
        ({FIRMWARE_FLAGS: "0"}, False),
        ({FIRMWARE_FLAGS: "50000"}, False),
        ({FIRMWARE_FLAGS: "50005"}, True),
    ],
)
def test_cores_are_slowed_where_the_kernel_or_the_firmware_holds_them_back(
    tmp_path: Path, files: dict[str, Any], is_slowed: bool | None
) -> None:
    for name, told in files.items():
        if isinstance(told, str):
            path = tmp_path / name
            path.parent.mkdir(parents=True)
            path.write_text(f"{told}\n")
        else:
            path = tmp_path / "sys/class/thermal" / name
            path.mkdir(parents=True)
            for file, text in zip(("type", "cur_state"), told, strict=True):
                (path / file).write_text(f"{text}\n")
    assert HostProbe(tmp_path).is_slowed() is is_slowed


def test_temperatures_are_those_of_zones_and_sensors_that_are_on(tmp_path: Path) -> None:
    for name, text in {
        "sys/class/thermal/thermal_zone0/type": "cpu-thermal\n",
        "sys/class/thermal/thermal_zone0/temp": "48750\n",
        "sys/class/thermal/thermal_zone1/type": "gpu-thermal\n",
        "sys/class/thermal/thermal_zone1/temp": "-256000\n",
        "sys/class/hwmon/hwmon0/name": "coretemp\n",
        "sys/class/hwmon/hwmon0/temp1_input": "51000\n",
        "sys/class/hwmon/hwmon0/temp1_label": "Package id 0\n",
        "sys/class/hwmon/hwmon1/name": "nvme\n",
        "sys/class/hwmon/hwmon1/temp1_input": "38850\n",
        "sys/class/hwmon/hwmon2/name": "nvme\n",
        "sys/class/hwmon/hwmon2/temp1_input": "40850\n",
        "sys/class/hwmon/hwmon3/temp1_input": "odd\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert HostProbe(tmp_path).temperatures() == {
        "cpu-thermal": 48.75,
        "coretemp/Package id 0": 51.0,
        "nvme/temp1": 38.85,
        "nvme/temp1 hwmon2/temp1_input": 40.85,
    }


def _files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_zones_are_the_kernel_s_and_without_any_the_sensors_of_chips(tmp_path: Path) -> None:
    sensor = {"sys/class/hwmon/hwmon0/name": "k10temp", "sys/class/hwmon/hwmon0/temp1_input": "61000"}
    _files(tmp_path, sensor)
    assert HostProbe(tmp_path).zones() == {"k10temp/temp1": 61.0}
    for number, (kind, celsius) in enumerate((("cpu-thermal", 50000), ("cpu-thermal", 52000), ("gpu-thermal", 47000))):
        zone = f"sys/class/thermal/thermal_zone{number}"
        _files(tmp_path, {f"{zone}/type": kind, f"{zone}/temp": str(celsius)})
    assert HostProbe(tmp_path).zones() == {"cpu-thermal": 52.0, "gpu-thermal": 47.0}
    assert HostProbe(tmp_path).zones(("gpu-thermal",)) == {"gpu-thermal": 47.0}
    assert HostProbe(tmp_path).zones(("none",)) == {}


def test_frequency_is_the_mean_share_of_the_highest(tmp_path: Path) -> None:
    assert HostProbe(tmp_path).frequency_share() is None
    policies = "sys/devices/system/cpu/cpufreq"
    for number, (now, most) in enumerate((("600000", "2400000"), ("1200000", "1200000"), ("odd", "1"))):
        _files(
            tmp_path,
            {
                f"{policies}/policy{number}/scaling_cur_freq": now,
                f"{policies}/policy{number}/cpuinfo_max_freq": most,
            },
        )
    assert HostProbe(tmp_path).frequency_share() == pytest.approx(0.625)


def test_power_is_that_of_the_largest_rail_in_either_form(tmp_path: Path) -> None:
    assert HostProbe(tmp_path).power_watts() is None
    _files(tmp_path, {"sys/class/hwmon/hwmon0/power1_input": "2500000"})
    assert HostProbe(tmp_path).power_watts() == 2.5
    rails = "sys/class/hwmon/hwmon1"  # a Jetson's INA3221
    _files(tmp_path, {f"{rails}/in1_input": "5000", f"{rails}/curr1_input": "1400", f"{rails}/curr2_input": "9000"})
    assert HostProbe(tmp_path).power_watts() == 7.0
