"""README.md's figures are those of the stored results, and it has no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import claims, stored
from benchmarks.contest import comparison
from tests.benchmarks.test_peers import THREE, comparison_of

FIGURE = re.compile(r"\d(?:[\d.,]*\d)?\s?(?:%|(?:ms|s|min|minutes|times|KiB|MiB|GiB|points|GFLOPS)\b)")
README = claims.README.read_text()


def test_each_figure_is_recomputed_from_its_stored_result() -> None:
    assert [claim.text for claim in claims.missing(README, claims.claims())] == []


def test_readme_has_no_measured_figure_that_is_not_recomputed() -> None:
    text = README
    for claim in claims.claims():
        text = text.replace(claim.text, "")
    assert FIGURE.findall(text) == []


@pytest.mark.parametrize("text", ["14 times sooner", "99% after", "0.77 ms", "p99 of 412 ms", "2 minutes", "85 KiB", "4,000 times"])
def test_a_figure_is_recognized(text: str) -> None:
    assert FIGURE.search(text)


def test_a_figure_that_differs_from_its_result_is_reported() -> None:
    all_claims = claims.claims()
    quickstart = next(claim for claim in all_claims if claim.source.endswith("quickstart.json"))
    assert claims.missing(README.replace("success 6% → 99%", "success 6% → 100%"), all_claims) == [quickstart]


def test_every_stored_result_records_its_origin() -> None:
    paths = [*stored.RESULTS.glob("*.json"), *claims.REAL_MODEL.glob("*-seed*.json")]
    assert len(paths) >= 8
    for path in paths:
        origin = json.loads(path.read_text())["origin"]
        assert {"command", "seeds", "machine", "commit", "code"} <= origin.keys(), path
        assert origin["command"].startswith("python benchmarks/") and origin["code"], path
        assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in origin["code"].values()), path


def test_a_result_is_outdated_after_its_code_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measured" / "__pycache__").mkdir(parents=True)
    (tmp_path / "measured" / "a.py").write_text("a = 1\n")
    (tmp_path / "one.py").write_text("b = 1\n")
    code = {path: stored.digest(path, tmp_path) for path in ("measured", "one.py")}
    monkeypatch.setattr(stored, "digest", lambda path: _DIGEST(path, tmp_path))
    (tmp_path / "measured" / "__pycache__" / "a.pyc").write_bytes(b"cache")
    assert stored.changed(code) == []
    (tmp_path / "measured" / "a.py").rename(tmp_path / "measured" / "b.py")
    assert stored.changed(code) == ["measured"]
    (tmp_path / "one.py").unlink()
    assert stored.changed(code) == ["measured", "one.py"]
    claim = claims.Claim(text="t", source="s", origin={"code": code})
    assert claim.state() == "OLDER than the code: measured, one.py"


_DIGEST = stored.digest


@pytest.mark.slow
def test_a_result_records_the_machine_and_the_measured_code() -> None:
    origin = stored.origin("python benchmarks/x.py", ["benchmarks/claims.py"], [0, 1])
    assert {"processor", "cores", "gflops", "load", "busy_cores"} <= origin["machine"].keys()
    assert (origin["seeds"], stored.changed(origin["code"])) == ([0, 1], [])
    assert origin["code"] == {"benchmarks/claims.py": stored.digest("benchmarks/claims.py")}


def test_readme_must_contain_the_ratio_of_a_published_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PEERS", tmp_path)
    comparison.publish(THREE, tmp_path / "one.json")
    (claim,) = [claim for claim in claims.claims() if claim.source.startswith("docs/peers")]
    assert (claim.text, claim.source) == ("5.5 times (4.0 to 6.0, n=3)", "docs/peers/one.json (trl)")
    assert claims.missing(README, [claim]) == [claim] and claims.missing(f"TRL takes {claim.text}", [claim]) == []
    comparison.publish(comparison_of((None, 1650.0), (360.0, 1440.0), (330.0, 1980.0)), tmp_path / "one.json")
    assert not [claim for claim in claims.claims() if claim.source.startswith("docs/peers")], "no ratio, as our run was late"
