"""Forward: the online softmax over the key tiles that a block of query rows sees.

A row is one (token, head) pair: PACK heads that share a key head sit side by side in a block, so that a
block covers fewer tokens and wastes less at the edges of documents. Which keys a token sees is an
interval [k_lo, k_hi); `RANGES` holds, for each block, the union of its tokens' intervals and the part of
it that all of them see (`block_ranges.py`). Blocks run in the order `ORDER`, the longest first.
"""

import triton
import triton.language as tl

from maxtext_aiter.kernels import tiles


@triton.jit
def _step(
    q, acc, top, total, k_start, k_lo, k_hi, id_q, token, head,
    K, V, IDS, DROPOUT_KEY, tokens_k,
    MASKED: tl.constexpr, CHECK_IDS: tl.constexpr,
    SCALE: tl.constexpr, SOFT_CAP: tl.constexpr, DROPOUT: tl.constexpr,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    CHUNKS_QK: tl.constexpr, CHUNKS_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One key tile. `acc` and `total` are relative to exp2(TO_LOG2 · top)."""
    TO_LOG2: tl.constexpr = tiles.to_log2(SCALE, SOFT_CAP)
    column = tl.arange(0, BLOCK_N)
    key = k_start + column
    inside = key < tokens_k
    k = tiles.load(K + tl.cast(k_start, tl.int64) * STRIDE_K, column * STRIDE_K, inside, MASKED, DIM_QK, CHUNKS_QK)
    scores = tiles.times_transposed(q, k, CHUNKS_QK)
    if SOFT_CAP > 0:
        scores = tiles.soft_cap(scores, SCALE, SOFT_CAP)
    if MASKED:
        visible = (key[None, :] >= k_lo[:, None]) & (key[None, :] < k_hi[:, None])
        if CHECK_IDS:
            visible = visible & (id_q[:, None] == tl.load(IDS + key, mask=inside, other=-1)[None, :])
        scores = tl.where(visible, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    probs = tl.exp2(scores * TO_LOG2 - (new_top * TO_LOG2)[:, None])
    rescale = tl.exp2((top - new_top) * TO_LOG2)
    total = total * rescale + tl.sum(probs, 1)
    acc = tiles.scale_rows(acc, rescale, CHUNKS_V)
    if DROPOUT > 0:
        probs = tl.where(tiles.kept(DROPOUT_KEY, head[:, None], token[:, None], key[None, :], DROPOUT), probs, 0.0)
    v = tiles.load(V + tl.cast(k_start, tl.int64) * STRIDE_V, column * STRIDE_V, inside, MASKED, DIM_V, CHUNKS_V)
    acc = tiles.add_times(acc, probs, v, CHUNKS_V)
    return acc, new_top, total


@triton.jit
def attention_fwd(
    Q, K, V, K_LO, K_HI, IDS, RANGES, ORDER, SINKS, DROPOUT_KEY, tokens_q, tokens_k, row_tokens,
    OUT, LSE,
    HEADS_Q: tl.constexpr, HEADS_KV: tl.constexpr, PACK: tl.constexpr, DIM_QK: tl.constexpr, DIM_V: tl.constexpr,
    CHUNKS_QK: tl.constexpr, CHUNKS_V: tl.constexpr, SCALE: tl.constexpr, SEGMENTS: tl.constexpr,
    SOFT_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    TO_LOG2: tl.constexpr = tiles.to_log2(SCALE, SOFT_CAP)
    STRIDE_K: tl.constexpr = HEADS_KV * DIM_QK
    STRIDE_V: tl.constexpr = HEADS_KV * DIM_V
    block = tl.load(ORDER + tl.program_id(0) // (HEADS_Q // PACK))
    head_0 = tl.program_id(0) % (HEADS_Q // PACK) * PACK
    head_kv = head_0 // (HEADS_Q // HEADS_KV)
    token_0 = block * (BLOCK_M // PACK)
    row = tl.arange(0, BLOCK_M)
    token = token_0 + row // PACK
    head = head_0 + row % PACK
    inside = token < tokens_q
    k_lo = tl.load(K_LO + token, mask=inside, other=0)
    k_hi = tl.load(K_HI + token, mask=inside, other=0)
    q_offset = row // PACK * (HEADS_Q * DIM_QK) + head * DIM_QK
    q = tiles.load(Q + token_0.to(tl.int64) * (HEADS_Q * DIM_QK), q_offset, inside, True, DIM_QK, CHUNKS_QK)
    k_base = K + head_kv * DIM_QK
    v_base = V + head_kv * DIM_V
    id_q = k_lo
    ranges = RANGES + block * 6
    seen_lo = tl.load(ranges)
    full_lo = tl.load(ranges + 1)
    full_hi = tl.load(ranges + 2)
    seen_hi = tl.load(ranges + 3)

    top = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a row that sees nothing yet makes no NaN
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tiles.zeros(BLOCK_M, CHUNKS_V)
    if SEGMENTS:  # ids that come in several runs: every tile compares ids, and the other loops are empty
        id_q = tl.load(IDS + token, mask=inside, other=-1)
        for k_start in range(tl.load(ranges + 4), tl.load(ranges + 5), BLOCK_N):
            acc, top, total = _step(
                q, acc, top, total, k_start, k_lo, k_hi, id_q, token, head, k_base, v_base, IDS, DROPOUT_KEY,
                tokens_k, True, True, SCALE, SOFT_CAP, DROPOUT, STRIDE_K, STRIDE_V, DIM_QK, DIM_V,
                CHUNKS_QK, CHUNKS_V, BLOCK_N,
            )  # fmt: skip
    num_left = (full_lo - seen_lo) // BLOCK_N
    num_masked = num_left + tl.cdiv(seen_hi - full_hi, BLOCK_N)
    for i in range(num_masked):
        k_start = tl.where(i < num_left, seen_lo + i * BLOCK_N, full_hi + (i - num_left) * BLOCK_N)
        acc, top, total = _step(
            q, acc, top, total, k_start, k_lo, k_hi, id_q, token, head, k_base, v_base, IDS, DROPOUT_KEY,
            tokens_k, True, False, SCALE, SOFT_CAP, DROPOUT, STRIDE_K, STRIDE_V, DIM_QK, DIM_V,
            CHUNKS_QK, CHUNKS_V, BLOCK_N,
        )  # fmt: skip
    for k_start in range(full_lo, full_hi, BLOCK_N):
        acc, top, total = _step(
            q, acc, top, total, k_start, k_lo, k_hi, id_q, token, head, k_base, v_base, IDS, DROPOUT_KEY,
            tokens_k, False, False, SCALE, SOFT_CAP, DROPOUT, STRIDE_K, STRIDE_V, DIM_QK, DIM_V,
            CHUNKS_QK, CHUNKS_V, BLOCK_N,
        )  # fmt: skip

    total = tl.where(k_lo < k_hi, total, 0.0)
    top = tl.where(k_lo < k_hi, top * TO_LOG2, -1e30)
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_SINKS:
        sink = tl.load(SINKS + head, mask=inside, other=0.0) * tiles.LOG2_E
        new_top = tl.maximum(top, sink)
        factor = tl.exp2(top - new_top)
        total = total * factor + tl.exp2(sink - new_top)
        top = new_top
    factor = tl.where((total > 0.0) & (k_lo < k_hi), factor / (total * (1.0 - DROPOUT)), 0.0)
    out_offset = row // PACK * (HEADS_Q * DIM_V) + head * DIM_V
    tiles.store(OUT + token_0.to(tl.int64) * (HEADS_Q * DIM_V), out_offset, inside, acc, factor, DIM_V, CHUNKS_V)
    lse = tl.where(total > 0.0, (top + tl.log2(total)) * tiles.LN_2, -float("inf"))
    # LSE is [batch, heads, row_tokens].
    lse_offset = (token // row_tokens * HEADS_Q + head).to(tl.int64) * row_tokens + token % row_tokens
    tl.store(LSE + lse_offset, lse, mask=inside)
