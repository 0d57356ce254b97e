"""Where the ranks of a learner are placed, and the addresses they use."""

from __future__ import annotations

import pytest

from agentrl.learner.launch import Placement, address_towards, interface_of
from agentrl.learner.ranks import loopback


def test_a_placement_is_parsed_from_text() -> None:
    assert Placement.parse("4") == Placement(ranks=4)
    assert Placement.parse("8/1/2@10.0.0.1:29500") == Placement(ranks=8, node=1, nodes=2, host="10.0.0.1", port=29500)
    for text in ("", "x", "8/1", "8/1/2@host", "1/2/3/4@h:1"):
        with pytest.raises(ValueError):
            Placement.parse(text)


def test_ranks_use_the_interface_with_the_address_of_their_host() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == loopback()
    with pytest.raises(OSError, match=r"no network interface has the address 192\.0\.2\.99"):
        interface_of("192.0.2.99")
