"""Flash attention on any GPU: the kernels' launches for an `AttentionSpec`, forward and backward.

Besides the spec, all functions take
  logits_soft_cap: scores become cap · tanh(scores / cap); 0 is no cap.
  sinks: [heads], float32: a logit for each head that takes part in the softmax and has no value.
  dropout_rate, dropout_key: the share of probabilities dropped, by the two words (uint32) of a JAX key.
  chunk: a query sees only keys of its own chunk of so many tokens; 0 is no chunks.
"""

import jax
import jax.numpy as jnp

from maxtext_aiter.kernels import attention_bwd, attention_fwd, launch
from maxtext_aiter.kernels.block_ranges import block_ranges, visibility
from maxtext_aiter.kernels.block_sizes import kernel_sizes
from maxtext_aiter.spec import AttentionSpec


def chunks(dim: int) -> tuple[int, ...]:
    """Powers of two, 16 or more, that together hold `dim` columns: 192 is (128, 64)."""
    largest = 1 << dim.bit_length() - 1
    if largest == dim or largest < 16:
        return (max(16, largest * (1 if largest == dim else 2)),)
    rest = chunks(dim - largest)
    return (largest * 2,) if sum(rest) >= largest else (largest, *rest)


def _pack(spec: AttentionSpec, block_rows: int) -> int:
    """Query heads of one key head that share a block of rows."""
    group = spec.num_heads_q // spec.num_heads_kv
    return min(group & -group, 16, block_rows)


def _constants(spec, logits_soft_cap, dropout_rate, sizes, pack):
    return dict(
        HEADS_Q=spec.num_heads_q,
        HEADS_KV=spec.num_heads_kv,
        PACK=pack,
        DIM_QK=spec.head_dim_qk,
        DIM_V=spec.head_dim_v,
        CHUNKS_QK=chunks(spec.head_dim_qk),
        CHUNKS_V=chunks(spec.head_dim_v),
        SCALE=spec.scale,
        SEGMENTS=spec.layout.kind == "segments",
        SOFT_CAP=float(logits_soft_cap),
        DROPOUT=float(dropout_rate),
        BLOCK_M=sizes.block_m,
        BLOCK_N=sizes.block_n,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )


def forward(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *sequence: jax.Array,
    logits_soft_cap: float = 0.0,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    chunk: int = 0,
    sizes=None,
):
    """Returns (out, lse); with sinks, the LSE counts them."""
    sizes = (sizes or kernel_sizes(spec, launch.arch())).forward
    seen = visibility(spec, sequence, chunk)
    tokens_q, tokens_k = seen.k_lo.shape[0], seen.q_lo.shape[0]
    pack = _pack(spec, sizes.block_m)
    ranges, order = block_ranges(seen.k_lo, seen.k_hi, sizes.block_m // pack, sizes.block_n, seen.scattered)
    unused = seen.k_lo
    return launch.call(
        attention_fwd.attention_fwd,
        q,
        k,
        v,
        seen.k_lo,
        seen.k_hi,
        unused if seen.ids is None else seen.ids,
        ranges,
        order,
        unused if sinks is None else sinks.astype(jnp.float32),
        unused if dropout_key is None else dropout_key,
        tokens_q,
        tokens_k,
        spec.layout.seqlen_q,
        out_shape=(
            jax.ShapeDtypeStruct(spec.out_shape, q.dtype),
            jax.ShapeDtypeStruct(spec.lse_shape, jnp.float32),
        ),
        grid=ranges.shape[0] * (spec.num_heads_q // pack),
        HAS_SINKS=sinks is not None,
        **_constants(spec, logits_soft_cap, dropout_rate, sizes, pack),
    )


def backward(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    *sequence: jax.Array,
    logits_soft_cap: float = 0.0,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    chunk: int = 0,
    sizes=None,
):
    """Returns (dq, dk, dv), and dsinks after them if there are sinks."""
    sizes = sizes or kernel_sizes(spec, launch.arch())
    seen = visibility(spec, sequence, chunk)
    tokens_q, tokens_k = seen.k_lo.shape[0], seen.q_lo.shape[0]
    unused = seen.k_lo
    ids = unused if seen.ids is None else seen.ids
    key = unused if dropout_key is None else dropout_key

    pack = _pack(spec, sizes.dq.block_m)
    ranges, order = block_ranges(seen.k_lo, seen.k_hi, sizes.dq.block_m // pack, sizes.dq.block_n, seen.scattered)
    per_row = jax.ShapeDtypeStruct((tokens_q, spec.num_heads_q), jnp.float32)
    dq, lse2, delta = launch.call(
        attention_bwd.attention_bwd_dq,
        q,
        k,
        v,
        out,
        lse,
        dout,
        lse if dlse is None else dlse,
        seen.k_lo,
        seen.k_hi,
        ids,
        ranges,
        order,
        key,
        tokens_q,
        tokens_k,
        spec.layout.seqlen_q,
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), per_row, per_row),
        grid=ranges.shape[0] * (spec.num_heads_q // pack),
        HAS_DLSE=dlse is not None,
        **_constants(spec, logits_soft_cap, dropout_rate, sizes.dq, pack),
    )

    pack = _pack(spec, sizes.dkdv.block_m)
    ranges, order = block_ranges(seen.q_lo, seen.q_hi, sizes.dkdv.block_n, sizes.dkdv.block_m // pack, seen.scattered)
    dk, dv = launch.call(
        attention_bwd.attention_bwd_dkdv,
        q,
        k,
        v,
        dout,
        lse2,
        delta,
        seen.q_lo,
        seen.q_hi,
        ids,
        ranges,
        order,
        key,
        tokens_q,
        tokens_k,
        out_shape=(jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)),
        grid=ranges.shape[0] * spec.num_heads_kv,
        **_constants(spec, logits_soft_cap, dropout_rate, sizes.dkdv, pack),
    )
    if sinks is None:
        return dq, dk, dv
    probs = jnp.exp2(sinks.astype(jnp.float32) * 1.4426950408889634 - lse2)
    return dq, dk, dv, -jnp.sum(probs * delta, axis=0).astype(sinks.dtype)
