"""MaxText at test size: its own configuration, its real trainer and real text."""

import json
import os
import pathlib
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import maxtext

MAXTEXT = pathlib.Path(maxtext.__file__).parent
TINY = (
    "hardware=cpu model_name=default override_model_config=true decoder_block=llama2 base_emb_dim=64 "
    "base_num_query_heads=4 base_num_kv_heads=2 head_dim=16 base_mlp_dim=128 base_num_decoder_layers=2 "
    "max_target_length=128 per_device_batch_size=2 skip_jax_distributed_system=true run_name=test "
    "enable_goodput_recording=false enable_checkpointing=false"
).split()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """MaxText keys that train on packed documents: modules of Python's standard library, tokenized."""
    library = pathlib.Path(os.__file__).parent
    documents = [path.read_text(errors="ignore")[:2000] for path in sorted(library.glob("*.py"))]
    path = tmp_path_factory.mktemp("text") / "text.parquet"
    pq.write_table(pa.table({"text": documents}), path)
    tokenizer = MAXTEXT / "assets" / "tokenizers" / "tokenizer.llama2"
    return (
        f"dataset_type=grain grain_file_type=parquet grain_train_files={path} tokenizer_path={tokenizer} "
        "tokenizer_type=sentencepiece packing=true vocab_size=32000"
    ).split()


@pytest.fixture
def train(tmp_path):
    """Runs a trainer to its end and returns its losses, or its exit code and last words."""

    def run(*keys, trainer=("-m", "maxtext.trainers.pre_train.train"), environment=(), devices=1, fails=False):
        metrics = tmp_path / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        keys = [*TINY, f"base_output_directory={tmp_path}", f"metrics_file={metrics}", *keys]
        flags = f"--xla_force_host_platform_device_count={devices}"
        env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", **dict(environment)}
        command = [sys.executable, *trainer, str(MAXTEXT / "configs" / "base.yml"), *keys]
        process = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path, check=False)
        output = process.stdout + process.stderr
        if fails:
            return process.returncode, output
        assert process.returncode == 0, output[-3000:]
        losses = [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]
        run.output = output
        return losses

    return run
