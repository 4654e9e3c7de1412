"""The page of a fleet in a real Chromium: its views on a desk and on a phone, changes, and markup from devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.contract.browsing import DESK, PHONE, Visit, chromium, visiting, wcag_violations
from tests.contract.fleet.test_fleet_page import serving
from tests.contract.fleet.test_fleet_verbs import say
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer

pytestmark = needs_mosquitto

HOSTILE = "<img src=x onerror=window.hit=1>"
VIEWS = {
    "devices": "#/", "groups": "#/groups", "releases": "#/releases", "slow": "#/slow", "history": "#/history",
    "device": "#/device/gate",
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visits(browser: Any) -> Iterator[Callable[..., Visit]]:
    with visiting(browser) as visit:
        yield visit


@pytest.fixture
def peer(tmp_path) -> Iterator[Peer]:
    """Tells of 120 devices, of which one does badly."""
    with Broker(tmp_path / "broker") as broker, Peer(broker.url) as peer:
        models = {"digits": {"version": 3, "p95_ms": 7.0, "rate_per_s": 2.0, "versions": []}}
        update = {"state": "idle", "group": "line-1", "models": {"digits": {"release": 3, "version": "3"}}}
        for index in range(120):
            say(peer, f"cam-{index:03}", models=models, update=update)
        say(peer, "gate", health="degraded", reasons=[f"model {HOSTILE} failed"], groups=["line-2"], models=models)
        peer.broker = broker
        yield peer


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("size", "scheme"), [(DESK, "light"), (PHONE, "dark")], ids=["desk", "phone"])
def test_a_view_keeps_to_wcag_and_to_its_width(peer, visits, view, size, scheme):
    with serving(peer.broker) as (server, _):
        page = visits(server.endpoints[0].rstrip("/"), size, scheme).open(VIEWS[view])
        page.locator("main section").last.wait_for()
        assert wcag_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_devices_are_found_page_by_page_and_a_change_is_seen(peer, visits):
    with serving(peer.broker) as (server, _):
        page = visits(server.endpoints[0].rstrip("/")).open()
        expect(page.locator("h1")).to_contain_text("121 devices")
        expect(page.locator("tbody tr")).to_have_count(100)
        page.get_by_role("button", name="Next", exact=True).click()
        expect(page.locator("tbody tr")).to_have_count(21)

        page.get_by_label("Search").fill("gate")
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("tbody")).to_contain_text(HOSTILE)
        assert page.evaluate("window.hit") is None

        say(peer, "gate", "offline", groups=["line-2"])
        expect(page.locator("tbody")).to_contain_text("offline")
        page.get_by_role("link", name="gate", exact=True).click()
        expect(page.locator("main")).to_contain_text("line-2")


def test_groups_are_counted_by_how_their_devices_do(peer, visits):
    with serving(peer.broker) as (server, _):
        page = visits(server.endpoints[0].rstrip("/")).open("#/groups")
        expect(page.locator("tbody tr")).to_have_count(2)
        expect(page.locator("tbody tr").first).to_contain_text("ok 120")
        expect(page.locator("tbody tr").last).to_contain_text("degraded 1")


def test_a_broker_that_goes_away_is_said_and_the_last_known_stays(peer, visits):
    with serving(peer.broker) as (server, _):
        page = visits(server.endpoints[0].rstrip("/")).open()
        expect(page.locator("h1")).to_contain_text("121 devices")
        peer.broker.stop()
        expect(page.locator(".health")).to_contain_text("is away")
        expect(page.locator("tbody tr")).to_have_count(100)
