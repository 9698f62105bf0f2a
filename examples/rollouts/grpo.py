"""GRPO from random weights: `deepspeed --num_gpus 2 examples/rollouts/grpo.py --stage 3 --seed 0`.

The prompt is a few digits; the answer counts on from the last, and 0 follows 9: 3 1 7 -> 8 9 0 1 2 3 4 5. Nothing shows
the model an answer: it draws answers with its own weights, and a function rewards them. Each update is generation with
the training engine, rewards, and one step of the policy gradient with the log-probabilities of generation itself.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed.inference import SamplingParams
from deepspeed.rollouts.logprobs import exact_logprobs
from deepspeed.rollouts.losses import grpo_advantages, grpo_loss, mismatch

PROMPT, ANSWER = 3, 8  # digits

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--updates", type=int, default=150)
parser.add_argument("--prompts", type=int, default=8, help="prompts of a rank in each update")
parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
parser.add_argument("--rate", type=float, default=1e-3)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--output", default="runs/rollouts", help="the folder for the figures of the run")
parser.add_argument("--local_rank", type=int, default=-1)
arguments = parser.parse_args()


def reward_of(prompt, answer):
    """The share of the digits that are one more than the digit before."""
    before = [prompt[-1], *answer]
    return sum(digit == (last + 1) % 10 for last, digit in zip(before, answer, strict=False)) / ANSWER


def padded(rows, value=0):
    """Rows of different lengths, padded on the right: causal attention does not look there."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, value).to(engine.device)


def mean(value):
    """The mean over all ranks."""
    total = torch.tensor(float(value), device=engine.device)
    deepspeed.comm.all_reduce(total)
    return total.item() / ranks


torch.manual_seed(arguments.seed)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=10,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": arguments.prompts * arguments.group,
        "optimizer": {"type": "Adam", "params": {"lr": arguments.rate}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": arguments.bf16},
        "zero_optimization": {"stage": arguments.stage, "stage3_param_persistence_threshold": 0},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 32},
        "steps_per_print": 10**9,
    },
)
rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
draw = torch.Generator().manual_seed(1000 * arguments.seed + rank)
figures = {
    "stage": arguments.stage,
    "seed": arguments.seed,
    "bf16": arguments.bf16,
    "rewards": [],
    "losses": [],
    "norms": [],
}
figures |= {"generate": [], "reward": [], "train": [], "largest_difference": [], "first_tokens": []}

for update in range(arguments.updates):
    begin = time.perf_counter()
    prompts = torch.randint(10, (arguments.prompts, PROMPT), generator=draw).tolist()
    seed = int(torch.randint(2**31, (), generator=draw))
    sampling = SamplingParams(max_new_tokens=ANSWER, temperature=1.0, seed=seed)
    rollouts = engine.rollout(prompts, sampling, n=arguments.group)
    generated = time.perf_counter()

    rewards = torch.tensor([reward_of(rollout.prompt, rollout.tokens) for rollout in rollouts], device=engine.device)
    advantages = grpo_advantages(rewards, arguments.group)
    rewarded = time.perf_counter()

    ids = padded([rollout.prompt + rollout.tokens for rollout in rollouts])
    values = padded([rollout.logprobs for rollout in rollouts], 0.0)
    mask = padded([[True] * len(rollout.tokens) for rollout in rollouts], False)
    logits, answers = engine(ids).logits[:, PROMPT - 1 : -1], ids[:, PROMPT:]
    logprobs = exact_logprobs(logits, answers, values)  # the values of generation: every ratio is 1
    loss = grpo_loss(logprobs, values, advantages, mask)
    engine.backward(loss)
    engine.step()
    trained = time.perf_counter()

    with torch.no_grad():  # how far a forward of the trained module is from generation, in log-probability
        own = logits.float().log_softmax(-1).gather(-1, answers[..., None])[..., 0]
        figures["largest_difference"].append(mismatch(own, values, mask).largest)
    figures["rewards"].append(mean(rewards.mean()))
    figures["losses"].append(mean(loss.detach()))
    figures["norms"].append(float(engine.get_global_grad_norm()))
    for name, seconds in (
        ("generate", generated - begin),
        ("reward", rewarded - generated),
        ("train", trained - rewarded),
    ):
        figures[name].append(seconds)
    if update < 5:
        figures["first_tokens"].append([rollout.tokens for rollout in rollouts])
    if rank == 0 and (update % 20 == 0 or update == arguments.updates - 1):
        times = ", ".join(f"{name} {1000 * figures[name][-1]:.0f} ms" for name in ("generate", "reward", "train"))
        print(f"update {update}: reward {figures['rewards'][-1]:.3f}, {times}", flush=True)

if rank == 0:
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"grpo-{'bf16-' if arguments.bf16 else ''}stage{arguments.stage}-seed{arguments.seed}.json"
    path.write_text(json.dumps(figures))
    print(f"{prompts[0]} is answered by {rollouts[0].tokens}; the figures are in {path}")
engine.destroy()
