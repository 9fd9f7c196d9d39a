"""The script of benchmarks/ that a test file is about."""

import pytest
from benchmark_scripts import opened


@pytest.fixture
def benchmark(request):
    """The script that the test file names as SCRIPT, as a module."""
    with opened(request.module.SCRIPT) as module:
        yield module
