"""Fine-tune a chat model on chats: `deepspeed --num_gpus 2 train.py --model FOLDER --data chats.jsonl`."""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="a Hugging Face folder with a chat template")
parser.add_argument("--data", required=True, help="JSON lines with messages")
parser.add_argument("--output", default="tuned", help="the folder that is written")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--length", type=int, default=128, help="tokens of a chat at most")
parser.add_argument("--held_out", type=int, default=32, help="chats that are not trained on")
parser.add_argument("--lora", type=int, default=0, help="rank of LoRA adapters; 0 trains the whole model")
parser.add_argument("--config", default="ds_config.json")
parser.add_argument("--local_rank", type=int, default=-1)
arguments = parser.parse_args()
if Path(arguments.output).exists():  # adapters beside the weights of an earlier run would be loaded with those
    raise SystemExit(f"{arguments.output} exists: name a new folder with --output")

tokenizer = AutoTokenizer.from_pretrained(arguments.model)
pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def encode(messages):
    """Tokens of a chat, and how many of them are the prompt."""
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    return whole[: arguments.length], len(prompt)


def collate(chats):
    """Padded to the longest; labels of -100 (the prompt and the padding) do not count."""
    longest = max(len(tokens) for tokens, _ in chats)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for tokens, prompt in chats:
        padding = longest - len(tokens)
        batch["input_ids"].append(tokens + [pad_id] * padding)
        batch["attention_mask"].append([1] * len(tokens) + [0] * padding)
        batch["labels"].append(([-100] * prompt + tokens[prompt:] + [-100] * padding)[:longest])
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def loss_of(batch):
    """The loss summed over the tokens of the answers, and their number."""
    batch = {name: rows.to(engine.device) for name, rows in batch.items()}
    labels = batch.pop("labels")[:, 1:]
    logits = engine(**batch).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"), (labels != -100).sum()


def mean(total, items):
    """The loss per token over all ranks."""
    both = torch.stack([total.detach(), items.float()])
    deepspeed.comm.all_reduce(both)
    return (both[0] / both[1]).item()


def held_out_loss():
    """Each rank takes its share, of equal length: at stage 3 all ranks call the model equally often."""
    engine.eval()
    with torch.no_grad():
        losses = [loss_of(collate([chat])) for chat in held_out[rank : len(held_out) // ranks * ranks : ranks]]
    engine.train()
    return mean(sum(total for total, _ in losses), sum(items for _, items in losses))


with open(arguments.data) as lines:
    chats = [encode(json.loads(line)["messages"]) for line in lines]
chats = [(tokens, prompt) for tokens, prompt in chats if len(tokens) > prompt]  # cut within the prompt: no answer
held_out, chats = chats[: arguments.held_out], chats[arguments.held_out :]

model = AutoModelForCausalLM.from_pretrained(arguments.model)
if arguments.lora:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=arguments.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, settings)
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    model_parameters=[p for p in model.parameters() if p.requires_grad],
    training_data=chats,
    collate_fn=collate,
    config=arguments.config,
)
rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()

before = held_out_loss()
batches = iter(deepspeed.utils.RepeatingLoader(loader))
while engine.global_steps < arguments.steps:
    total, items = loss_of(next(batches))
    engine.backward(total, num_items=items.item())
    engine.step()
    shown = mean(total, items)
    if rank == 0 and engine.was_step_applied():
        print(f"step {engine.global_steps}: {shown:.4f} nats a token", flush=True)
after = held_out_loss()

with deepspeed.zero.GatheredParameters(list(model.parameters())):
    if rank == 0:
        model.save_pretrained(arguments.output)
        tokenizer.save_pretrained(arguments.output)
        print(f"held out: {before:.4f} before, {after:.4f} after; {arguments.output}")
engine.destroy()
