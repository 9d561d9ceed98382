"""`xla`: attention in plain JAX, on any device, for any spec: the reference of last resort.

Query rows are taken in blocks, so that memory grows with the sequence length and not with its square.
"""

import functools

import jax
import jax.numpy as jnp

from maxtext_aiter.providers.base import Provider
from maxtext_aiter.spec import AttentionSpec

_BLOCK_ROWS = 512


def _tokens(cu_seqlens, seqlens, total):
    """The sequence [total] of each token (-1: none), its position there [total] and the lengths."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[:-1] + seqlens
    token = jnp.arange(total, dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_seqlens[1:], token, side="right", method="scan_unrolled")
    sequence = jnp.minimum(sequence, seqlens.shape[0] - 1).astype(jnp.int32)
    inside = (token >= starts[sequence]) & (token < ends[sequence])
    return jnp.where(inside, sequence, -1), token - starts[sequence], sequence


def _coordinates(spec: AttentionSpec, sequence):
    """(id_q, position_q, id_k, position_k), each [batch, seq]: what the mask depends on.

    A query sees a key of the same id (negative: nothing) within the window around its position.
    """
    layout = spec.layout
    if layout.kind == "varlen":
        cu_q, cu_k = sequence[:2]
        len_q, len_k = sequence[2:] if layout.padded else (jnp.diff(cu_q), jnp.diff(cu_k))
        id_q, pos_q, seq_q = _tokens(cu_q, len_q, layout.seqlen_q)
        id_k, pos_k, _ = _tokens(cu_k, len_k, layout.seqlen_k)
        return tuple(x[None] for x in (id_q, pos_q + (len_k - len_q)[seq_q], id_k, pos_k))
    rows_q, rows_k = (layout.batch, layout.seqlen_q), (layout.batch, layout.seqlen_k)
    pos_q = jnp.broadcast_to(jnp.arange(layout.seqlen_q) + layout.seqlen_k - layout.seqlen_q, rows_q)
    pos_k = jnp.broadcast_to(jnp.arange(layout.seqlen_k), rows_k)
    if layout.kind == "segments":
        return sequence[0], pos_q, sequence[0], pos_k
    return jnp.zeros(rows_q, jnp.int32), pos_q, jnp.zeros(rows_k, jnp.int32), pos_k


def _mask(spec: AttentionSpec, id_q, pos_q, id_k, pos_k):
    """[batch, rows, seq_k]: which keys each query sees."""
    left, right = spec.window
    distance = pos_k[:, None, :] - pos_q[:, :, None]
    mask = (id_q[:, :, None] == id_k[:, None, :]) & (id_q >= 0)[:, :, None]
    if left >= 0:
        mask &= distance >= -left
    if right >= 0:
        mask &= distance <= right
    return mask


def _einsum(equation, *operands):
    # float32 means float32: GPUs would otherwise round the operands to tf32.
    precision = jax.lax.Precision.HIGHEST if operands[0].dtype == jnp.float32 else None
    return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=jnp.float32)


def _scores(spec: AttentionSpec, q, k):
    """[batch, kv heads, group, rows, seq_k] in float32."""
    return _einsum("bqhgd,bkhd->bhgqk", q, k) * spec.scale


def _grouped(x, spec: AttentionSpec):
    """[(batch,) seq, heads, dim] -> [batch, seq, kv heads, group, dim]."""
    return x.reshape(-1, x.shape[-3], spec.num_heads_kv, x.shape[-2] // spec.num_heads_kv, x.shape[-1])


def _grouped_rows(lse, spec: AttentionSpec):
    """[(batch,) heads, rows] -> [batch, rows, kv heads, group]."""
    lse = jnp.moveaxis(lse.reshape(-1, *lse.shape[-2:]), 1, 2)
    return lse.reshape(*lse.shape[:2], spec.num_heads_kv, -1)


def _rows(x):
    return x.reshape(-1, *x.shape[-3:])


def _over_row_blocks(step, carry, per_row):
    """Scans `step` over blocks of the rows (axis 1) of `per_row`; rows are padded with zeros and cut."""
    rows = per_row[0].shape[1]
    block = min(rows, _BLOCK_ROWS)
    num_blocks = -(-rows // block)

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, num_blocks * block - rows)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], num_blocks, block, *x.shape[2:]), 1, 0)

    def join(y):
        y = jnp.moveaxis(y, 0, 1)
        return y.reshape(y.shape[0], num_blocks * block, *y.shape[3:])[:, :rows]

    carry, out = jax.lax.scan(step, carry, tuple(split(x) for x in per_row))
    return carry, jax.tree.map(join, out)


class XlaProvider(Provider):
    name = "xla"

    def supports(self, spec: AttentionSpec, platform: str) -> str | None:
        return None

    def forward(self, spec, q, k, v, *sequence):
        id_q, pos_q, id_k, pos_k = _coordinates(spec, sequence)
        keys, values = _rows(k), _rows(v)

        def block(carry, x):
            q, id_q, pos_q = x
            mask = _mask(spec, id_q, pos_q, id_k, pos_k)[:, None, None]
            scores = jnp.where(mask, _scores(spec, q, keys), -jnp.inf)
            lse = jax.nn.logsumexp(scores, axis=-1)
            probs = jnp.where(mask, jnp.exp(scores - jnp.where(mask.any(-1), lse, 0.0)[..., None]), 0.0)
            out = _einsum("bhgqk,bkhd->bqhgd", probs.astype(values.dtype), values)
            return carry, (out.astype(values.dtype), jnp.moveaxis(lse, 3, 1))

        _, (out, lse) = _over_row_blocks(block, (), (_grouped(q, spec), id_q, pos_q))
        # lse: [batch, rows, kv heads, group] -> [batch, heads, rows]
        lse = jnp.moveaxis(lse.reshape(*lse.shape[:2], spec.num_heads_q), 1, 2)
        return out.reshape(spec.out_shape), lse.reshape(spec.lse_shape)

    def backward(self, spec, q, k, v, out, lse, dout, dlse, *sequence):
        id_q, pos_q, id_k, pos_k = _coordinates(spec, sequence)
        keys, values = _rows(k), _rows(v)
        lse = _grouped_rows(lse, spec)
        delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1).reshape(lse.shape)
        if dlse is not None:
            delta -= _grouped_rows(dlse, spec)  # d lse / d scores is P, as delta's coefficient is -P

        def block(carry, x):
            dk, dv = carry
            q, dout, lse, delta, id_q, pos_q = x
            by_head = functools.partial(jnp.moveaxis, source=1, destination=3)
            mask = _mask(spec, id_q, pos_q, id_k, pos_k)[:, None, None]
            row_lse = jnp.where(mask.any(-1), by_head(lse), 0.0)[..., None]
            probs = jnp.where(mask, jnp.exp(_scores(spec, q, keys) - row_lse), 0.0)
            dprobs = _einsum("bqhgd,bkhd->bhgqk", dout, values)
            dscores = (probs * (dprobs - by_head(delta)[..., None]) * spec.scale).astype(q.dtype)
            dv += _einsum("bhgqk,bqhgd->bkhd", probs.astype(dout.dtype), dout)
            dk += _einsum("bhgqk,bqhgd->bkhd", dscores, q)
            return (dk, dv), _einsum("bhgqk,bkhd->bqhgd", dscores, keys).astype(q.dtype)

        zeros = (jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32))
        per_row = (_grouped(q, spec), _grouped(dout, spec), lse, delta, id_q, pos_q)
        (dk, dv), dq = _over_row_blocks(block, zeros, per_row)
        return dq.reshape(q.shape), dk.reshape(k.shape).astype(k.dtype), dv.reshape(v.shape).astype(v.dtype)
