"""MaxText's own trainer on real packed text, `aiter_flash` beside `dot_product`."""

import numpy as np
import pytest

STEPS = 20


@pytest.mark.parametrize(("dtype", "tolerance"), (("float32", 1e-4), ("bfloat16", 2e-2)))
def test_losses_are_those_of_dot_product(dtype, tolerance, train, text):
    keys = (*text, f"steps={STEPS}", f"dtype={dtype}")
    expected = train("attention=dot_product", *keys)
    actual = train("attention=aiter_flash", *keys)
    assert len(actual) == len(expected) == STEPS and actual[-1] < actual[0] - 0.1
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    assert actual != expected  # another kernel did compute them


def test_our_launcher_is_the_stock_trainer(train, text):
    keys = ("attention=jax_aiter_flash", *text, "steps=5", "dtype=float32")
    ours = train(*keys, "aiter_attention_provider=host", trainer=("-m", "maxtext_aiter.cli.main", "train"))
    assert ours == train(*keys)


def test_the_provider_can_be_forced(train):
    synthetic = ("dataset_type=synthetic", "max_segments_per_seq=4", "steps=3", "vocab_size=256", "dtype=float32")
    ours = lambda provider: train(
        *synthetic, "attention=aiter_flash", f"aiter_attention_provider={provider}",
        trainer=("-m", "maxtext_aiter.cli.main", "train"),
    )
    np.testing.assert_allclose(ours("host"), ours("xla"), rtol=0, atol=1e-4)


def test_fsdp_and_tensor_parallel(train):
    keys = ("dataset_type=synthetic", "max_segments_per_seq=4", "steps=3", "vocab_size=256", "dtype=float32")
    mesh = ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "per_device_batch_size=1")
    sharded = train("attention=aiter_flash", *keys, *mesh, devices=4)
    expected = train("attention=dot_product", *keys, *mesh, devices=4)
    np.testing.assert_allclose(sharded, expected, rtol=0, atol=1e-4)


def test_disabled_the_stock_trainer_does_not_know_the_name(train):
    keys = ("attention=aiter_flash", "dataset_type=synthetic", "steps=1", "vocab_size=256")
    code, output = train(*keys, environment={"MAXTEXT_AITER_DISABLE": "1"}, fails=True)
    assert code and "Unexpected attention kernel" in output


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        (("attn_logits_soft_cap=50",), "does not support attn_logits_soft_cap=50.0"),
        (("ici_context_parallelism=2", "ici_fsdp_parallelism=1"), "ici_context_parallelism"),
        (("ici_tensor_parallelism=4", "base_num_kv_heads=2"), "2 key/value heads cannot be split over 4 devices"),
    ),
    ids=("soft-cap", "context", "heads"),
)
def test_what_is_not_supported_names_its_key(keys, message, train):
    common = ("attention=aiter_flash", "dataset_type=synthetic", "max_segments_per_seq=4", "steps=1", "vocab_size=256")
    trainer = ("-m", "maxtext_aiter.cli.main", "train")
    code, output = train(*common, *keys, devices=4 if "tensor" in keys[0] else 2, trainer=trainer, fails=True)
    last = output.strip().splitlines()[-1]
    assert code == 1 and message in last and "attention=dot_product" in last, output[-2000:]
    assert "Traceback" not in output
