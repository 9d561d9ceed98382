"""The public functions under JAX's transformations, and their errors."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxtext_aiter import flash_attention, flash_attention_varlen
from maxtext_aiter.ops.attention import RESIDUAL_NAME
from tests.reference import FLOOR, error, reference
from tests.cases import CASES, Case

TARGETS = ("maxtext_aiter_attention_fwd", "maxtext_aiter_attention_bwd")
CASE = {case.name: case for case in CASES}


def _call(case, dtype="float32", **kwargs):
    """The public function for a case, of q, k, v alone."""
    spec, sequence = case.spec(dtype), case.sequence()
    kwargs = {"window": spec.window, "return_lse": True, **kwargs}
    if case.kind == "varlen":
        layout = spec.layout
        lengths = dict(zip(("seqlens_q", "seqlens_k"), sequence[2:]))
        return lambda q, k, v: flash_attention_varlen(
            q, k, v, *sequence[:2], layout.max_seqlen_q, layout.max_seqlen_k, **lengths, **kwargs
        )
    if case.kind == "segments":
        return lambda q, k, v: flash_attention(q, k, v, segment_ids=sequence[0], max_segments=4, **kwargs)
    return functools.partial(flash_attention, **kwargs)


def _value_and_gradients(function, q, k, v, dout, dlse):
    (out, lse), vjp = jax.vjp(function, q, k, v)
    return out, lse, *vjp((dout, dlse))


def _assert_same(actual, expected, dtype="float32"):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(a, e) <= 16 * FLOOR[dtype]


@pytest.mark.parametrize("provider", (None, "xla"))
@pytest.mark.parametrize("name", ("group2", "varlen-empty", "varlen-gaps", "segments", "segments-scattered"))
def test_gradients_flow_through_out_and_lse(name, provider, rng):
    case = CASE[name]
    q, k, v, dout, dlse = case.arrays("float32", rng)
    exact = reference(case.spec("float32"), q, k, v, case.sequence(), dout, dlse)
    dlse = jnp.where(jnp.isneginf(exact[1]), jnp.nan, dlse)  # a row without keys takes no gradient, not even NaN
    function = _call(case, provider=provider)
    for run in (_value_and_gradients, jax.jit(_value_and_gradients, static_argnums=0)):
        for actual, truth in zip(run(function, q, k, v, dout, dlse), exact):
            assert error(actual, truth) < 16 * FLOOR["float32"]


def test_half_of_the_outputs_may_be_used(rng):
    q, k, v, dout, dlse = CASE["group2"].arrays("float32", rng)
    both = _call(CASE["group2"])
    for index, cotangent in enumerate((dout, dlse)):
        alone = jax.vjp(lambda *x: both(*x)[index], q, k, v)[1](cotangent)
        zeros = [jnp.zeros_like(dout), jnp.zeros_like(dlse)]
        zeros[index] = cotangent
        _assert_same(alone, jax.vjp(both, q, k, v)[1](tuple(zeros)))


def test_out_alone_costs_one_backward_call(rng):
    q, k, v, *_ = CASE["group2"].arrays("float32", rng)
    loss = lambda q, k, v: flash_attention(q, k, v, causal=True).sum()
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).as_text()
    assert [len(re.findall(f"@{t}\\(", text)) for t in TARGETS] == [1, 1]


def test_partial_results_merge(rng):
    """Attention over two halves of the keys, merged through their LSEs, is attention over all; gradients too."""
    case = Case("merge", (96, 160))
    q, k, v, dout, _ = case.arrays("float32", rng)

    def merged(q, k, v):
        parts = [flash_attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 60), slice(60, None))]
        lse = functools.reduce(jnp.logaddexp, [lse for _, lse in parts])
        return sum(out * jnp.exp(part - lse).swapaxes(1, 2)[..., None] for out, part in parts)

    whole = lambda q, k, v: flash_attention(q, k, v)
    for function in (merged, whole):
        out, vjp = jax.vjp(function, q, k, v)
        exact = reference(case.spec("float32"), q, k, v, (), dout)
        for actual, truth in zip((out, *vjp(dout)), (exact[0], *exact[2:])):
            assert error(actual, truth) < 16 * FLOOR["float32"]


@pytest.mark.parametrize("name", ("group2", "segments"))
@pytest.mark.parametrize("mapped", ((0, 0, 0), (0, None, None), (2, 1, 3)))
def test_vmap_rows(name, mapped, rng):
    case = CASE[name]
    function = _call(case)
    batches = [case.arrays("float32", rng) for _ in range(3)]
    arrays = [jnp.stack(x) for x in zip(*batches)]
    q, k, v = (jnp.moveaxis(x, 0, d) if d is not None else x[0] for x, d in zip(arrays, mapped))
    dout, dlse = arrays[3:]
    run = functools.partial(_value_and_gradients, function)
    actual = jax.vmap(run, in_axes=(*mapped, 0, 0))(q, k, v, dout, dlse)
    for i in range(3):
        each = (x if d is None else jnp.take(x, i, axis=d) for x, d in zip((q, k, v), mapped))
        _assert_same([x[i] for x in actual], run(*each, dout[i], dlse[i]))


def test_vmap_varlen_with_batched_lengths(rng):
    lengths = np.array([[[10, 0, 50], [30, 40, 1], [5, 5, 5]], [[20, 7, 50], [30, 0, 1], [5, 9, 5]]], np.int32)
    cu_q, cu_k = (jnp.asarray(np.pad(np.cumsum(x, 1), ((0, 0), (1, 0))), jnp.int32) for x in lengths)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 90, h, 24)), jnp.float32) for h in (4, 2, 2))
    dout = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    def run(q, k, v, cu_q, cu_k, dout):
        function = lambda q, k, v: flash_attention_varlen(q, k, v, cu_q, cu_k, 50, 50, causal=True, return_lse=True)
        (out, lse), vjp = jax.vjp(function, q, k, v)
        return out, lse, *vjp((dout, jnp.where(jnp.isneginf(lse), 0.0, jnp.sin(lse))))

    actual = jax.vmap(run)(q, k, v, cu_q, cu_k, dout)
    for i in range(3):
        _assert_same([x[i] for x in actual], run(q[i], k[i], v[i], cu_q[i], cu_k[i], dout[i]))
    shared = jax.vmap(run, in_axes=(0, 0, 0, None, None, 0))(q, k, v, cu_q[1], cu_k[1], dout)
    _assert_same([x[1] for x in shared], run(q[1], k[1], v[1], cu_q[1], cu_k[1], dout[1]))


def test_vmap_of_vmap(rng):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 3, 2, 20, h, 16)), jnp.float32) for h in (4, 2, 2))
    out = jax.vmap(jax.vmap(functools.partial(flash_attention, causal=True)))(q, k, v)
    flat = (x.reshape(-1, *x.shape[3:]) for x in (q, k, v))
    _assert_same(out, flash_attention(*flat, causal=True).reshape(out.shape))


@pytest.mark.parametrize("keep", (True, False))
def test_checkpoint_keeps_the_named_residuals(keep, rng):
    q, k, v, dout, _ = CASE["group2"].arrays("float32", rng)
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(RESIDUAL_NAME) if keep else policies.nothing_saveable
    # In a scan, as MaxText's layers are: there XLA cannot merge a second forward with the first.
    layer = jax.checkpoint(lambda x, _: (flash_attention(x, k, v, causal=True), None), policy=policy)
    loss = lambda q: (jax.lax.scan(layer, q, length=2)[0] * dout).sum()
    plain = lambda q: (flash_attention(flash_attention(q, k, v, causal=True), k, v, causal=True) * dout).sum()
    _assert_same(jax.jit(jax.grad(loss))(q), jax.grad(plain)(q))
    text = jax.jit(jax.grad(loss)).lower(q).compile().as_text()
    calls = [len(re.findall(f'custom_call_target="{t}"', text)) for t in TARGETS]
    assert calls == ([1, 1] if keep else [2, 1])


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("name", ("dense", "segments"))
def test_shard_map(name, check_vma, rng):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    case = Case("dense", (40, 40), heads=(4, 2), batch=2, window=(-1, 0)) if name == "dense" else CASE["segments"]
    q, k, v, dout, dlse = case.arrays("float32", rng)
    ids = case.sequence() or (jnp.zeros(q.shape[:2], jnp.int32),)
    arrays, lse, rows = P("data", None, "tensor"), P("data", "tensor"), P("data")

    def local(q, k, v, dout, dlse, ids):
        function = functools.partial(
            flash_attention, window=case.window, return_lse=True, segment_ids=ids, max_segments=4
        )
        return _value_and_gradients(function, q, k, v, dout, dlse)

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(arrays,) * 4 + (lse, rows), out_specs=(arrays, lse) + (arrays,) * 3,
        check_vma=check_vma,
    )
    _assert_same(jax.jit(sharded)(q, k, v, dout, dlse, *ids), local(q, k, v, dout, dlse, *ids))
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    operands = [put(x, arrays) for x in (q, k, v, dout)] + [put(dlse, lse), put(ids[0], rows)]
    text = jax.jit(sharded).lower(*operands).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text


def test_export_round_trip(rng):
    q, k, v, dout, _ = CASE["group2"].arrays("float32", rng)
    gradients = jax.grad(lambda q, k, v: (flash_attention(q, k, v, causal=True) * dout).sum(), (0, 1, 2))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(t) for t in TARGETS]
    exported = jax.export.export(jax.jit(gradients), disabled_checks=allowed)(q, k, v)
    restored = jax.export.deserialize(exported.serialize())
    _assert_same(restored.call(q, k, v), gradients(q, k, v))


def test_export_for_other_platforms_uses_plain_jax(rng):
    q, k, v, *_ = CASE["group2"].arrays("float32", rng)
    exported = jax.export.export(jax.jit(functools.partial(flash_attention, causal=True)), platforms=["cuda"])(q, k, v)
    assert not any(t in exported.mlir_module() for t in TARGETS)


@pytest.mark.parametrize("name", ("group2", "varlen"))
def test_no_transpose_or_copy_around_the_call(name, rng):
    case = CASE[name]
    q, k, v, dout, dlse = case.arrays("bfloat16", rng)
    function = _call(case, "bfloat16", return_lse=False)
    run = jax.jit(lambda q, k, v, dout: jax.vjp(function, q, k, v)[1](dout))
    text = run.lower(q, k, v, dout).compile().as_text()
    assert all(t in text for t in TARGETS)
    moved = re.findall(r"= (?:bf16|f32)\[[\d,]+\]\S* (?:transpose|copy|fusion)\(.*", text)
    assert not moved, moved


# --- no leak --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", (1, 2, 3, 0))
def test_documents_do_not_see_each_other(changed, rng):
    """Changing every token of one document, or of the padding, leaves all others bitwise as they were."""
    case = CASE["segments"]
    (ids,) = case.sequence()
    arrays = case.arrays("bfloat16", rng)[:4]
    here = (ids == changed)[..., None, None]
    others = [jnp.where(here, x, y) for x, y in zip(case.arrays("bfloat16", rng)[:4], arrays)]

    def run(q, k, v, dout):
        out, vjp = jax.vjp(_call(case, "bfloat16", return_lse=False), q, k, v)
        return out, *vjp(dout)

    for before, after in zip(run(*arrays), run(*others)):
        np.testing.assert_array_equal(np.asarray(before)[~here[..., 0, 0]], np.asarray(after)[~here[..., 0, 0]])
    changed_out = np.asarray(run(*arrays)[0]) != np.asarray(run(*others)[0])
    assert changed_out[here[..., 0, 0]].any(axis=-1).all()


# --- errors ---------------------------------------------------------------------------------------------

_Q, _K = jnp.zeros((2, 8, 4, 16)), jnp.zeros((2, 8, 2, 16))
_CU = jnp.array([0, 8, 16], jnp.int32)
_VQ, _VK = _Q.reshape(16, 4, 16), _K.reshape(16, 2, 16)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    (
        (lambda: flash_attention(_Q[0], _K, _K), ValueError, r"q has shape \(8, 4, 16\)"),
        (lambda: flash_attention(_Q, _K[:, :, :1].repeat(3, 2), _K[:, :, :1].repeat(3, 2)), ValueError,
         "4 query heads are not a multiple of 3"),
        (lambda: flash_attention(_Q, _K.astype(jnp.bfloat16), _K), TypeError, "differ in dtype: float32, bfloat16"),
        (lambda: flash_attention(*(x.astype(jnp.int32) for x in (_Q, _K, _K))), TypeError, "int32; supported"),
        (lambda: flash_attention(_Q, _K[..., :8], _K[..., :8]), ValueError, "differ in head_dim: 16 and 8"),
        (lambda: flash_attention(_Q, _K, _K[:, :4]), ValueError, "k and v differ in more than head_dim"),
        (lambda: flash_attention(_Q[:1], _K, _K), ValueError, "differ in batch: 1 and 2"),
        (lambda: flash_attention(_Q, _K, _K, window=(-2, 0)), ValueError, r"window is \(-2, 0\)"),
        (lambda: flash_attention(_Q, _K, _K, window=3), TypeError, "window must be two Python integers"),
        (lambda: jax.jit(lambda s: flash_attention(_Q, _K, _K, scale=s))(1.0), TypeError, "scale must be a Python"),
        (lambda: flash_attention(_Q, _K, _K, scale=float("nan")), ValueError, "scale is nan"),
        (lambda: flash_attention(_Q, _K, _K, provider="nobody"), ValueError, "no attention provider is called 'nobody'"),
        (lambda: flash_attention(_Q, _K, _K, segment_ids=jnp.zeros((2, 8))), TypeError, "segment_ids is float32"),
        (lambda: flash_attention(_Q, _K, _K, segment_ids=jnp.zeros((8,), jnp.int32)), ValueError,
         r"segment_ids has shape \(8,\) where \(2, 8\)"),
        (lambda: flash_attention(_Q, _K, _K, max_segments=3), ValueError, "max_segments is given without"),
        (lambda: flash_attention_varlen(_Q, _K, _K, _CU, _CU, 8, 8), ValueError, r"\[total, heads, head_dim\] is needed"),
        (lambda: flash_attention_varlen(_VQ, _VK, _VK, _CU.astype(jnp.float32), _CU, 8, 8), TypeError,
         "cu_seqlens_q is float32; int32"),
        (lambda: flash_attention_varlen(_VQ, _VK, _VK, _CU, _CU[:2], 8, 8), ValueError,
         r"cu_seqlens_k has shape \(2,\) where \(3,\)"),
        (lambda: flash_attention_varlen(_VQ, _VK, _VK, _CU[:1], _CU[:1], 8, 8), ValueError, "cu_seqlens_q has shape"),
        (lambda: flash_attention_varlen(_VQ, _VK, _VK, _CU, _CU, 8.5, 8), TypeError, "max_seqlen_q must be a Python"),
        (lambda: flash_attention_varlen(_VQ, _VK, _VK, _CU, _CU, 8, 8, seqlens_q=_CU[:2]), ValueError,
         "given together"),
    ),
)
def test_errors_say_what_is_wrong(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
