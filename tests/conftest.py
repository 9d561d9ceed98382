"""Shared settings: eight virtual CPU devices, and skips that become errors where everything must be present."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")  # MaxText: no Google Cloud packages

import numpy as np
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("MAXTEXT_AITER_REQUIRE_ALL", "0") not in ("", "0"):
        report.outcome = "failed"
        report.longrepr = f"skipped although MAXTEXT_AITER_REQUIRE_ALL is set: {report.longrepr}"


@pytest.fixture
def rng(request):
    """Fresh random inputs on every run; the seed is shown when the test fails."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    return np.random.default_rng(seed)
