"""Every line that depends on the version of MaxText."""

import functools
import inspect
import warnings
from importlib import metadata

NEWEST_TESTED = (0, 2, 5)


def _warn_if_untested() -> None:
    try:
        version = metadata.version("maxtext")
    except metadata.PackageNotFoundError:
        return  # a source checkout: its age is unknown
    numbers = tuple(int(x) for x in version.split(".")[:3] if x.isdigit())
    if numbers > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(f"maxtext-aiter was tested up to MaxText {newest}; this is {version}", stacklevel=2)


def wrap_apply_attention(replacement) -> None:
    """Makes `replacement(stock, op, arguments)` serve `AttentionOp.apply_attention`.

    `arguments` is an `inspect.BoundArguments` with the defaults filled in, so that the replacement knows
    names and not positions; `stock` is MaxText's own method.
    """
    from maxtext.layers.attention_op import AttentionOp

    stock = AttentionOp.apply_attention
    if hasattr(stock, "__wrapped__"):
        return
    _warn_if_untested()
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def apply_attention(self, *args, **kwargs):
        arguments = signature.bind(self, *args, **kwargs)
        arguments.apply_defaults()
        return replacement(stock, self, arguments)

    AttentionOp.apply_attention = apply_attention


def dot_product(op, arguments):
    """MaxText's own dense attention for the same call."""
    accepted = inspect.signature(op.apply_attention_dot).parameters
    given = {name: value for name, value in arguments.arguments.items() if name in accepted}
    return op.apply_attention_dot(**given)


def mesh_axes(op):
    """The `PartitionSpec`s of q, k and v, and of segment ids, over the mesh axes of MaxText's rules."""
    from maxtext.common import common_types as names

    arrays = op._logical_to_mesh_axes((names.BATCH_ATTN, None, names.HEAD, names.D_KV))
    segment_ids = op._logical_to_mesh_axes((names.BATCH_ATTN, None))
    return arrays, segment_ids


def context_parallel_size(op) -> int:
    return op._context_parallel_size()


def use_config_class(config_class) -> None:
    """Makes every `pyconfig.initialize*` read `config_class`, which knows the keys of this package."""
    from maxtext.configs import pyconfig

    for name in ("initialize", "initialize_pydantic"):
        function = getattr(pyconfig, name)
        if not isinstance(function, functools.partial):
            setattr(pyconfig, name, functools.partial(function, config_class=config_class))
