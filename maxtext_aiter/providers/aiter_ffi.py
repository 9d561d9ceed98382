"""What every provider behind our FFI handlers shares: the calls, and how a spec becomes one AITER knows.

AITER's attention takes head dims that are multiples of 8, fixed-length rows or cumulative sequence
lengths, and no cotangent of the LSE. The rest is made of those here.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_aiter.packing import segments_to_cu_seqlens
from maxtext_aiter.providers.base import Provider
from maxtext_aiter.providers.xla import XlaProvider
from maxtext_aiter.spec import AttentionSpec, SequenceLayout

try:
    from maxtext_aiter import _ffi
except ImportError as e:  # a source tree without the built module: other providers still work
    _ffi, WHY_MISSING = None, f"its native module cannot be loaded ({e})"
else:
    WHY_MISSING = None
    for _name, _handler in _ffi.registrations().items():
        jax.ffi.register_ffi_target(_name, _handler, platform="cpu")

_HEAD_DIM_MULTIPLE = 8


def _attributes(spec: AttentionSpec):
    left, right = spec.window
    return {
        "scale": np.float32(spec.scale),
        "window_left": np.int32(left),
        "window_right": np.int32(right),
        "max_seqlen_q": np.int32(spec.layout.max_seqlen_q),
        "max_seqlen_k": np.int32(spec.layout.max_seqlen_k),
    }


def _forward_call(spec: AttentionSpec, *operands):
    results = (
        jax.ShapeDtypeStruct(spec.out_shape, spec.dtype),
        jax.ShapeDtypeStruct(spec.lse_shape, jnp.float32),
    )
    return jax.ffi.ffi_call("maxtext_aiter_attention_fwd", results)(*operands, **_attributes(spec))


def _backward_call(spec: AttentionSpec, q, k, v, *operands):
    layout = spec.layout
    scratch_bytes = _ffi.attention_bwd_scratch_bytes(
        dtype=spec.dtype,
        varlen=layout.kind == "varlen",
        batch=layout.batch,
        seqlen_q=layout.seqlen_q,
        seqlen_k=layout.seqlen_k,
        num_heads_q=spec.num_heads_q,
        num_heads_kv=spec.num_heads_kv,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
    )
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    results.append(jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8))
    call = jax.ffi.ffi_call("maxtext_aiter_attention_bwd", results)
    return tuple(call(q, k, v, *operands, **_attributes(spec))[:3])


def _pad_head_dim(x):
    padding = -x.shape[-1] % _HEAD_DIM_MULTIPLE
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x


def _padded_spec(spec: AttentionSpec):
    dims = (spec.head_dim_qk, spec.head_dim_v)
    dim_qk, dim_v = (d + -d % _HEAD_DIM_MULTIPLE for d in dims)
    return dataclasses.replace(spec, head_dim_qk=dim_qk, head_dim_v=dim_v)


def _varlen_spec(spec: AttentionSpec):
    """The spec for the flattened rows, with room for each row's segments and its padding."""
    layout = spec.layout
    total = layout.batch * layout.seqlen_q
    room = min(layout.batch * (layout.max_segments + 1), total)
    varlen = SequenceLayout("varlen", room, total, total, layout.seqlen_q, layout.seqlen_k)
    return dataclasses.replace(spec, layout=varlen)


def _flatten_rows(x):
    return x.reshape(-1, *x.shape[2:])


def _flatten_lse(lse):
    """[batch, heads, seq] -> [heads, batch * seq]."""
    return jnp.moveaxis(lse, 1, 0).reshape(lse.shape[1], -1)


class AiterFfiProvider(Provider):
    """Attention through this package's FFI handlers and AITER's entry points behind them."""

    _inexact = XlaProvider()  # for segment ids that cumulative lengths cannot say

    def forward(self, spec, q, k, v, *sequence):
        if spec.layout.kind == "segments":
            return self._segments_forward(spec, q, k, v, *sequence)
        padded = _padded_spec(spec)
        out, lse = _forward_call(padded, *map(_pad_head_dim, (q, k, v)), *sequence)
        return out[..., : spec.head_dim_v], lse

    def backward(self, spec, q, k, v, out, lse, dout, dlse, *sequence):
        if spec.layout.kind == "segments":
            return self._segments_backward(spec, q, k, v, out, lse, dout, dlse, *sequence)
        padded = _padded_spec(spec)
        pq, pk, pv, pout, pdout = map(_pad_head_dim, (q, k, v, out, dout))
        gradients = _backward_call(padded, pq, pk, pv, pout, lse, pdout, *sequence)
        dq, dk, dv = (d[..., : x.shape[-1]] for d, x in zip(gradients, (q, k, v)))
        if dlse is not None:
            lse_dq, lse_dk = self._lse_gradient(spec, q, k, lse, dlse, *sequence)
            dq = (dq.astype(jnp.float32) + lse_dq).astype(dq.dtype)
            dk = (dk.astype(jnp.float32) + lse_dk).astype(dk.dtype)
        return dq, dk, dv

    def _lse_gradient(self, spec, q, k, lse, dlse, *sequence):
        """dlse's part of (dq, dk), in float32: AITER's backward has no input for it.

        d lse_i / d q_i = scale · Σ_j P_ij k_j is attention with v := k, and
        Σ_i dlse_i d lse_i / d k_j = Σ_i P_ij (scale · dlse_i · q_i) is the dv of a backward call with
        that in place of dout. Both are one more call of the same kernels.
        """
        spec = dataclasses.replace(spec, head_dim_v=spec.head_dim_qk)
        per_row = spec.scale * jnp.moveaxis(dlse, -2, -1)[..., None]  # [..., seq, heads, 1]
        mean_key, _ = self.forward(spec, q, k, k, *sequence)
        dout = (per_row * q.astype(jnp.float32)).astype(q.dtype)
        _, _, dk = self.backward(spec, q, k, k, mean_key, lse, dout, None, *sequence)
        return per_row * mean_key.astype(jnp.float32), dk.astype(jnp.float32)

    def _segments_forward(self, spec, q, k, v, segment_ids):
        varlen = _varlen_spec(spec)
        cu_seqlens, exact = segments_to_cu_seqlens(segment_ids, varlen.layout.batch)

        def as_varlen():
            out, lse = self.forward(varlen, *map(_flatten_rows, (q, k, v)), cu_seqlens, cu_seqlens)
            lse = jnp.moveaxis(lse.reshape(spec.num_heads_q, spec.layout.batch, spec.layout.seqlen_q), 0, 1)
            return out.reshape(spec.out_shape), lse

        return jax.lax.cond(exact, as_varlen, lambda: self._inexact.forward(spec, q, k, v, segment_ids))

    def _segments_backward(self, spec, q, k, v, out, lse, dout, dlse, segment_ids):
        varlen = _varlen_spec(spec)
        cu_seqlens, exact = segments_to_cu_seqlens(segment_ids, varlen.layout.batch)

        def as_varlen():
            arrays = map(_flatten_rows, (q, k, v, out))
            lses = (_flatten_lse(lse), _flatten_rows(dout), None if dlse is None else _flatten_lse(dlse))
            gradients = self.backward(varlen, *arrays, *lses, cu_seqlens, cu_seqlens)
            return tuple(d.reshape(x.shape) for d, x in zip(gradients, (q, k, v)))

        def masked():
            return self._inexact.backward(spec, q, k, v, out, lse, dout, dlse, segment_ids)

        return jax.lax.cond(exact, as_varlen, masked)
