"""Segment ids, as packed rows carry them, as the `cu_seqlens` that varlen kernels take; in the graph."""

import jax
import jax.numpy as jnp


def segments_to_cu_seqlens(segment_ids: jax.Array, num_sequences: int) -> tuple[jax.Array, jax.Array]:
    """The runs of equal ids in each row, as consecutive sequences of the flattened rows.

    Args:
      segment_ids: [batch, seq], int32.
      num_sequences: room for that many runs in all.

    Returns:
      cu_seqlens: [num_sequences + 1], int32; unused places hold batch · seq (empty sequences).
      exact: bool scalar: these sequences mean the same as the ids do. False where there are more runs
        than room, where an id is negative, or where a row's ids do not grow from run to run (0,
        padding, may come once anywhere), since an id may then have several runs.
    """
    batch, seq = segment_ids.shape
    starts = jnp.concatenate(
        [jnp.ones((batch, 1), bool), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    (cu_seqlens,) = jnp.nonzero(starts.reshape(-1), size=num_sequences + 1, fill_value=batch * seq)
    largest_before = jnp.pad(jax.lax.cummax(segment_ids, axis=1), ((0, 0), (1, 0)))[:, :-1]
    padding = segment_ids == 0
    grows = padding | (segment_ids > largest_before) | ~starts
    single_padding = (starts & padding).sum(axis=1) <= 1
    exact = (starts.sum() <= num_sequences) & grows.all() & single_padding.all() & (segment_ids >= 0).all()
    return cu_seqlens.astype(jnp.int32), exact
