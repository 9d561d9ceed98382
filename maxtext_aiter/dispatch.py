"""Who computes a spec, and why not somebody better."""

import dataclasses
import functools

from maxtext_aiter.providers import ATTENTION_PROVIDERS
from maxtext_aiter.providers.base import Provider
from maxtext_aiter.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class Choice:
    """The provider chosen, and the ones passed over for it with their reasons."""

    provider: Provider
    declined: tuple[tuple[str, str], ...]


@functools.cache
def choose(spec: AttentionSpec, platform: str, forced: str | None = None) -> Choice:
    """The first provider, in order of preference, that supports `spec` on `platform`.

    Args:
      spec: what is to be computed.
      platform: "cpu", "cuda" or "rocm".
      forced: the name of the only provider to consider.

    Raises:
      ValueError: no such provider, or the forced one declines.
    """
    declined = []
    for provider in ATTENTION_PROVIDERS:
        if forced not in (None, provider.name):
            continue
        reason = provider.supports(spec, platform)
        if reason is None:
            return Choice(provider, tuple(declined))
        declined.append((provider.name, reason))
    if not declined:
        names = ", ".join(p.name for p in ATTENTION_PROVIDERS)
        raise ValueError(f"no attention provider is called {forced!r}; there are: {names}")
    raise ValueError("; ".join(f"attention provider {name!r} declines: {why}" for name, why in declined))
