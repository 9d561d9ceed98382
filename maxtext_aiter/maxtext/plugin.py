"""Hooks the plugin into MaxText, from a `jax_plugins` entry point or from `maxtext-aiter train`.

JAX calls `initialize()` when it looks for its backends: in MaxText's trainer that is after the
configuration was read and before any model is traced. Nothing heavy may be imported here.
"""

import importlib.abc
import importlib.util
import os
import sys

DISABLE_VARIABLE = "MAXTEXT_AITER_DISABLE"


def initialize() -> None:
    """Installs the hooks: now where MaxText's attention is loaded already, else once it is."""
    if disabled():
        return
    if _AttentionFinder.MODULE in sys.modules:
        install()
    elif not any(isinstance(finder, _AttentionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AttentionFinder())


def disabled() -> bool:
    return os.environ.get(DISABLE_VARIABLE, "") not in ("", "0")


def install() -> None:
    """Routes MaxText's `AttentionOp.apply_attention` through this package; repeating it is harmless."""
    from maxtext_aiter.maxtext import attention, compat

    compat.wrap_apply_attention(attention.apply_attention)


class _AttentionFinder(importlib.abc.MetaPathFinder):
    """Finds MaxText's attention module as everybody else does, and installs the hooks behind its import."""

    MODULE = "maxtext.layers.attention_op"

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                install()

            spec.loader.exec_module = exec_module
        return spec
