"""The pytest plug-in: suites of regression cases as tests. `pytest --agentrl-suite evals/reading --agentrl-policy runs/quickstart@12`.

An entry point is imported in every pytest run of everybody who has agentrl installed, so that this module imports nothing of agentrl
before one of its options is given.
"""

from __future__ import annotations

import pytest

_NEEDED = "--agentrl-suite and --agentrl-policy go together: a suite's folder, and whom its cases are asked"
_WORKERS = "--agentrl-policy asks all cases side by side in one process: leave out -n"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("agentrl", "regression suites of agentrl")
    group.addoption(
        "--agentrl-suite", action="append", default=[], metavar="FOLDER", help="a suite, or a folder of suites; may be given again"
    )
    group.addoption(
        "--agentrl-policy",
        metavar="POLICY",
        help="whom the cases are asked: a model folder, RUN@VERSION, URL, or module:attr",
    )
    group.addoption("--agentrl-model", default="", metavar="NAME", help="the model's name at a URL")
    group.addoption("--agentrl-key-env", default="", metavar="VARIABLE", help="environment variable that holds the key for a URL")
    group.addoption("--agentrl-request", action="append", default=[], metavar="KEY=VALUE", help="additional key of each request to a URL")
    group.addoption("--agentrl-header", action="append", default=[], metavar="NAME=REFERENCE", help="additional header of each request")
    group.addoption("--agentrl-tokens-name", default="", metavar="NAME", help="the name of max_tokens at the server of a URL")
    group.addoption("--agentrl-repeats", type=int, metavar="N", help="attempts at each case (default: what the case says, else its suite)")
    group.addoption(
        "--agentrl-threshold",
        type=float,
        default=1.0,
        metavar="SCORE",
        help="mean score a case without its own must reach (default: 1)",
    )
    group.addoption("--agentrl-run-dir", metavar="FOLDER", help="where transcripts and logs go (default: runs/SUITE-eval, -eval-2, ...)")
    group.addoption(
        "--agentrl-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="dotted override: evaluation.temperature=0; may be given again",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    suites, policy = config.getoption("agentrl_suite"), config.getoption("agentrl_policy")
    if not suites and policy is None:
        return
    if not suites or policy is None:
        raise pytest.UsageError(_NEEDED)
    if hasattr(config, "workerinput") or config.getoption("numprocesses", None):
        raise pytest.UsageError(_WORKERS)
    from agentrl.prove.pytest_cases import Cases

    config.pluginmanager.register(Cases(config), "agentrl-cases")
