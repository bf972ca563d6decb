"""Options of the test run."""

import gc
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fork_server
import frozen_imports
import pytest
from hypothesis import HealthCheck, settings

# Processes of tests run side by side; threads that wait for each other are slow where others take their core.
# The fork server of launch.py must have none beside its own, and BLAS starts some. Torch is not imported
# here: it reads this when the first test does so, and pytest-xdist's own process never needs it.
os.environ["OMP_NUM_THREADS"] = "1"

# No example fails for being slow: the first one compiles inner loops, and machines of CI are busy.
settings.register_profile("fxpipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fxpipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden programs anew instead of comparing"
    )
    parser.addoption("--fast", action="store_true", help="leave out what is marked as slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that is slow as a whole is not even imported: some of its libraries take seconds."""
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    slow = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(slow|gpu)", re.MULTILINE)
    return True if slow.search(collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)  # pytest's own leaves out by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take whole files in this order: first those that wait, then those with the most slow tests."""
    mark_variations(items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (item.get_closest_marker("waits") is None, -slow[item.path]))
    if config.getoption("--fast"):
        items[:] = [item for item in items if item.get_closest_marker("slow") is None]


def mark_variations(items: list[pytest.Item]) -> None:
    """Mark the cases of a test that its ``in_ci`` does not name.  Raises UsageError for a name of no case."""
    cases: dict[tuple[str, ...], dict[str, pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("in_ci")
        if mark is not None and isinstance(item, pytest.Function):
            of_test = cases.setdefault((item.nodeid.partition("[")[0], *mark.args), {})
            of_test[item.callspec.id] = item
    for (name, *named), of_test in cases.items():
        if len(of_test) > 1 and (unknown := {*named} - {*of_test}):  # one may have been asked for by its name
            raise pytest.UsageError(
                f"{name} has no case {' or '.join(map(repr, sorted(unknown)))}: see its in_ci"
            )
        for case in {*of_test} - {*named}:
            of_test[case].add_marker(pytest.mark.variation)


def pytest_collection_finish() -> None:
    """Imported objects stay: looking at them in each collection of garbage takes a tenth of the time."""
    frozen_imports.freeze()
    gc.set_threshold(10_000)


def pytest_configure(config: pytest.Config) -> None:
    """One process forks ranks for all workers of pytest-xdist: to start it takes seconds."""
    is_own = not hasattr(config, "workerinput") and config.getoption("numprocesses", None)
    if is_own and not config.getoption("--fast") and not config.getoption("--collect-only"):
        fork_server.offer()
        config.option.tx = [f"popen//python={fork_server.forking_python()}" for _ in config.option.tx]


@pytest.fixture
def double() -> Iterator[None]:
    """The test runs in double precision: ``pytestmark = pytest.mark.usefixtures("double")``."""
    from zoo import in_double_precision

    with in_double_precision():
        yield


@pytest.fixture(scope="module")
def double_in_module() -> Iterator[None]:
    """All tests of the module do, and fixtures that it has for them."""
    from zoo import in_double_precision

    with in_double_precision():
        yield
