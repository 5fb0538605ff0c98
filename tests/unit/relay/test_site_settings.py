"""The settings of gateways are read entry by entry. `test_config` shows what is refused."""

from __future__ import annotations

from iris.crypto.keys import dump_fingerprint
from relay.site_settings import PeerSite, parse_pattern, peer_sites, site_costs


def pin(number: int) -> str:
    """Return a site's fingerprint."""
    return dump_fingerprint(bytes([number]) * 32)


def test_entries_of_one_site_add_addresses_and_pins() -> None:
    entries = (
        f"us=tls://gw1.us.example:7440, tls://[2001:db8::7]:7440#{pin(1)}",
        f"ap=#{pin(3)}",
        f"us=tls://gw1.us.example:7440,tls://10.0.0.7:7440#{pin(2)}=",
    )
    found = peer_sites(entries)
    addresses = (("gw1.us.example", 7440), ("2001:db8::7", 7440), ("10.0.0.7", 7440))
    assert found == {
        "us": PeerSite("us", addresses, (b"\1" * 32, b"\2" * 32)),
        "ap": PeerSite("ap", (), (b"\3" * 32,)),
    }
    assert site_costs(("us = 10",)) == {"us": 10}


def test_patterns_are_names_and_filters_and_what_begins_with_an_exclamation_mark_denies() -> None:
    assert parse_pattern("export", "orders") == (False, "orders")
    assert parse_pattern("export", "orders.*.eu.>") == (False, "orders.*.eu.>")
    assert parse_pattern("import", "!>") == (True, ">")
    assert parse_pattern("import", "a!b") == (False, "a!b")
