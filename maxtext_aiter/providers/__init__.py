"""Who computes: one provider per file, here in order of preference."""

from maxtext_aiter.providers.host import HostProvider
from maxtext_aiter.providers.xla import XlaProvider

ATTENTION_PROVIDERS = (HostProvider(), XlaProvider())
