"""AMD's AITER kernels for JAX and for an unmodified MaxText."""

from importlib.metadata import version as _version

from maxtext_aiter.jax_compat import warn_if_untested as _warn_if_untested
from maxtext_aiter.ops.attention import flash_attention, flash_attention_varlen

__all__ = ["flash_attention", "flash_attention_varlen"]
__version__ = _version("maxtext-aiter")

_warn_if_untested()
