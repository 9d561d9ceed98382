"""Attention in float64 NumPy, straight from the definition, and how far a result may be from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from maxtext_aiter.spec import AttentionSpec


_einsum = functools.partial(np.einsum, optimize=True)  # through BLAS


def visible(spec: AttentionSpec, sequence):
    """Boolean [rows, seq_q, seq_k]: which keys each query sees."""
    layout = spec.layout
    left, right = spec.window

    def window(len_q, len_k):
        distance = np.arange(len_k)[None, :] - (np.arange(len_q)[:, None] + len_k - len_q)
        return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))

    if layout.kind == "varlen":
        cu_q, cu_k = (np.asarray(x) for x in sequence[:2])
        len_q, len_k = (np.asarray(x) for x in sequence[2:]) if layout.padded else (np.diff(cu_q), np.diff(cu_k))
        mask = np.zeros((1, layout.seqlen_q, layout.seqlen_k), bool)
        for i in range(layout.batch):
            rows, cols = slice(cu_q[i], cu_q[i] + len_q[i]), slice(cu_k[i], cu_k[i] + len_k[i])
            mask[0, rows, cols] = window(len_q[i], len_k[i])
        return mask
    mask = np.broadcast_to(window(layout.seqlen_q, layout.seqlen_k), (layout.batch, layout.seqlen_q, layout.seqlen_k))
    if layout.kind == "segments":
        ids = np.asarray(sequence[0])
        mask = mask & (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    return mask


def reference(spec: AttentionSpec, q, k, v, sequence=(), dout=None, dlse=None):
    """(out, lse) or, with cotangents, (out, lse, dq, dk, dv), in float64 and in the shapes of the spec."""
    rows = lambda x: np.asarray(x, np.float64).reshape(-1, *x.shape[-3:])
    group = spec.num_heads_q // spec.num_heads_kv
    q3, k3, v3 = rows(q), np.repeat(rows(k), group, axis=2), np.repeat(rows(v), group, axis=2)
    mask = visible(spec, sequence)[:, None]
    scores = np.where(mask, _einsum("bqhd,bkhd->bhqk", q3, k3) * spec.scale, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    exp = np.exp(scores - top)
    total = exp.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    probs = exp / np.where(total == 0, 1.0, total)
    out = _einsum("bhqk,bkhd->bqhd", probs, v3)
    results = (out.reshape(spec.out_shape), lse.reshape(spec.lse_shape))
    if dout is None:
        return results
    dout3 = rows(dout)
    dprobs = _einsum("bqhd,bkhd->bhqk", dout3, v3)
    delta = _einsum("bqhd,bqhd->bhq", dout3, out)[..., None]
    if dlse is not None:
        delta = delta - np.where(np.isfinite(lse), np.asarray(dlse, np.float64).reshape(lse.shape), 0.0)[..., None]
    dscores = probs * (dprobs - delta) * spec.scale
    dq = _einsum("bhqk,bkhd->bqhd", dscores, k3)
    dk = _einsum("bhqk,bqhd->bkhd", dscores, q3)
    dv = _einsum("bhqk,bqhd->bkhd", probs, dout3)
    ungroup = lambda x: x.reshape(*x.shape[:2], spec.num_heads_kv, group, x.shape[-1]).sum(3)
    return (*results, dq.reshape(q.shape), ungroup(dk).reshape(k.shape), ungroup(dv).reshape(v.shape))


def plain(spec: AttentionSpec, q, k, v, sequence=()):
    """(out, lse) in plain JAX and in the dtype of q, k, v: the softmax in float32, all else left to XLA."""
    rows = lambda x: x.reshape(-1, *x.shape[-3:])
    group = spec.num_heads_q // spec.num_heads_kv
    q3, k3, v3 = rows(q), jnp.repeat(rows(k), group, axis=2), jnp.repeat(rows(v), group, axis=2)
    mask = jnp.asarray(visible(spec, sequence)[:, None])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q3, k3).astype(jnp.float32) * spec.scale
    scores = jnp.where(mask, scores, -jnp.inf)
    seen = mask.any(-1)
    lse = jnp.where(seen, jax.nn.logsumexp(jnp.where(seen[..., None], scores, 0.0), axis=-1), -jnp.inf)
    probs = jnp.where(mask, jnp.exp(scores - jnp.where(seen, lse, 0.0)[..., None]), 0.0)
    out = jnp.einsum("bhqk,bkhd->bqhd", probs.astype(v.dtype), v3)
    return out.reshape(spec.out_shape), lse.reshape(spec.lse_shape)


# What remains where a plain computation happens to be nearly exact.
FLOOR = {"float32": 2.0**-22, "float16": 2.0**-12, "bfloat16": 2.0**-9}


def error(actual, exact) -> float:
    """‖actual - exact‖ / ‖exact‖ over the finite entries; infinite entries must be equal."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite], exact[~finite])
    assert np.isfinite(actual[finite]).all(), "not finite where the reference is"
    norm = np.linalg.norm(exact[finite])
    return float(np.linalg.norm(actual[finite] - exact[finite]) / norm) if norm else float(np.abs(actual[finite]).max(initial=0))


def assert_close(actual, exact, plain, dtype, what="", one_key=False):
    """`actual` is at most 3 times as far from `exact` as `plain`, the same in plain JAX and dtype.

    Where every query sees one key at most, dP and D = rowsum(dO · O) are equal and their difference is
    all rounding: flash attention computes them apart, plain JAX does not.
    """
    allowed = 3 * max(error(plain, exact), FLOOR[str(jnp.dtype(dtype))] * (16 if one_key else 1))
    found = error(actual, exact)
    assert found <= allowed, f"{what}: error {found:.3g}, plain JAX has {error(plain, exact):.3g}"
