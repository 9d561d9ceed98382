"""One suite for every attention provider: the same cases against the same float64 reference."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext_aiter import dispatch
from maxtext_aiter.providers import ATTENTION_PROVIDERS
from tests.cases import CASES, DTYPES
from tests.reference import assert_close, plain, reference, visible

PROVIDERS = [p for p in ATTENTION_PROVIDERS if p.supports(CASES[0].spec("float32"), "cpu") is None]


@pytest.fixture(scope="session")
def seed():
    """Fresh inputs on every run, the same for every provider."""
    return int.from_bytes(os.urandom(4), "little")


def test_the_host_and_xla_providers_are_here():
    assert {"host", "xla"} <= {p.name for p in PROVIDERS}


def _pick(x, layout, rows, is_lse=False):
    """The part of an array that belongs to one sequence."""
    return np.asarray(x)[:, rows] if is_lse and layout.kind == "varlen" else np.asarray(x)[rows]


@functools.cache
def _problem(case, dtype, seed):
    """Arrays, the float64 results and plain JAX's, computed once for all providers."""
    spec, sequence = case.spec(dtype), case.sequence()
    q, k, v, dout, dlse = case.arrays(dtype, np.random.default_rng(seed))
    exact = reference(spec, q, k, v, sequence, dout, dlse)
    dlse = jnp.where(jnp.isneginf(exact[1]), 0.0, dlse)  # as the op hands it to a provider
    return (q, k, v, dout, dlse), exact, _plain_with_gradients(spec, sequence, q, k, v, dout, dlse)


def _plain_with_gradients(spec, sequence, q, k, v, dout, dlse):
    @jax.jit
    def run(q, k, v, dout, dlse):
        values, vjp = jax.vjp(lambda *x: plain(spec, *x, sequence), q, k, v)
        return (*values, *vjp((dout, dlse)))

    return run(q, k, v, dout, dlse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.name)
def test_against_float64(provider, case, dtype, seed):
    spec, sequence = case.spec(dtype), case.sequence()
    if reason := provider.supports(spec, "cpu"):
        with pytest.raises(ValueError, match=provider.name):
            dispatch.choose(spec, "cpu", provider.name)
        assert len(reason) > 10
        return
    (q, k, v, dout, dlse), exact, plain_results = _problem(case, dtype, seed)

    out, lse = jax.jit(functools.partial(provider.forward, spec))(q, k, v, *sequence)
    gradients = jax.jit(functools.partial(provider.backward, spec))(q, k, v, out, lse, dout, dlse, *sequence)
    results = (out, lse, *gradients)
    assert [x.dtype for x in results] == [jnp.dtype(dtype), jnp.float32] + [jnp.dtype(dtype)] * 3

    keys_seen = visible(spec, sequence).sum(-1)
    for i, (rows_q, rows_k) in enumerate(case.blocks()):
        one_key = (keys_seen[0, rows_q] if case.kind == "varlen" else keys_seen[rows_q]).max(initial=0) <= 1
        for name, actual, truth, ordinary in zip(("out", "lse", "dq", "dk", "dv"), results, exact, plain_results):
            rows = rows_k if name in ("dk", "dv") else rows_q
            pick = functools.partial(_pick, layout=spec.layout, rows=rows, is_lse=name == "lse")
            tolerance_dtype = "float32" if name == "lse" and dtype == "float32" else dtype
            what = f"{name} of sequence {i}, seed {seed}"
            assert_close(pick(actual), pick(truth), pick(ordinary), tolerance_dtype, what, one_key)
    # Outside every sequence: zeros and -inf, never what the buffer held before.
    np.testing.assert_array_equal(np.asarray(lse) == -np.inf, exact[1] == -np.inf)
    for actual, truth in zip((out, *gradients), (exact[0], *exact[2:])):
        np.testing.assert_array_equal(np.asarray(actual, np.float32)[truth == 0], 0)


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.name)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("varlen", "segments", "seq1023x1024-causal")], ids=str)
def test_repeats_bit_for_bit(provider, case, rng):
    spec, sequence = case.spec("bfloat16"), case.sequence()
    if provider.supports(spec, "cpu"):
        return
    q, k, v, dout, dlse = case.arrays("bfloat16", rng)

    def run():
        out, lse = jax.jit(functools.partial(provider.forward, spec))(q, k, v, *sequence)
        return out, lse, *jax.jit(functools.partial(provider.backward, spec))(q, k, v, out, lse, dout, dlse, *sequence)

    for first, second in zip(run(), run()):
        np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))
