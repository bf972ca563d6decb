"""Fine-tune a Hugging Face model on two ranks of this machine: checkpointed, killed, resumed, exported.

    python examples/train_hf.py                     # a small Llama with random weights, in build/hf/model
    python examples/train_hf.py --model DIRECTORY   # a causal language model that is on this disk

One rank is killed in the middle; torchrun starts all again, and they go on from the last checkpoint.  The
result in build/hf/trained is opened with ``from_pretrained`` and compared with the model before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from text import batches, standard_library, tokenize, train_tokenizer

import fxpipe

BUILD = Path("build/hf")
RANKS, MICROBATCHES, ROWS, SEQUENCE, VOCABULARY = 2, 8, 1, 64, 1024
KILLED = 1  # the rank that dies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=BUILD / "model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kill-at", type=int, default=17, help=f"the step in which rank {KILLED} dies")
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if "LOCAL_RANK" in os.environ:
        train_this_rank(options.model, options.steps, options.kill_at)
    else:
        run(options.model, options.steps, options.kill_at)


def run(model: Path, steps: int, kill_at: int) -> None:
    from transformers import AutoModelForCausalLM

    console = Console()
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    documents = standard_library(200_000)
    save_file(
        {"tokens": tokenize(documents, train_tokenizer(documents, VOCABULARY))}, BUILD / "tokens.safetensors"
    )
    if not model.exists():
        make_model(model)
    console.rule(f"torchrun, {RANKS} ranks, {steps} steps; rank {KILLED} is killed in step {kill_at}")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1",
        "--nproc-per-node", str(RANKS), __file__,
        "--model", str(model), "--steps", str(steps), "--kill-at", str(kill_at),
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    console.rule("opened with from_pretrained")
    for name, directory in {"before": model, "after": BUILD / "trained"}.items():
        opened = AutoModelForCausalLM.from_pretrained(directory).eval()
        with torch.no_grad():
            loss = opened(**batch_of(steps)).loss
        console.print(f"{name}: loss {float(loss):.4f} on text that it was not trained on ({directory})")


def make_model(directory: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQUENCE,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The same on all ranks, and after a restart."""
    tokens = load_file(BUILD / "tokens.safetensors")["tokens"]
    return next(batches(tokens, batch=MICROBATCHES * ROWS, sequence=SEQUENCE, seed=step))


def train_this_rank(directory: Path, steps: int, kill_at: int) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):  # no rank ever holds all weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    example = {name: t[:ROWS] for name, t in batch_of(0).items()}
    pipe = fxpipe.compile(model, example, ranks=RANKS, microbatches=MICROBATCHES, schedule="zb-h1")
    pipe.load_state_dict(directory)
    optimizer = pipe.optimizer(
        torch.optim.AdamW,
        lr=1e-3,
        clip_grad_norm=1.0,
        groups=[{"params": "*norm*", "weight_decay": 0.0}],
    )
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rank = pipe.runtime.rank
    console = Console(quiet=rank != 0)
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    with fxpipe.Checkpointer(
        pipe, BUILD / "checkpoints", optimizer=optimizer, state={"rate": rate}, every=5
    ) as checkpoints:
        if checkpoints.resume():
            console.print(f"resumed after {pipe.step_number} steps")
        while pipe.step_number < steps:
            if first_attempt and rank == KILLED and pipe.step_number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = pipe.step(batch_of(pipe.step_number))
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            checkpoints.step()
            console.print(f"step {pipe.step_number - 1:3d}  loss {float(loss):.4f}")
    pipe.export(BUILD / "trained", like=directory)


if __name__ == "__main__":
    main()
