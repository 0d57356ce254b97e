"""Runs regression cases as pytest items.

One evaluation runs all selected cases concurrently. Each item waits for the result of its case.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.error_text import main_error
from agentrl.base.user_code import describe_error
from agentrl.errors import AgentRLError, UserError
from agentrl.evaluation.open_policy import PreparedEvaluation, prepare_evaluation
from agentrl.evaluation.outcomes import CaseOutcome, CaseStatus, detail_lines, show_command, summary_line
from agentrl.evaluation.policies import NamedPolicy, RequestOptions, find_policy, recorded_policy
from agentrl.evaluation.pytest_plugin import suite_arguments
from agentrl.evaluation.suites import SuiteEvaluation, evaluate_suites
from agentrl.failure.case import Case, Suite, load_suite, load_suites
from agentrl.failure.timeline import one_line

_POLL_S = 0.5  # maximum uninterrupted wait, so that ctrl-C takes effect
_STOP_S = 120.0  # maximum wait for servers and sandboxes to stop


class CaseNotPassed(Exception):
    """Raised for a case that failed or is unscored."""

    def __init__(self, outcome: CaseOutcome) -> None:
        super().__init__(summary_line(outcome))
        self.outcome = outcome


class BackgroundEvaluation:
    """Evaluates the cases of all items in a separate thread with its own event loop."""

    def __init__(self, prepared: PreparedEvaluation) -> None:
        self.prepared = prepared
        self.done: tuple[SuiteEvaluation, ...] = ()
        self.error: BaseException | None = None  # the error with which the evaluation failed
        self._outcomes: dict[tuple[str, str], Future[CaseOutcome]] = {
            (suite.name, case.id): Future() for suite in prepared.suites for case in suite.cases
        }
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = threading.Event()

    def outcome(self, suite: str, case: str) -> CaseOutcome:
        """Starts the evaluation at the first call. Waits for a case and returns its outcome.

        If the evaluation fails before the case has an outcome, raises the error of the evaluation.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agentrl-cases", daemon=True)
            self._thread.start()
        future = self._outcomes[suite, case]
        while True:
            try:
                return future.result(timeout=_POLL_S)
            except TimeoutError:
                if future.done():  # also if the evaluation failed with a TimeoutError, or if the case finished just after the timeout
                    return future.result()

    def finish(self) -> None:
        """If all cases are done, waits until the results are written. Otherwise cancels the evaluation and waits for it to stop.

        Stops waiting for the evaluation after `_STOP_S` seconds. Does nothing if no evaluation was started.
        """
        if self._thread is None:
            return
        self._begun.wait(_STOP_S)
        if not all(future.done() for future in self._outcomes.values()) and self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._evaluate())
        except BaseException as error:  # re-raised in the items that are waiting
            self.error = main_error(error)
            for future in self._outcomes.values():
                if not future.done():
                    future.set_exception(self.error)
        finally:
            self._begun.set()

    async def _evaluate(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._begun.set()
        self.done = await evaluate_suites(self.prepared, console=False, on_case=self._scored)

    def _scored(self, outcome: CaseOutcome) -> None:
        self._outcomes[outcome.suite, outcome.case.id].set_result(outcome)


class CaseItem(pytest.Item):
    """A pytest item for one case.

    `setup` raises `CaseNotPassed` if the case is unscored, so that pytest reports an error, not a failure.
    """

    def __init__(self, *, suite: Suite, case: Case, cases: SuitePlugin, **more: Any) -> None:
        super().__init__(**more)
        self.suite, self.case, self.cases = suite, case, cases
        self.outcome: CaseOutcome | None = None

    def setup(self) -> None:
        """Waits for the outcome of the case. Raises `CaseNotPassed` if the case is unscored, and the evaluation's error if it failed."""
        assert self.cases.evaluation is not None, "the collection has ended"
        self.outcome = self.cases.evaluation.outcome(self.suite.name, self.case.id)
        if self.outcome.status is CaseStatus.UNSCORED:
            raise CaseNotPassed(self.outcome)

    def runtest(self) -> None:
        """Raises `CaseNotPassed` if the case failed."""
        assert self.outcome is not None, "call setup() first"
        if self.outcome.status is not CaseStatus.PASSED:
            raise CaseNotPassed(self.outcome)

    def error_text(self, error: BaseException) -> str:
        """Returns the text that pytest shows for an error; empty if the error is a bug, so that pytest shows the stack trace."""
        if isinstance(error, CaseNotPassed):
            return "\n".join(self._report_lines(error.outcome))
        return f"{type(error).__name__}: {error}" if isinstance(error, AgentRLError) else ""

    def reportinfo(self) -> tuple[Path, int, str]:
        """Returns the case's file and name, for pytest."""
        return self.suite.folder / "cases" / f"{self.case.id}.json", 0, f"{one_line(self.suite.name, 60)}: {self.case.id}"

    def _report_lines(self, outcome: CaseOutcome) -> Iterator[str]:
        yield f"{outcome.status}  {summary_line(outcome)}"
        yield from detail_lines(outcome)
        if outcome.example is not None and self.cases.evaluation is not None:
            yield from ("", outcome.example.tail, "", f"more: {show_command(outcome, self.cases.evaluation.prepared.start.folder)}")


class SuiteFolder(pytest.Directory):
    """The pytest collector of a suite's folder. It collects one item for each case of the suite."""

    cases: SuitePlugin

    def collect(self) -> Iterator[CaseItem]:
        """Yields a pytest item for each case of the suite."""
        try:
            suite = load_suite(self.path)
        except UserError as error:
            raise self.CollectError(str(error)) from None
        for case in suite.cases:
            yield CaseItem.from_parent(self, name=case.id, suite=suite, case=case, cases=self.cases)


class SuitePlugin:
    """The pytest plug-in that runs the suites named by an option or argument."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._stack = ExitStack()
        self.evaluation: BackgroundEvaluation | None = None
        try:
            named = [*suite_arguments(config), *map(Path, config.getoption("agentrl_suite"))]
            suites = {suite.folder.resolve(): suite for folder in named for suite in load_suites(folder)}
            self._policy = _policy_of(config, list(suites.values()))
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
        self._folders = list(suites)
        explicit = config.args_source is pytest.Config.ArgsSource.ARGS
        arguments = {folder.resolve() for folder in suite_arguments(config)}
        further = [str(folder) for folder in self._folders if folder not in arguments]
        config.args = [*(config.args if explicit else []), *further]  # tests given as arguments run in addition to the suites

    def pytest_report_header(self) -> str:
        """Returns a line with the number of suites and the policy."""
        return f"agentrl: {len(self._folders)} suite{'s' if len(self._folders) > 1 else ''}, policy {one_line(self._policy.name, 200)}"

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """Returns the collector for a suite's folder; None for any other folder."""
        if path.resolve() not in self._folders:
            return None
        folder = SuiteFolder.from_parent(parent, path=path)
        folder.cases = self
        return folder

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Validates the options and the selected cases, before anything starts. Raises `pytest.UsageError` if one of them is invalid."""
        items = [item for item in session.items if isinstance(item, CaseItem)]
        if not items or self._config.option.collectonly:
            return
        option = self._config.getoption
        run_dir = option("agentrl_run_dir")
        try:
            prepared = self._stack.enter_context(
                prepare_evaluation(
                    self._policy,
                    _selected(items),
                    overrides=option("agentrl_set"),
                    repeats=option("agentrl_repeats"),
                    threshold=option("agentrl_threshold"),
                    run_dir=Path(run_dir) if run_dir else None,
                )
            )
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
        self.evaluation = BackgroundEvaluation(prepared)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Replaces the stack trace of a failed case with its report."""
        report = yield
        if isinstance(item, CaseItem) and call.excinfo is not None and (text := item.error_text(call.excinfo.value)):
            report.longrepr = text
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Waits until the results of the evaluation are written, or cancels the evaluation if cases have not finished.

        If the evaluation failed, a successful exit status is changed to `TESTS_FAILED`.
        """
        if self.evaluation is not None:
            self.evaluation.finish()
            if self.evaluation.error is not None and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self._stack.close()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the result of each suite."""
        if self.evaluation is not None and self.evaluation.error is not None:
            terminalreporter.write_line(f"agentrl: the evaluation failed and is not stored: {describe_error(self.evaluation.error)}")
        for completed in () if self.evaluation is None else self.evaluation.done:
            passed = sum(outcome.status is CaseStatus.PASSED for outcome in completed.outcomes)
            name = one_line(completed.suite.name, 80)
            terminalreporter.write_line(
                f"agentrl: {name}: {passed} of {len(completed.outcomes)} cases passed; evaluation {completed.folder}"
            )


def _policy_of(config: pytest.Config, suites: Sequence[Suite]) -> NamedPolicy:
    """Returns the policy that the options name or, if none is named, the policy set in `suite.toml`.

    Raises `UserError` if neither is set, or if an option or the policy is invalid.
    """
    option = config.getoption
    requests = RequestOptions.parse(option("agentrl_request"), option("agentrl_header"), option("agentrl_tokens_name"))
    if (policy := option("agentrl_policy")) is None:
        if option("agentrl_model") or option("agentrl_key_env") or requests != RequestOptions():
            raise UserError("the options of an endpoint require --agentrl-policy", fix="give --agentrl-policy http(s)://HOST/v1")
        return recorded_policy(suites, option="--agentrl-policy")
    return find_policy(policy, model_name=option("agentrl_model"), key_env=option("agentrl_key_env"), requests=requests)


def _selected(items: Sequence[CaseItem]) -> list[Suite]:
    """Returns the suites of the selected items, each with only its selected cases."""
    selected: dict[Path, list[Case]] = {}
    for item in items:
        selected.setdefault(item.suite.folder, []).append(item.case)
    suites = {item.suite.folder: item.suite for item in items}
    return [replace(suites[folder], cases=tuple(cases)) for folder, cases in selected.items()]
