"""Reinforcement learning: groups of answers to a prompt, rewarded relative to their group (as GRPO does).

    torchrun --nproc-per-node 4 examples/train_grpo.py

A prompt is some digits, and a token of an answer is worth 1 if it is the prompt's last digit.  Each
microbatch is a group: the answers to one prompt.  Answers end when they like to, so that microbatches have
lengths of their own, and a group whose answers have all ended leaves the list while the others go on.
``evaluate`` gives the logits by which the next tokens are drawn; a step has as many microbatches as there are
groups.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor

import fxpipe

DIGITS, START, END, PADDING = 10, 10, 11, 12
PROMPT, ANSWER, ANSWERS = (
    (3, 9),
    8,
    8,
)  # the digits of a prompt, the most tokens of an answer, those of a group
LENGTH = PROMPT[1] + 1 + ANSWER
CLIP = 0.2


def loss_fn(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The clipped objective of PPO, summed over the tokens of answers, and their number."""
    chosen = log_probabilities(output["logits"], batch["input_ids"])
    ratio = (chosen - batch["before"][:, 1:]).exp()
    gain = batch["advantage"][:, 1:]
    worse = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    counted = batch["counted"][:, 1:]
    return -(worse * counted).sum(), counted.sum()


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Of each token but the first."""
    scores = logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def microbatch(tokens: Tensor) -> dict[str, Tensor]:
    """The leaves of a group, without what its answers are worth."""
    nothing = torch.zeros(tokens.shape)
    return {"input_ids": tokens, "before": nothing, "advantage": nothing, "counted": nothing}


def prompt(random: torch.Generator) -> Tensor:
    """Each row the same: some digits and the start of the answer."""
    number = int(torch.randint(*PROMPT, (), generator=random))
    digits = torch.randint(DIGITS, (number,), generator=random)
    return torch.cat([digits, torch.tensor([START])]).expand(ANSWERS, -1)


def answered(pipe: fxpipe.Pipeline, groups: list[Tensor], random: torch.Generator) -> list[dict[str, Tensor]]:
    """The groups with their answers, and the logarithms of the probabilities by which these were drawn."""
    done = [microbatch(tokens) for tokens in groups]
    open_groups = [*range(len(groups))]
    for _ in range(ANSWER):
        logits = pipe.evaluate([done[k] for k in open_groups], outputs=["logits"], outputs_on="all")
        for k, scores in zip([*open_groups], logits.listed["logits"], strict=True):
            tokens, last = done[k]["input_ids"], scores[:, -1].log_softmax(-1)
            drawn = torch.multinomial(last.exp(), 1, generator=random)
            ended = (tokens == END).any(1, keepdim=True)
            drawn = torch.where(ended, PADDING, drawn)
            new = {
                "input_ids": drawn,
                "before": last.gather(-1, drawn).masked_fill(ended, 0.0),
                "advantage": torch.zeros(drawn.shape),
                "counted": (~ended).float(),
            }
            done[k] = {name: torch.cat([x, new[name]], 1) for name, x in done[k].items()}
            if (done[k]["input_ids"] == END).any(1).all():
                open_groups.remove(k)
        if not open_groups:
            break
    return done


def rewards(group: dict[str, Tensor]) -> Tensor:
    """Of each answer, the number of its tokens that are the last digit of the prompt."""
    tokens, counted = group["input_ids"], group["counted"].bool()
    start = int((tokens[0] == START).nonzero()[0])
    return ((tokens == tokens[:, start - 1 : start]) & counted).sum(1).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4,
        num_hidden_layers=options.layers, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    pipe = fxpipe.compile(
        LlamaForCausalLM(config), microbatch(torch.zeros(ANSWERS, LENGTH, dtype=torch.long)), loss_fn=loss_fn,
        ranks=4, microbatches=options.groups, schedule="zb", dimensions={"sequence": LENGTH},
        outputs=["logits"], evaluation=True,
    )  # fmt: skip
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=4e-3, clip_grad_norm=1.0)
    random = torch.Generator().manual_seed(1)  # the same on all ranks, which draw the same tokens
    for step in range(1, options.steps + 1):
        groups = answered(pipe, [prompt(random) for _ in range(options.groups)], random)
        worth = [rewards(group) for group in groups]
        for group, reward in zip(groups, worth, strict=True):
            relative = (reward - reward.mean()) / (reward.std() + 1e-4)
            group["advantage"] = relative[:, None] * group["counted"]
        groups = [group for group, reward in zip(groups, worth, strict=True) if reward.std() > 0]
        for _ in range(2 if groups else 0):  # twice on the same answers, as their ratio is clipped
            pipe.step(groups)
            optimizer.step()
            optimizer.zero_grad()
        if pipe.runtime.rank == 0 and (step % 5 == 0 or step == 1):
            lengths = [group["input_ids"].shape[1] for group in groups]
            mean = float(torch.cat(worth).mean())
            print(f"step {step:3d}  reward {mean:.2f}  {len(groups)} groups of {lengths} tokens")


if __name__ == "__main__":
    main()
