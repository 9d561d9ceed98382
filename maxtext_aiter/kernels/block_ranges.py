"""Which tokens see which, as intervals, and the tiles that a block of tokens has to visit; in the graph.

Under every mask here (documents, causal, windows, chunks, lengths that differ) the keys that a query sees
are consecutive tokens. So two integers a token replace the mask, and a few integers a block say which
tiles to visit, and which of them need no mask. All of it depends on the sequence arrays only, not on q, k
or v: XLA computes it once for all layers.

Tokens are counted over the flattened rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext_aiter.spec import AttentionSpec

_FAR = 2**30  # beyond any token


class Visibility(NamedTuple):
    """Which tokens see which.

    Attributes:
      k_lo, k_hi: [tokens_q]: each query sees the keys k_lo <= key < k_hi.
      q_lo, q_hi: [tokens_k]: each key is seen by the queries q_lo <= query < q_hi.
      ids: segments only, [tokens]: where `scattered`, equal ids are asked for besides.
      scattered: segments only, bool: an id may have several runs in a row, and the intervals hold others.
    """

    k_lo: jax.Array
    k_hi: jax.Array
    q_lo: jax.Array
    q_hi: jax.Array
    ids: jax.Array | None = None
    scattered: jax.Array | None = None


def visibility(spec: AttentionSpec, sequence, chunk: int = 0) -> Visibility:
    """The intervals of `spec`; with `chunk`, a query sees only keys of its own chunk of so many tokens."""
    layout = spec.layout
    if layout.kind == "varlen":
        return _varlen_visibility(spec, sequence, chunk)
    query = jnp.arange(layout.batch * layout.seqlen_q, dtype=jnp.int32)
    key = jnp.arange(layout.batch * layout.seqlen_k, dtype=jnp.int32)
    row_of_query, row_of_key = query // layout.seqlen_q, key // layout.seqlen_k
    ids = scattered = None
    if layout.kind == "segments":
        start, end, scattered = _runs(sequence[0])
        ids = sequence[0].reshape(-1)
        bounds_k = bounds_q = (start, end)
    else:
        bounds_k = (row_of_query * layout.seqlen_k, (row_of_query + 1) * layout.seqlen_k)
        bounds_q = (row_of_key * layout.seqlen_q, (row_of_key + 1) * layout.seqlen_q)
    # The key aligned with a query, and where the positions of its row are counted from.
    aligned = query - row_of_query * layout.seqlen_q + layout.seqlen_k - layout.seqlen_q
    origin = row_of_query * layout.seqlen_k
    k_lo, k_hi = _interval(aligned + origin, origin, bounds_k, spec.window, chunk)
    shift = row_of_key * (layout.seqlen_k - layout.seqlen_q) + layout.seqlen_k - layout.seqlen_q
    q_lo, q_hi = _interval(key - shift, row_of_key * layout.seqlen_k - shift, bounds_q, spec.window[::-1], chunk)
    return Visibility(k_lo, k_hi, q_lo, q_hi, ids, scattered)


def _varlen_visibility(spec, sequence, chunk):
    layout = spec.layout
    cu_q, cu_k = sequence[:2]
    len_q, len_k = sequence[2:] if layout.padded else (jnp.diff(cu_q), jnp.diff(cu_k))
    query, of_query, real_query = _sequence_of_tokens(cu_q, len_q, layout.seqlen_q)
    key, of_key, real_key = _sequence_of_tokens(cu_k, len_k, layout.seqlen_k)
    start_q, start_k = cu_q[:-1], cu_k[:-1]
    shift = start_k - start_q + len_k - len_q  # from a query to the key aligned with it
    bounds_k = (start_k[of_query], jnp.where(real_query, (start_k + len_k)[of_query], 0))
    bounds_q = (start_q[of_key], jnp.where(real_key, (start_q + len_q)[of_key], 0))
    k_lo, k_hi = _interval(query + shift[of_query], start_k[of_query], bounds_k, spec.window, chunk)
    q_lo, q_hi = _interval(
        key - shift[of_key], (start_k - shift)[of_key], bounds_q, spec.window[::-1], chunk
    )
    return Visibility(k_lo, k_hi, q_lo, q_hi)


def _sequence_of_tokens(cu_seqlens, seqlens, total):
    """Each token, the sequence it lies in, and whether it really lies there."""
    token = jnp.arange(total, dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_seqlens[1:], token, side="right", method="scan_unrolled")
    sequence = jnp.minimum(sequence, seqlens.shape[0] - 1).astype(jnp.int32)
    position = token - cu_seqlens[sequence]
    return token, sequence, (position >= 0) & (position < seqlens[sequence])


def _interval(aligned, origin, bounds, window, chunk):
    """[lo, hi) of the tokens around `aligned` within `bounds`, `window` and the chunk counted from `origin`."""
    before, after = window
    lo, hi = bounds
    if before >= 0:
        lo = jnp.maximum(lo, aligned - before)
    if after >= 0:
        hi = jnp.minimum(hi, aligned + after + 1)
    if chunk:
        first = origin + (aligned - origin) // chunk * chunk
        lo, hi = jnp.maximum(lo, first), jnp.minimum(hi, first + chunk)
    return lo.astype(jnp.int32), jnp.maximum(lo, hi).astype(jnp.int32)


def _runs(segment_ids):
    """Start and end of the run of equal ids that each token is in, and whether an id may have several.

    Ids that grow from run to run have one run each, and so has padding (0) that comes in one run. For all
    else the whole row stands for the run. Negative ids see nothing: their run is empty.
    """
    batch, seq = segment_ids.shape
    row_start = jnp.arange(batch, dtype=jnp.int32)[:, None] * seq
    token = row_start + jnp.arange(seq, dtype=jnp.int32)
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    starts = (segment_ids != before) | (token == row_start)
    run_start = jax.lax.cummax(jnp.where(starts, token, 0), axis=1)
    next_start = jnp.pad(jnp.where(starts, token, _FAR)[:, 1:], ((0, 0), (0, 1)), constant_values=_FAR)
    run_end = jnp.minimum(jax.lax.cummin(next_start, axis=1, reverse=True), row_start + seq)

    largest_before = jnp.pad(jax.lax.cummax(segment_ids, axis=1), ((0, 0), (1, 0)))[:, :-1]
    padding = segment_ids == 0
    grows = ~starts | padding | (segment_ids > largest_before)
    scattered = ~(grows.all() & ((starts & padding).sum(axis=1) <= 1).all())

    start = jnp.where(scattered, row_start, run_start)
    end = jnp.where(scattered, row_start + seq, run_end)
    end = jnp.where(segment_ids >= 0, end, 0)
    return start.reshape(-1), end.reshape(-1), scattered


def block_ranges(lo, hi, block: int, tile: int, scattered=None):
    """What each block of `block` tokens has to visit, in tiles of `tile` tokens.

    Returns:
      ranges: [blocks, 6], int32: the first token that one of the block's tokens sees; the part in which
        all see every token, cut to whole tiles from the first on (begin, end); the end of what one of
        them sees; and, where `scattered`, begin and end in the last two places and the others empty.
      order: [blocks], int32: the blocks, the longest first.
    """
    blocks = -(-lo.shape[0] // block)

    def reduced(function, x, empty):
        x = jnp.where(lo < hi, x, empty)
        x = jnp.pad(x, (0, blocks * block - x.shape[0]), constant_values=empty)
        return function(x.reshape(blocks, block), axis=1)

    seen_hi = reduced(jnp.max, hi, 0)
    seen_lo = jnp.minimum(reduced(jnp.min, lo, _FAR), seen_hi)
    full_lo = seen_lo + -(-(reduced(jnp.max, lo, 0) - seen_lo) // tile) * tile
    full_hi = seen_lo + (reduced(jnp.min, hi, _FAR) - seen_lo) // tile * tile
    full_hi = jnp.where(seen_lo < seen_hi, full_hi, seen_lo)
    # Without such a part, all tiles are left of it: it lies, empty, behind the last one.
    last = seen_lo + -(-(seen_hi - seen_lo) // tile) * tile
    is_empty = full_lo >= full_hi
    full_lo, full_hi = jnp.where(is_empty, last, full_lo), jnp.where(is_empty, last, full_hi)
    order = jnp.argsort(seen_lo - seen_hi).astype(jnp.int32)
    ranges = jnp.stack([seen_lo, full_lo, full_hi, jnp.maximum(seen_hi, full_hi)], axis=1)
    nothing = jnp.zeros_like(ranges[:, :2])
    if scattered is None:
        return jnp.concatenate([ranges, nothing], axis=1), order
    all_by_id = jnp.stack([*[jnp.zeros_like(seen_lo)] * 4, seen_lo, seen_hi], axis=1)
    return jnp.where(scattered, all_by_id, jnp.concatenate([ranges, nothing], axis=1)), order
