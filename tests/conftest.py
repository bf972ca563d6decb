"""Options of the test run."""

from collections.abc import Iterator

import pytest
import torch

# Processes of tests run side by side; threads that wait for each other are slow where others take their core.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden programs anew instead of comparing"
    )


@pytest.fixture
def double() -> Iterator[None]:
    """The test runs in double precision: ``pytestmark = pytest.mark.usefixtures("double")``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
