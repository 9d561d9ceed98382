"""Flash attention, fixed-length and packed, differentiable in q, k, v also through the LSE.

Sources: FlashAttention-2 (Dao, 2023, arXiv:2307.08691); AITER's `mha_fwd` and `mha_bwd`.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import batching

from maxtext_aiter import dispatch, jax_compat
from maxtext_aiter.spec import AttentionSpec, SequenceLayout

# The name under which `jax.checkpoint` policies can keep the output and the LSE, and so never run the
# forward kernel twice. MaxText's `*_with_context` policies keep it.
RESIDUAL_NAME = "context"


# --- public functions -----------------------------------------------------------------------------------


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    return_lse: bool = False,
    segment_ids: jax.Array | None = None,
    max_segments: int | None = None,
    provider: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of fixed-length rows, or of rows in which documents are packed.

    Args:
      q: [batch, seq_q, heads, head_dim]; float32, float16 or bfloat16.
      k: [batch, seq_k, kv_heads, head_dim]; heads is a multiple of kv_heads.
      v: [batch, seq_k, kv_heads, head_dim_v].
      causal: a query sees no later key; the last query is aligned with the last key.
      window: keys that a query sees before and after the one aligned with it, in tokens; both bounds
        are inclusive and -1 is unbounded.
      scale: multiplies the scores; None is head_dim ** -0.5.
      return_lse: also return the log-sum-exp of the scores.
      segment_ids: [batch, seq], int32: a query sees only keys of its own id, and a negative id sees and
        is seen by nothing. Ids that grow along the row, except for 0 (padding), are fast.
      max_segments: documents a row that memory is planned for; more are correct but slow. None is
        max(32, seq / 128).
      provider: the name of the only provider to use; None lets `maxtext_aiter.dispatch` choose.

    Returns:
      out [batch, seq_q, heads, head_dim_v] in q's dtype; with `return_lse` also
      lse [batch, heads, seq_q] in float32, natural logarithm. A query that sees no key has zeros
      and -inf, and no gradient.

    Raises:
      TypeError, ValueError: the arguments do not fit together; the message says which and how.
    """
    _check_arrays(q, k, v, rank=4, shape="[batch, seq, heads, head_dim]")
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    if k.shape[0] != batch:
        raise ValueError(f"q and k differ in batch: {batch} and {k.shape[0]}")
    if segment_ids is None:
        if max_segments is not None:
            raise ValueError("max_segments is given without segment_ids")
        layout = SequenceLayout("dense", batch, seqlen_q, seqlen_k, seqlen_q, seqlen_k)
        sequence = ()
    else:
        _check_int32("segment_ids", segment_ids, (batch, seqlen_q))
        if seqlen_k != seqlen_q:
            raise ValueError(f"segment_ids need seq_q == seq_k, not {seqlen_q} and {seqlen_k}")
        max_segments = max(32, seqlen_q // 128) if max_segments is None else operator.index(max_segments)
        if max_segments < 1:
            raise ValueError(f"max_segments is {max_segments}; at least 1 is needed")
        max_segments = min(max_segments, seqlen_q)
        layout = SequenceLayout(
            "segments", batch, seqlen_q, seqlen_k, seqlen_q, seqlen_k, max_segments=max_segments
        )
        sequence = (segment_ids,)
    spec = _make_spec(q, k, v, layout, causal, window, scale)
    out, lse = _attention(spec, provider, return_lse, q, k, v, *sequence)
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    return_lse: bool = False,
    seqlens_q: jax.Array | None = None,
    seqlens_k: jax.Array | None = None,
    provider: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of sequences of different lengths, laid end to end.

    Args:
      q: [total_q, heads, head_dim]; float32, float16 or bfloat16.
      k: [total_k, kv_heads, head_dim]; heads is a multiple of kv_heads.
      v: [total_k, kv_heads, head_dim_v].
      cu_seqlens_q: [num_seqs + 1], int32: sequence i holds the tokens cu_seqlens_q[i] to
        cu_seqlens_q[i + 1] - 1. Sequences may be empty.
      cu_seqlens_k: the same for k and v.
      max_seqlen_q: no sequence of q is longer (a Python integer).
      max_seqlen_k: no sequence of k is longer.
      causal, window, scale, return_lse, provider: as in `flash_attention`, in each sequence.
      seqlens_q: [num_seqs], int32: how many tokens of each sequence are real, the rest being padding;
        None: all. Given together with `seqlens_k`.
      seqlens_k: the same for k and v.

    Returns:
      out [total_q, heads, head_dim_v] in q's dtype; with `return_lse` also lse [heads, total_q] in
      float32. A query that sees no key, or lies outside every sequence, has zeros and -inf.

    Raises:
      TypeError, ValueError: the arguments do not fit together; the message says which and how.
    """
    _check_arrays(q, k, v, rank=3, shape="[total, heads, head_dim]")
    num_seqs = cu_seqlens_q.shape[0] - 1 if jnp.ndim(cu_seqlens_q) == 1 else 0
    if num_seqs < 1:
        raise ValueError(f"cu_seqlens_q has shape {jnp.shape(cu_seqlens_q)}; [num_seqs + 1] is needed")
    _check_int32("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
    _check_int32("cu_seqlens_k", cu_seqlens_k, (num_seqs + 1,))
    if (seqlens_q is None) != (seqlens_k is None):
        raise ValueError("seqlens_q and seqlens_k are given together or not at all")
    sequence = (cu_seqlens_q, cu_seqlens_k)
    if seqlens_q is not None:
        _check_int32("seqlens_q", seqlens_q, (num_seqs,))
        _check_int32("seqlens_k", seqlens_k, (num_seqs,))
        sequence += (seqlens_q, seqlens_k)
    layout = SequenceLayout(
        "varlen",
        num_seqs,
        q.shape[0],
        k.shape[0],
        _check_int("max_seqlen_q", max_seqlen_q),
        _check_int("max_seqlen_k", max_seqlen_k),
        padded=seqlens_q is not None,
    )
    spec = _make_spec(q, k, v, layout, causal, window, scale)
    out, lse = _attention(spec, provider, return_lse, q, k, v, *sequence)
    return (out, lse) if return_lse else out


def _check_arrays(q, k, v, rank, shape):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if jnp.ndim(x) != rank:
            raise ValueError(f"{name} has shape {jnp.shape(x)}; {shape} is needed")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k differ in head_dim: {q.shape[-1]} and {k.shape[-1]}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v differ in more than head_dim: shapes {k.shape} and {v.shape}")


def _check_int32(name, x, shape):
    if x.dtype != jnp.int32:
        raise TypeError(f"{name} is {x.dtype}; int32 is needed")
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape} where {shape} is needed")


def _check_int(name, x):
    try:
        return operator.index(x)
    except TypeError as e:
        raise TypeError(f"{name} must be a Python integer, known when the function is traced") from e


def _make_spec(q, k, v, layout, causal, window, scale):
    try:
        left, right = (operator.index(w) for w in window)
    except (TypeError, ValueError) as e:
        raise TypeError(f"window must be two Python integers, not {window!r}") from e
    if min(left, right) < -1:
        raise ValueError(f"window is {window}; its bounds are -1 (unbounded) or more")
    if causal:
        right = 0
    try:
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    except (TypeError, jax.errors.ConcretizationTypeError) as e:
        raise TypeError("scale must be a Python number; multiply q for a traced one") from e
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be finite")
    return AttentionSpec(
        dtype=q.dtype.name,
        num_heads_q=q.shape[-2],
        num_heads_kv=k.shape[-2],
        head_dim_qk=q.shape[-1],
        head_dim_v=v.shape[-1],
        layout=layout,
        scale=scale,
        window=(left, right),
    )


# --- derivative -----------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(spec, provider, return_lse, q, k, v, *sequence):
    return tuple(jax_compat.bind(attention_fwd_p, q, k, v, *sequence, spec=spec, provider=provider))


def _attention_fwd(spec, provider, return_lse, q, k, v, *sequence):
    q, k, v, *sequence = (x.value for x in (q, k, v, *sequence))
    out, lse = jax_compat.bind(attention_fwd_p, q, k, v, *sequence, spec=spec, provider=provider)
    out, lse = checkpoint_name(out, RESIDUAL_NAME), checkpoint_name(lse, RESIDUAL_NAME)
    return (out, lse), (q, k, v, out, lse, sequence)


def _attention_bwd(spec, provider, return_lse, residuals, cotangents):
    q, k, v, out, lse, sequence = residuals
    dout, dlse = cotangents
    if jax_compat.is_symbolic_zero(dout):
        dout = jnp.zeros_like(out)
    has_dlse = return_lse and not jax_compat.is_symbolic_zero(dlse)
    # A row that sees no key is constant; merging partial results may well give it a NaN cotangent.
    dlse = (jnp.where(jnp.isneginf(lse), 0.0, dlse),) if has_dlse else ()
    gradients = jax_compat.bind(
        attention_bwd_p,
        *(q, k, v, out, lse, dout, *dlse, *sequence),
        spec=spec,
        provider=provider,
        has_dlse=has_dlse,
    )
    return (*gradients, *(None for _ in sequence))


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


# --- primitives -----------------------------------------------------------------------------------------
# The provider is chosen when a primitive is lowered, since only then the platform is certain.

attention_fwd_p = Primitive("aiter_attention_fwd")  # q, k, v, *sequence -> out, lse
attention_bwd_p = Primitive("aiter_attention_bwd")  # q, k, v, out, lse, dout[, dlse], *sequence -> dq, dk, dv


def _fwd_abstract_eval(q, k, v, *sequence, spec, provider):
    out = jax_compat.output_aval(q, spec.out_shape, spec.dtype)
    return [out, jax_compat.output_aval(q, spec.lse_shape, jnp.float32)]


def _bwd_abstract_eval(q, k, v, *rest, spec, provider, has_dlse):
    return [jax_compat.output_aval(q, x.shape, spec.dtype) for x in (q, k, v)]


def _fwd(*operands, platform, spec, provider):
    return dispatch.choose(spec, platform, provider).provider.forward(spec, *operands)


def _bwd(*operands, platform, spec, provider, has_dlse):
    arrays, rest = operands[:6], operands[6:]
    dlse, sequence = (rest[0], rest[1:]) if has_dlse else (None, rest)
    return dispatch.choose(spec, platform, provider).provider.backward(spec, *arrays, dlse, *sequence)


for _primitive, _function, _abstract_eval in (
    (attention_fwd_p, _fwd, _fwd_abstract_eval),
    (attention_bwd_p, _bwd, _bwd_abstract_eval),
):
    _primitive.multiple_results = True
    _primitive.def_impl(jax_compat.eager_impl(_primitive))
    _primitive.def_abstract_eval(_abstract_eval)
    for _platform in ("cpu", "cuda", "rocm"):
        jax_compat.register_lowering(_primitive, functools.partial(_function, platform=_platform), _platform)


# --- batching -------------------------------------------------------------------------------------------
# A mapped axis becomes more rows (dense, segments) or more sequences (varlen) of one larger problem.


def _merge_rows(x, size):
    """[size, rows, ...] -> [size * rows, ...]."""
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _split_rows(x, size):
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def _merge_lse(lse, layout, size):
    """As `_merge_rows`, minding that varlen's lse is [heads, total]."""
    if layout.kind == "varlen":
        return jnp.moveaxis(lse, 0, 1).reshape(lse.shape[1], size * lse.shape[2])
    return _merge_rows(lse, size)


def _split_lse(lse, layout, size):
    if layout.kind == "varlen":
        return jnp.moveaxis(lse.reshape(lse.shape[0], size, lse.shape[1] // size), 1, 0)
    return _split_rows(lse, size)


def _merge_sequences(layout, sequence, size):
    """Layout and sequence arrays of `size` problems laid end to end."""
    if layout.kind != "varlen":
        rows = dataclasses.replace(layout, batch=size * layout.batch)
        return rows, tuple(_merge_rows(x, size) for x in sequence)
    cu_seqlens, seqlens = sequence[:2], sequence[2:]
    if not layout.padded:
        seqlens = tuple(jnp.diff(cu) for cu in cu_seqlens)
    # Tokens after the last sequence of one problem are a gap before the next: an empty padded sequence.
    seqlens = tuple(jnp.pad(lens, ((0, 0), (0, 1))).reshape(-1) for lens in seqlens)
    totals = (layout.seqlen_q, layout.seqlen_k)
    cu_seqlens = tuple(
        jnp.append((cu + total * jnp.arange(size, dtype=jnp.int32)[:, None]).reshape(-1), jnp.int32(size * total))
        for cu, total in zip(cu_seqlens, totals)
    )
    merged = dataclasses.replace(
        layout,
        batch=size * (layout.batch + 1),
        seqlen_q=size * layout.seqlen_q,
        seqlen_k=size * layout.seqlen_k,
        padded=True,
    )
    return merged, (*cu_seqlens, *seqlens)


def _batched_first(operands, dims):
    """All operands with the mapped axis first, those without one repeated, and its size."""
    size = next(x.shape[d] for x, d in zip(operands, dims) if d is not None)
    repeat = lambda x: jnp.broadcast_to(x, (size, *x.shape))
    first = (repeat(x) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims))
    return size, list(first)


def _fwd_batching(operands, dims, *, spec, provider):
    size, (q, k, v, *sequence) = _batched_first(operands, dims)
    layout, sequence = _merge_sequences(spec.layout, sequence, size)
    out, lse = jax_compat.bind(
        attention_fwd_p,
        *(_merge_rows(x, size) for x in (q, k, v)),
        *sequence,
        spec=dataclasses.replace(spec, layout=layout),
        provider=provider,
    )
    return [_split_rows(out, size), _split_lse(lse, spec.layout, size)], [0, 0]


def _bwd_batching(operands, dims, *, spec, provider, has_dlse):
    size, (q, k, v, out, lse, dout, *rest) = _batched_first(operands, dims)
    dlse, sequence = (rest[:1], rest[1:]) if has_dlse else ([], rest)
    layout, sequence = _merge_sequences(spec.layout, sequence, size)
    q, k, v, out, dout = (_merge_rows(x, size) for x in (q, k, v, out, dout))
    lse, *dlse = (_merge_lse(x, spec.layout, size) for x in (lse, *dlse))
    gradients = jax_compat.bind(
        attention_bwd_p,
        *(q, k, v, out, lse, dout, *dlse, *sequence),
        spec=dataclasses.replace(spec, layout=layout),
        provider=provider,
        has_dlse=has_dlse,
    )
    return [_split_rows(x, size) for x in gradients], [0, 0, 0]


batching.primitive_batchers[attention_fwd_p] = _fwd_batching
batching.primitive_batchers[attention_bwd_p] = _bwd_batching
