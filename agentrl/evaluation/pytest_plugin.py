"""The pytest plug-in, which runs suites of regression cases: `pytest evals/reading --agentrl-policy runs/quickstart@12`.

Every pytest run with agentrl installed imports this module, so it imports other modules of agentrl only if a suite is requested.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_NEEDED = "--agentrl-policy needs a suite: --agentrl-suite FOLDER, or the suite's folder as an argument"
_WORKERS = "--agentrl-policy evaluates all cases concurrently in one process: run pytest without -n"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds agentrl's options."""
    group = parser.getgroup("agentrl", "regression suites of agentrl")
    group.addoption("--agentrl-suite", action="append", default=[], metavar="FOLDER", help="suite, or folder of suites; can be repeated")
    group.addoption(
        "--agentrl-policy",
        metavar="POLICY",
        help="policy to evaluate: a model folder, RUN@VERSION, URL, or module:attr (default: the policy in suite.toml)",
    )
    group.addoption("--agentrl-model", default="", metavar="NAME", help="name of the model at a URL")
    group.addoption("--agentrl-key-env", default="", metavar="VARIABLE", help="environment variable that contains the key for a URL")
    group.addoption("--agentrl-request", action="append", default=[], metavar="KEY=VALUE", help="additional key in each request to a URL")
    group.addoption(
        "--agentrl-header", action="append", default=[], metavar="NAME=REFERENCE", help="additional header in each request to a URL"
    )
    group.addoption(
        "--agentrl-tokens-name", default="", metavar="NAME", help="request key that limits the tokens of a turn (default: max_tokens)"
    )
    group.addoption("--agentrl-repeats", type=int, metavar="N", help="attempts at each case (default: set by the case or its suite)")
    group.addoption(
        "--agentrl-threshold",
        type=float,
        default=1.0,
        metavar="SCORE",
        help="mean score that a case without a threshold must reach (default: 1)",
    )
    group.addoption("--agentrl-run-dir", metavar="FOLDER", help="folder for transcripts and logs (default: runs/SUITE-eval, -eval-2, ...)")
    group.addoption(
        "--agentrl-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="dotted override, such as evaluation.sampling.temperature=0; can be repeated",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Registers the plug-in for suites if a suite is requested.

    Raises `pytest.UsageError` if a policy is set without a suite, if the suites or the policy are invalid, or if pytest runs with workers.
    """
    suites = config.getoption("agentrl_suite") or suite_arguments(config)
    if not suites:
        if config.getoption("agentrl_policy") is not None:
            raise pytest.UsageError(_NEEDED)
        return
    if hasattr(config, "workerinput") or config.getoption("numprocesses", None):
        raise pytest.UsageError(_WORKERS)
    from agentrl.evaluation.pytest_cases import SuitePlugin

    config.pluginmanager.register(SuitePlugin(config), "agentrl-cases")


def suite_arguments(config: pytest.Config) -> list[Path]:
    """Returns those command-line arguments that are folders of suites."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return []
    folders = [config.invocation_params.dir / argument for argument in config.args]
    return [folder for folder in folders if (folder / "suite.toml").is_file() and (folder / "cases").is_dir()]
