"""Allow-list entries: valid and invalid ones, error messages, and the destinations that each covers."""

import pytest

from agentrl.records import SandboxSpec, codec
from agentrl.records.destinations import parse_destination, plain_host


@pytest.mark.parametrize(
    ("entry", "covered", "not_covered"),
    [
        ("pypi.org:443", [("pypi.org", 443)], [("pypi.org", 80), ("a.pypi.org", 443), ("xpypi.org", 443), ("pypi.org.evil.net", 443)]),
        ("PyPI.org:443", [("pypi.org", 443)], []),
        ("*.example.org:80", [("a.example.org", 80), ("a.b.example.org", 80)], [("example.org", 80), ("badexample.org", 80)]),
        ("127.0.0.1:8000", [("127.0.0.1", 8000)], [("127.0.0.2", 8000), ("localhost", 8000)]),
        ("[::1]:8000", [("::1", 8000)], [("127.0.0.1", 8000)]),
        ("[2001:DB8:0::1]:443", [("2001:db8::1", 443)], []),
        ("[::ffff:10.0.0.1]:80", [("10.0.0.1", 80)], []),
    ],
)
def test_destinations_that_an_entry_covers(entry, covered, not_covered):
    destination = parse_destination(entry)
    assert all(destination.covers(*address) for address in covered)
    assert not any(destination.covers(*address) for address in not_covered)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("pypi.org", "port"),
        ("pypi.org:", "port"),
        ("pypi.org:0", "port"),
        ("pypi.org:65536", "port"),
        ("pypi.org:4\u0664", "port"),
        ("https://pypi.org:443", "has no host"),
        ("user@pypi.org:443", "has no host"),
        ("pypi.org/simple:443", "has no host"),
        ("::1:80", "has no host"),
        ("127.1:80", "has no host"),
        ("0x7f000001:80", "has no host"),
        ("2130706433:80", "has no host"),
        ("[fe80::1%eth0]:80", "has no host"),
        ("\u212aelvin.org:80", "has no host"),
        ("pypi.org.:443", "has no host"),
        ("*:443", "has no host"),
        ("*.com:443", "too broad"),
        ("*.10.0.0.1:443", "too broad"),
        ("a.*.org:443", "has no host"),
        ("localhost:80", "127.0.0.1:80"),
        ("my.localhost:80", "127.0.0.1:80"),
        ("0.0.0.0:80", "not the address of one machine"),
        ("[::]:80", "not the address of one machine"),
        ("224.0.0.1:80", "not the address of one machine"),
    ],
)
def test_a_wrong_entry_raises_when_the_spec_is_created(entry, message):
    with pytest.raises(ValueError, match=r"SandboxSpec\.network") as error:
        SandboxSpec(image="x", network=("pypi.org:443", entry))
    assert message in str(error.value) and repr(entry) in str(error.value)


def test_a_list_that_is_no_tuple_or_too_long_raises():
    for wrong in ("pypi.org:443", ["pypi.org:443"]):
        with pytest.raises(ValueError, match=r'SandboxSpec.network: must be a tuple, such as \("a",\), got '):
            SandboxSpec(image="x", network=wrong)
    with pytest.raises(ValueError, match="65 entries; at most 64 are allowed"):
        SandboxSpec(image="x", network=tuple(f"h{number}.org:443" for number in range(65)))


def test_a_spec_with_a_network_is_another_pool_key_and_survives_json():
    plain, wide = SandboxSpec(image="x"), SandboxSpec(image="x", network=("pypi.org:443",))
    assert len({plain, wide, SandboxSpec(image="x", network=("pypi.org:443",))}) == 2
    assert codec.from_json(SandboxSpec, codec.to_json(wide)) == wide
    assert codec.from_json(SandboxSpec, '{"image": "x"}') == plain


@pytest.mark.parametrize(
    "text", ["", ".", "a..b", "-a.org", "a b", "a:1", "[127.0.0.1]", "[::1", "::1", "a" * 64, "1.2.3", "1.2.3.4.5", "a\0b"]
)
def test_texts_that_are_neither_a_name_nor_an_address(text):
    assert plain_host(text) is None
