"""Every line that depends on the version of JAX."""

import functools
import warnings

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import mlir

NEWEST_TESTED = (0, 12)


def warn_if_untested() -> None:
    """Warns once, never fails, where JAX is newer than what the tests ran on."""
    version = tuple(int(x) for x in jax.__version__.split(".")[:2])
    if version > NEWEST_TESTED:
        newest = ".".join(map(str, NEWEST_TESTED))
        warnings.warn(f"maxtext-aiter was tested up to JAX {newest}; this is {jax.__version__}", stacklevel=2)


def is_symbolic_zero(x) -> bool:
    return isinstance(x, SymbolicZero)


def eager_impl(primitive):
    """The rule that runs `primitive` outside `jit`, compiled once for each shape and set of parameters."""
    return functools.partial(_dispatch.apply_primitive, primitive)


def bind(primitive, *args, **params):
    """Binds `primitive`; under `shard_map` all operands first vary over the same manual mesh axes."""
    return primitive.bind(*_core.auto_insert_reshard(*args), **params)


def register_lowering(primitive, function, platform):
    """Lowers `primitive` (of several results) on `platform` as the JAX function `function`.

    Inside, values no longer record which manual mesh axes they vary over: `ffi_call` would lose it, and
    the primitive's own results carry it.
    """
    rule = mlir.lower_fun(function, multiple_results=True)

    def lowering(ctx, *args, **params):
        avals_in = [aval.update(manual_axis_type=_core.empty_mat) for aval in ctx.avals_in]
        with _config._check_vma(False):
            return rule(ctx.replace(avals_in=avals_in), *args, **params)

    mlir.register_lowering(primitive, lowering, platform=platform)


def output_aval(like, shape, dtype):
    """An abstract result that varies over the same manual mesh axes as the operand `like`."""
    return like.update(
        shape=shape, dtype=jax.numpy.dtype(dtype), weak_type=False, sharding=_core.get_cur_mesh_sharding()
    )
