"""Which servers a device reaches by its proxy, and which rules of `no_proxy` make sense."""

from __future__ import annotations

import pytest

from edge_runtime.addresses import read_proxy
from edge_runtime.errors import ConfigError

PROXY = "http://proxy.site:3128"


@pytest.mark.parametrize(
    ("rule", "host", "is_direct"),
    [
        ("models.site", "models.site", True),
        ("models.site", "MODELS.site.", True),
        ("models.site", "a.models.site", True),
        ("models.site", "mymodels.site", False),
        (".site", "models.site", True),
        (".site", "site", True),
        ("*.site", "models.site", True),
        ("SITE", "models.site", True),
        ("site", "models.site.example", False),
        ("models.site:8443", "models.site", True),
        ("models.site:9", "models.site", False),
        ("10.0.4.7", "10.0.4.7", True),
        ("10.0.4.7:8443", "10.0.4.7", True),
        ("10.0.4.7:9", "10.0.4.7", False),
        ("10.0.0.0/8", "10.255.0.1", True),
        ("10.0.4.7/8", "10.255.0.1", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("10.0.0.0/8", "models.site", False),
        ("fd00::/8", "fd12::1", True),
        ("fd00::/8", "10.0.0.1", False),
        ("fd12::1", "fd12::1", True),
        ("[fd12::1]:8443", "fd12::1", True),
        ("[fd12::1]:9", "fd12::1", False),
        ("*", "models.example", True),
    ],
)
def test_a_rule_of_no_proxy_names_hosts_as_everywhere(rule: str, host: str, is_direct: bool) -> None:
    proxy = read_proxy(PROXY, [rule])
    assert proxy is not None
    assert proxy.leads_to(host, 8443) is not is_direct


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_this_machine_is_never_reached_by_the_proxy(host: str) -> None:
    proxy = read_proxy(PROXY)
    assert proxy is not None
    assert not proxy.leads_to(host, 443)
    assert proxy.leads_to("models.site", 443)


@pytest.mark.parametrize("rule", [".", "*.", "10.0.0.0/99", "models.site/8", "a b", "a,b", "user@site"])
def test_a_rule_of_no_proxy_that_names_nothing_is_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="no_proxy: got"):
        read_proxy(None, [rule])
