"""`host`: AITER's entry points in our own C++ on the CPU (`aiter/host`), behind the real handlers."""

from maxtext_aiter.providers.aiter_ffi import WHY_MISSING, AiterFfiProvider
from maxtext_aiter.spec import AttentionSpec


class HostProvider(AiterFfiProvider):
    name = "host"

    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        if platform != "cpu":
            return f"it runs on CPUs, not on {platform}"
        return WHY_MISSING
